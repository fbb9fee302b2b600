"""First come, first served across all tiers; the engine batches by iteration. What vLLM and TGI do by default."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.core.types import Reason, Request, TierSpec


class Continuous:
    """Only the oldest head may go: nobody passes a request that does not fit yet."""

    def key(self, request: Request) -> float:
        return request.arrival

    def rank(self, heads: list[Request], tiers: Mapping[str, TierSpec]) -> list[tuple[Request, Reason]]:
        return [(min(heads, key=lambda head: (head.arrival, head.id)), Reason.ARRIVAL_ORDER)]
