"""What a policy is: it orders, never acts. Slots and memory are enforced outside it (`batcher.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.core.books import Books
from scheduler.core.types import Reason, Refusal, Request


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request that the policy would dispatch now, and the reason that it gives."""

    request: Request
    reason: Reason


@dataclass(frozen=True, slots=True)
class Blocked:
    """A waiting request that the policy looked at and did not offer, and why."""

    request: Request
    reason: Reason


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

    def candidates(self, now: float) -> Iterator[Candidate | Blocked]:
        """Who may be dispatched, best first. The first that slots and memory allow goes; then this is asked again."""
        raise NotImplementedError

    def next_wakeup(self, now: float) -> float | None:
        """When time alone may change the answer of `candidates`."""
        return None
