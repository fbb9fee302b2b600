"""The shape of a telemetry snapshot: one scheduler process at one instant. The web turns it into JSON as it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TierRow:
    """A tier over all pools of the process. Rates are over the last 5 s, attainment and TTFT over the last 60 s."""

    waiting: int
    oldest_wait: float
    running: int
    tokens_per_s: float
    requests_per_s: float
    attainment: float | None  # None: nothing was judged
    attained: int
    judged: int
    ttft_p95: float | None


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine. `busy`: part of the last 10 s in which it computed; `batch_mean`: sequences per step in that time."""

    model: str
    replica: int
    state: str
    message: str
    running: int
    waiting: int
    kv_usage: float
    busy: float
    batch_mean: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A GPU as its driver reports it; memory in bytes, utilisation 0..1."""

    name: str
    utilisation: float
    memory_used: int
    memory_total: int


@dataclass(frozen=True, slots=True)
class EventRow:
    """A change of policy, degradation level or batch cap, in a sentence. `at` is Unix time."""

    at: float
    model: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`at` is Unix time; `seq` grows by one with each snapshot of an epoch."""

    at: float
    scheduler: str
    epoch: int
    seq: int
    policy: str
    policy_version: int
    degradation_level: int
    tiers: dict[str, TierRow]
    engines: list[EngineRow]
    gpus: list[GpuRow]
    events: list[EventRow]  # the last 20, oldest first

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def queue_status(self) -> dict[str, Any]:
        """The part of it that `GET /v1/queue/status` answers."""
        return {
            "policy": self.policy,
            "policy_version": self.policy_version,
            "degradation_level": self.degradation_level,
            "tiers": {
                name: {"waiting": tier.waiting, "oldest_wait": tier.oldest_wait, "running": tier.running}
                for name, tier in self.tiers.items()
            },
            "engines": [
                {
                    "model": engine.model,
                    "replica": engine.replica,
                    "state": engine.state,
                    "running": engine.running,
                    "kv_usage": engine.kv_usage,
                    "busy": engine.busy,
                }
                for engine in self.engines
            ],
        }
