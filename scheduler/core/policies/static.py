"""Whole batches of a fixed size, in order of arrival: early TensorFlow Serving.

A batch begins when `max_batch` requests wait, or when the oldest has waited for the flush time (`max_wait_ms`; one
second if that is 0, because without any a batch that never fills would wait for ever), and it runs to its end before
the next begins. On an engine that batches by iteration the early ends of a batch leave their slots empty; one that
pads its batches pays for them too.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.core.books import Books
from scheduler.core.policies.base import Blocked, Candidate, Offer, Policy
from scheduler.core.types import Reason


class Static(Policy):
    """See the module text."""

    default_wait = 1.0  # seconds

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._open = False  # this decision makes a batch

    def max_wait(self) -> float:
        return super().max_wait() or self.default_wait

    def deciding(self, now: float) -> None:
        self._open = not len(self.books.batcher)

    def candidates(self, now: float) -> Iterator[Offer]:
        head = self.oldest()
        if head is None:
            return
        if self._open:
            yield Candidate(head, Reason.ARRIVAL_ORDER)
        else:
            yield Blocked(head, Reason.BATCH_RUNNING)
