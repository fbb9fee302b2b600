"""What a policy is: it orders, never acts. Slots and memory are enforced outside it (`batcher.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from scheduler.core.batcher import InFlight
from scheduler.core.books import Books
from scheduler.core.types import Outcome, Reason, Refusal, Request, StepReport


class Candidate(NamedTuple):
    """A waiting request that the policy would dispatch now, and the reason that it gives."""

    request: Request
    reason: Reason


class Blocked(NamedTuple):
    """A waiting request that the policy looked at and did not offer, and why."""

    request: Request
    reason: Reason


class Evict(NamedTuple):
    """A running request that the policy would take out of the engine, so that `request` can start in time."""

    request: Request
    victim: Request


Offer = Candidate | Blocked | Evict


class Policy:
    """Base of all policies: first come first served, refuses nobody. Subclasses override what they do otherwise."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def key(self, request: Request) -> float:
        """Order inside a lane, smallest first. Must not change while the request waits."""
        return request.arrival

    def admit(self, request: Request, now: float) -> Request | Refusal:
        """At arrival: the request as it shall wait (its lane may be set), or why it is refused."""
        return request

    def due(self, request: Request) -> float:
        """When to look at a waiting request again, at the latest when its waiting ends."""
        return request.queue_deadline

    def overdue(self, request: Request, now: float) -> Request | Refusal | None:
        """Its instant `due` has come: None to let it wait on, a request in another lane, or the end of its waiting."""
        return None

    def window_end(self) -> float | None:
        """Until when an idle engine waits for company; None: it does not. A full batch waits for nobody."""
        wait, queue = self.max_wait(), self.books.queue
        if wait <= 0 or len(self.books.batcher) or not 0 < len(queue) < self.books.batcher.cap:
            return None
        oldest = (queue.oldest_arrival(tier) for tier in self.books.tiers)
        return min(arrival for arrival in oldest if arrival is not None) + wait

    def max_wait(self) -> float:
        """Seconds that the oldest request may wait for company. An engine that batches by iteration needs none."""
        return self.books.config.max_wait_ms / 1000

    def deciding(self, now: float) -> None:
        """A decision begins: what `candidates` offers until the next one is one batch."""

    def candidates(self, now: float) -> Iterator[Offer]:
        """Who may be dispatched, best first. The first that slots and memory allow goes; then this is asked again."""
        raise NotImplementedError

    def dispatched(self, request: Request, now: float) -> None:
        """A candidate went to the engine."""

    def ended(self, flight: InFlight, outcome: Outcome, now: float) -> None:
        """A request has left the engine; it may have been dispatched before this policy was there."""

    def stepped(self, report: StepReport) -> None:
        """The engine has made a step."""

    def reconfigured(self) -> None:
        """Tiers or bounds have changed while this policy was in use."""

    def engine_failed(self, now: float, cause: str) -> None:
        """The engine has died or makes no steps: it is being rebuilt."""

    def engine_recovered(self, now: float) -> None:
        """The engine is back."""

    def next_wakeup(self, now: float) -> float | None:
        """When time alone may change the answer of `candidates`; the end of the window is known without it."""
        return None

    def oldest(self) -> Request | None:
        """The waiting request that came first."""
        return min(self.books.queue.heads(), key=lambda head: (head.arrival, head.id), default=None)
