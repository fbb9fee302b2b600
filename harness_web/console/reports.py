"""What schedulers report once a second, and one view over all of them.

A scheduler that stopped reporting is named as such and its numbers leave the sums: a partial sum is never shown as the
whole. Percentiles of several schedulers cannot be merged, so the worst one is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

FRESH_FOR = 3.0  # seconds: three snapshots may be late before a scheduler counts as silent


class TierReport(msgspec.Struct):
    waiting: int = 0
    oldest_wait: float = 0.0
    running: int = 0
    tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    attained: int = 0
    judged: int = 0
    ttft_p95: float | None = None


class EngineReport(msgspec.Struct):
    model: str
    replica: str | int = ""
    state: str = "unknown"
    message: str = ""
    hint: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float | None = None
    busy: float | None = None
    batch_mean: float | None = None
    tokens_per_s: float | None = None
    scheduler: str = ""


class GpuReport(msgspec.Struct):
    name: str
    utilisation: float | None = None
    memory_used: float | None = None
    memory_total: float | None = None


class SchedulerReport(msgspec.Struct):
    """One telemetry snapshot; unknown fields are ignored, so that a newer scheduler can say more."""

    scheduler: str
    policy: str = ""
    policy_version: int = 0
    degradation_level: int = 0
    tiers: dict[str, TierReport] = {}
    engines: list[EngineReport] = []
    gpus: list[GpuReport] = []


class TierMeta(msgspec.Struct, frozen=True):
    """What a tier promises, from configuration. `rank` 1 comes first."""

    rank: int
    objective: float
    ttft: float


class TierView(msgspec.Struct):
    name: str
    index: int  # position: decides colour and dash pattern
    objective: float | None
    ttft_target: float | None
    waiting: int
    oldest_wait: float
    running: int
    tokens_per_s: float
    requests_per_s: float
    attained: int
    judged: int
    attainment: float | None
    ttft_p95: float | None

    @property
    def missing_target(self) -> bool:
        return self.attainment is not None and self.objective is not None and self.attainment < self.objective


class Totals(msgspec.Struct):
    """Sums over reporting schedulers. `kv` is the fullest engine's, `busy` the mean of ready engines, `gpu` of GPUs."""

    waiting: int = 0
    running: int = 0
    tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    oldest_wait: float = 0.0
    oldest_wait_tier: str = ""
    attained: int = 0
    judged: int = 0
    attainment: float | None = None
    kv: float | None = None
    kv_model: str = ""
    busy: float | None = None
    gpu: float | None = None
    engines_ready: int = 0
    engines: int = 0


class View(msgspec.Struct):
    """Everything the overview shows of one instant. `connected` is false when no scheduler reports; then the rest is
    the last that was known, `age` seconds ago (None: never)."""

    connected: bool = False
    age: float | None = None
    reporting: int = 0
    schedulers: int = 0
    silent: list[str] = []
    policy: str = ""
    policy_version: int = 0
    degradation_level: int = 0
    totals: Totals = msgspec.field(default_factory=Totals)
    tiers: list[TierView] = []
    engines: list[EngineReport] = []
    gpus: list[GpuReport] = []


def parse(snapshot: Mapping[str, Any]) -> SchedulerReport:
    """Raises msgspec.ValidationError for a snapshot that is not one."""
    return msgspec.convert(snapshot, SchedulerReport, strict=False)


def merge(reports: Iterable[SchedulerReport], meta: Mapping[str, TierMeta]) -> View:
    """One view of the given reports, tiers in the order of their rank."""
    reports = list(reports)
    tiers = _tiers(reports, meta)
    engines = [engine for report in reports for engine in _labelled(report)]
    gpus = [gpu for report in reports for gpu in report.gpus]
    newest = max(reports, key=lambda report: report.policy_version, default=None)
    return View(
        policy=newest.policy if newest else "",
        policy_version=newest.policy_version if newest else 0,
        degradation_level=max((report.degradation_level for report in reports), default=0),
        totals=_totals(tiers, engines, gpus),
        tiers=tiers,
        engines=engines,
        gpus=gpus,
    )


def _labelled(report: SchedulerReport) -> list[EngineReport]:
    for engine in report.engines:
        engine.scheduler = report.scheduler
    return report.engines


def _tiers(reports: list[SchedulerReport], meta: Mapping[str, TierMeta]) -> list[TierView]:
    names = {name for report in reports for name in report.tiers}
    last = max((known.rank for known in meta.values()), default=0) + 1
    ordered = sorted(names, key=lambda name: (meta[name].rank if name in meta else last, name))
    return [
        _tier(name, index, [report.tiers[name] for report in reports if name in report.tiers], meta.get(name))
        for index, name in enumerate(ordered)
    ]


def _tier(name: str, index: int, parts: list[TierReport], meta: TierMeta | None) -> TierView:
    judged = sum(part.judged for part in parts)
    attained = sum(part.attained for part in parts)
    return TierView(
        name=name,
        index=index,
        objective=meta.objective if meta else None,
        ttft_target=meta.ttft if meta else None,
        waiting=sum(part.waiting for part in parts),
        oldest_wait=max(part.oldest_wait for part in parts),
        running=sum(part.running for part in parts),
        tokens_per_s=sum(part.tokens_per_s for part in parts),
        requests_per_s=sum(part.requests_per_s for part in parts),
        attained=attained,
        judged=judged,
        attainment=attained / judged if judged else None,
        ttft_p95=max((part.ttft_p95 for part in parts if part.ttft_p95 is not None), default=None),
    )


def _totals(tiers: list[TierView], engines: list[EngineReport], gpus: list[GpuReport]) -> Totals:
    oldest = max(tiers, key=lambda tier: tier.oldest_wait, default=None)
    judged = sum(tier.judged for tier in tiers)
    attained = sum(tier.attained for tier in tiers)
    ready = [engine for engine in engines if engine.state == "ready"]
    fullest = max((e for e in ready if e.kv_usage is not None), key=lambda e: e.kv_usage or 0.0, default=None)
    return Totals(
        waiting=sum(tier.waiting for tier in tiers),
        running=sum(tier.running for tier in tiers),
        tokens_per_s=sum(tier.tokens_per_s for tier in tiers),
        requests_per_s=sum(tier.requests_per_s for tier in tiers),
        oldest_wait=oldest.oldest_wait if oldest else 0.0,
        oldest_wait_tier=oldest.name if oldest and oldest.oldest_wait > 0 else "",
        attained=attained,
        judged=judged,
        attainment=attained / judged if judged else None,
        kv=fullest.kv_usage if fullest else None,
        kv_model=fullest.model if fullest else "",
        busy=_mean(engine.busy for engine in ready),
        gpu=_mean(gpu.utilisation for gpu in gpus),
        engines_ready=len(ready),
        engines=len(engines),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
