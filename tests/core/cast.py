"""The cast of the core tests: three tiers by rank, and requests with sensible defaults."""

from __future__ import annotations

from typing import Any

from scheduler.core.planner import Planner
from scheduler.core.types import Decision, Dispatch, PolicyConfig, PoolCapacity, Request, TierSpec

TIERS = {
    "gold": TierSpec("gold", rank=1, ttft=0.5, e2e=0.5, tpot=0.10),
    "silver": TierSpec("silver", rank=2, ttft=2.0, e2e=2.0, tpot=0.15),
    "bronze": TierSpec("bronze", rank=3, ttft=5.0, e2e=5.0, tpot=0.25, queue_max_length=3),
}
CAPACITY = PoolCapacity(max_seqs=2, step_tokens=64, kv_tokens=320, block_size=16, max_model_len=256)


def request(id: str, tier: str = "silver", arrival: float = 0.0, **changes: Any) -> Request:
    values: dict[str, Any] = {
        "tenant": "t1",
        "prompt_tokens": 10,
        "max_tokens": 10,
        "stream": True,
        "deadline": arrival + TIERS[tier].ttft,
        "queue_deadline": arrival + 60.0,
    }
    return Request(id=id, tier=tier, arrival=arrival, **(values | changes))


def planner(policy: str = "continuous", capacity: PoolCapacity = CAPACITY, **config: Any) -> Planner:
    return Planner(capacity, TIERS, PolicyConfig(name=policy, **config), pool="demo")


def dispatched(decisions: list[Decision]) -> list[str]:
    return [decision.request.id for decision in decisions if isinstance(decision, Dispatch)]
