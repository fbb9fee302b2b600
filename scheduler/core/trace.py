"""What was decided about each request and why: kept while it lives and for a bounded number that have ended.

    opened ──► queued ──► (held)* ──► dispatched ──► first_token ──► ended
                  ▲                        │
                  └── preempted, returned ─┘

A head that waits is looked at in every round, so that equal reasons are one entry with its first and last instant and
the number of rounds: the size of a trace is bounded by the number of reasons, not by the time that is waited.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

KEPT = 2_000  # requests that have ended


@dataclass(slots=True)
class Entry:
    """Something that happened. `until` and `rounds` are those of a reason that held the request back."""

    at: float
    event: str  # opened | queued | held | dispatched | first_token | preempted | returned | ended
    reason: str = ""
    until: float | None = None
    rounds: int = 0
    batch_id: str = ""
    mates: int = 0  # requests that the same decision dispatched, itself not counted
    tokens: int = 0  # delivered by then
    beneficiary: str = ""  # the request for which it was taken out of the engine


@dataclass(slots=True)
class Trace:
    """Everything known of one request. Instants are those of the caller's clock; `opened_at` is Unix time."""

    id: str
    tenant: str
    tier: str
    model: str
    opened: float
    opened_at: float
    entries: list[Entry] = field(default_factory=list)
    ended: bool = False
    holds: dict[str, Entry] = field(default_factory=dict)  # by reason, since it was queued last


class TraceRecorder:
    """The traces of one process. Whatever is said about a request that is not known is left out."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._traces: dict[str, Trace] = {}
        self._ended: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._traces)

    def find(self, request_id: str) -> Trace | None:
        return self._traces.get(request_id)

    def opened(self, request_id: str, tenant: str, tier: str, model: str, at: float, unix: float) -> None:
        """The request has come. An id that has ended may come again: its new life replaces the old one."""
        last = self._traces.get(request_id)
        if last is not None and not last.ended:
            return
        if last is not None:
            self._ended.remove(request_id)
        self._traces[request_id] = Trace(request_id, tenant, tier, model, at, unix, [Entry(at, "opened")])

    def queued(self, request_id: str, tier: str, lane: str, now: float) -> None:
        """It waits, as a request of `tier` and in a lane."""
        trace = self._live(request_id)
        if trace is not None:
            trace.tier = tier
            trace.entries.append(Entry(now, "queued", lane))

    def held(self, request_id: str, reason: str, now: float) -> None:
        """It could have been dispatched in this round and was not."""
        trace = self._live(request_id)
        if trace is None:
            return
        entry = trace.holds.get(reason)
        if entry is None:
            entry = trace.holds[reason] = Entry(now, "held", reason)
            trace.entries.append(entry)
        entry.until = now
        entry.rounds += 1

    def dispatched(self, request_id: str, reason: str, batch_id: str, mates: int, now: float) -> None:
        trace = self._live(request_id)
        if trace is not None:
            trace.holds.clear()
            trace.entries.append(Entry(now, "dispatched", reason, batch_id=batch_id, mates=mates))

    def first_token(self, request_id: str, now: float) -> None:
        self._add(request_id, Entry(now, "first_token", tokens=1))

    def preempted(self, request_id: str, beneficiary: str, tokens: int, now: float) -> None:
        """It is being taken out of the engine."""
        self._add(request_id, Entry(now, "preempted", tokens=tokens, beneficiary=beneficiary))

    def returned(self, request_id: str, reason: str, tokens: int, now: float) -> None:
        """It has left the engine and waits again."""
        self._add(request_id, Entry(now, "returned", reason, tokens=tokens))

    def ended(self, request_id: str, status: str, reason: str, tokens: int, now: float) -> None:
        """The end: `reason` says why where it did not end by itself."""
        trace = self._live(request_id)
        if trace is None:
            return
        trace.entries.append(Entry(now, "ended", reason or status, tokens=tokens))
        trace.ended = True
        trace.holds.clear()
        self._ended.append(request_id)
        while len(self._ended) > self._kept:
            del self._traces[self._ended.popleft()]

    def _live(self, request_id: str) -> Trace | None:
        trace = self._traces.get(request_id)
        return None if trace is None or trace.ended else trace

    def _add(self, request_id: str, entry: Entry) -> None:
        trace = self._live(request_id)
        if trace is not None:
            trace.entries.append(entry)
