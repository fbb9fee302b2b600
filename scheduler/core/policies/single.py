"""One request at a time, in order of arrival: what a server without batching does."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.policies.base import Blocked, Candidate, Offer, Policy
from scheduler.core.types import Reason


class Single(Policy):
    """The next request starts when the one before it has ended. An idle engine waits for nobody."""

    def max_wait(self) -> float:
        return 0.0

    def candidates(self, now: float) -> Iterator[Offer]:
        head = self.oldest()
        if head is None:
            return
        if len(self.books.batcher):
            yield Blocked(head, Reason.BATCH_RUNNING)
        else:
            yield Candidate(head, Reason.ARRIVAL_ORDER)
