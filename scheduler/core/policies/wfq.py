"""Weighted fair queueing of tokens: the virtual token counter of Sheng et al. (OSDI 2024), per tier and with weights.

    counter = (prompt tokens + OUTPUT_WEIGHT x output tokens) / weight

The tier with the least counter that has something waiting goes next, first come first served inside it. The output is
charged at dispatch as it is predicted and corrected at the end (the paper's variant with length prediction): charged
only as it comes, a burst of dispatches would look free. A tier that returns starts at the least counter of those that
waited meanwhile, so that idleness earns nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from scheduler.core.batcher import InFlight
from scheduler.core.books import Books
from scheduler.core.policies.base import Candidate, Offer, Policy
from scheduler.core.types import Outcome, Reason, Refusal, Request

OUTPUT_WEIGHT = 2.0  # as in the paper: an output token costs a step of its own


class Wfq(Policy):
    """See the module text. Tiers of weight 0 are background: they run when no other tier waits."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._charged: dict[str, float] = {}  # request -> its predicted part of the counter
        self._least = 0.0  # running maximum of the least counter among the tiers that wait

    def admit(self, request: Request, now: float) -> Request | Refusal:
        if not self.books.queue.length(request.tier):
            self._counters[request.tier] = max(self._counters[request.tier], self._least)
        return request

    def candidates(self, now: float) -> Iterator[Offer]:
        heads = self.books.queue.heads()
        if not heads:
            return
        first = min(heads, key=lambda head: (self._turn(head.tier), head.arrival, head.id))
        counter, _ = self._turn(first.tier)
        if counter < math.inf:
            self._least = max(self._least, counter)
        yield Candidate(first, Reason.FAIR_TURN)

    def dispatched(self, request: Request, now: float) -> None:
        tokens = request.prompt_tokens + OUTPUT_WEIGHT * request.sequences * self.books.expected_tokens(request)
        charge = self._charged[request.id] = tokens / (self.books.tier(request).weight or 1.0)
        self._counters[request.tier] += charge

    def ended(self, flight: InFlight, outcome: Outcome, now: float) -> None:
        request = flight.request
        if (charged := self._charged.pop(request.id, None)) is not None:
            tokens = request.prompt_tokens + OUTPUT_WEIGHT * outcome.completion_tokens
            self._counters[request.tier] += tokens / (self.books.tier(request).weight or 1.0) - charged

    def _turn(self, tier: str) -> tuple[float, int]:
        """Counter, then rank: where a tier stands among those that wait."""
        spec = self.books.tiers[tier]
        return (self._counters[tier] if spec.weight > 0 else math.inf, spec.rank)
