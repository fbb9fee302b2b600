"""Strict order of rank, first come first served inside a rank. The classic answer, and its classic starvation."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.core.types import Reason, Request, TierSpec


class Priority:
    """Only the oldest head of the best rank may go: a worse rank never takes what it waits for."""

    def key(self, request: Request) -> float:
        return request.arrival

    def rank(self, heads: list[Request], tiers: Mapping[str, TierSpec]) -> list[tuple[Request, Reason]]:
        first = min(heads, key=lambda head: (tiers[head.tier].rank, head.arrival, head.id))
        return [(first, Reason.RANK_ORDER)]
