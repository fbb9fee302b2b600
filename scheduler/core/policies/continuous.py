"""First come, first served across all tiers; the engine batches by iteration. What vLLM and TGI do by default."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.policies.base import Candidate, Offer, Policy
from scheduler.core.types import Reason


class Continuous(Policy):
    """Only the oldest head may go: nobody passes a request that does not fit yet."""

    def candidates(self, now: float) -> Iterator[Offer]:
        if (head := self.oldest()) is not None:
            yield Candidate(head, Reason.ARRIVAL_ORDER)
