"""Strict order of rank, first come first served inside a rank. The classic answer, and its classic starvation."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.policies.base import Candidate, Offer, Policy
from scheduler.core.types import Reason


class Priority(Policy):
    """Only the oldest head of the best rank may go: a worse rank never takes what it waits for."""

    def candidates(self, now: float) -> Iterator[Offer]:
        heads, tiers = self.books.queue.heads(), self.books.tiers
        if heads:
            first = min(heads, key=lambda head: (tiers[head.tier].rank, head.arrival, head.id))
            yield Candidate(first, Reason.RANK_ORDER)
