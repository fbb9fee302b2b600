"""The states of a request inside a pool, and the only moves between them.

    arrive ──► QUEUED ──► RUNNING ──► (gone)
                 │  ▲        │          finished · aborted · failed
                 │  └────────┘ evicted
                 └──► (gone) expired · cancelled · drained

A request that has ended is forgotten at once: memory is bounded by what is alive, and a second end of the same request
is an error that shows, not a slot released twice.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    UNKNOWN = "unknown"  # never seen, or ended


class IllegalTransition(Exception):
    """A move that the diagram does not have: a bug in the caller, never a user's fault."""


class Lifecycle:
    """Which requests are alive, and in which state."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def state(self, request_id: str) -> State:
        return self._states.get(request_id, State.UNKNOWN)

    def queued(self, request_id: str) -> None:
        """A request arrives. Raises IllegalTransition if the id is alive already."""
        self._expect(request_id, State.UNKNOWN, "queue")
        self._states[request_id] = State.QUEUED

    def running(self, request_id: str) -> None:
        """A queued request was given to the engine."""
        self._expect(request_id, State.QUEUED, "run")
        self._states[request_id] = State.RUNNING

    def requeued(self, request_id: str) -> None:
        """A running request was evicted and waits again."""
        self._expect(request_id, State.RUNNING, "requeue")
        self._states[request_id] = State.QUEUED

    def left_queue(self, request_id: str) -> None:
        """A queued request ends without having run."""
        self._expect(request_id, State.QUEUED, "leave the queue with")
        del self._states[request_id]

    def left_engine(self, request_id: str) -> None:
        """A running request has left the engine."""
        self._expect(request_id, State.RUNNING, "end")
        del self._states[request_id]

    def _expect(self, request_id: str, state: State, verb: str) -> None:
        actual = self.state(request_id)
        if actual is not state:
            raise IllegalTransition(f"cannot {verb} request {request_id}: it is {actual}, not {state}")
