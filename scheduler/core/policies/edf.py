"""Earliest deadline first over all tiers (Liu and Layland, 1973): optimal while everything can be met.

Under overload it is the policy that spends the engine on what is lost already.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.policies.base import Candidate, Offer, Policy
from scheduler.core.types import Reason, Request


class Edf(Policy):
    """Only the head with the earliest deadline may go; its rank does not count."""

    def key(self, request: Request) -> float:
        return request.deadline

    def candidates(self, now: float) -> Iterator[Offer]:
        heads = self.books.queue.heads()
        if heads:
            first = min(heads, key=lambda head: (head.deadline, head.arrival, head.id))
            yield Candidate(first, Reason.DEADLINE_ORDER)
