"""The waiting requests of one pool: a heap per (tier, lane), and one heap of the instants at which waiting ends.

Push and pop cost O(log n), a look at all heads O(tiers x lanes). Removal marks an entry as dead; a heap with more dead
than living entries is rebuilt, so that memory follows the number of waiting requests.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from scheduler.core.types import Lane, Request

OrderKey = Callable[[Request], float]
Entry = tuple[float, int, Request]  # key, order of arrival (ties are FIFO), request

COMPACT_ABOVE = 64  # below this, dead entries are not worth a rebuild


class WaitingQueue:
    """Requests by id, ordered inside each (tier, lane) by `key`, smallest first."""

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._order = itertools.count()
        self._waiting: dict[str, int] = {}  # id -> order of its live entry
        self._lanes: dict[tuple[str, Lane], list[Entry]] = {}
        self._expiry: list[Entry] = []
        self._arrivals: dict[str, list[Entry]] = {}
        self._per_tier: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests in order of arrival."""
        return iter([entry[2] for entry in sorted(self._expiry, key=lambda entry: entry[1]) if self._alive(entry)])

    def length(self, tier: str) -> int:
        return self._per_tier[tier]

    def tiers(self) -> list[str]:
        """Tiers that have something waiting."""
        return [tier for tier, count in self._per_tier.items() if count]

    def push(self, request: Request) -> None:
        """Add a request. Raises ValueError if its id waits already."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} is waiting already")
        order = next(self._order)
        self._waiting[request.id] = order
        heapq.heappush(self._lanes.setdefault((request.tier, request.lane), []), (self._key(request), order, request))
        heapq.heappush(self._arrivals.setdefault(request.tier, []), (request.arrival, order, request))
        heapq.heappush(self._expiry, (request.queue_deadline, order, request))
        self._per_tier[request.tier] += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Raises KeyError if it does not wait."""
        del self._waiting[request.id]
        self._per_tier[request.tier] -= 1
        self._shrink(request)

    def heads(self) -> list[Request]:
        """The first request of every (tier, lane) that has one."""
        found = (self._first(heap) for heap in self._lanes.values())
        return [request for request in found if request is not None]

    def pop_expired(self, now: float) -> list[Request]:
        """Remove and return all requests whose waiting ends at or before `now`."""
        expired = []
        while (request := self._first(self._expiry)) is not None and request.queue_deadline <= now:
            self.remove(request)
            expired.append(request)
        return expired

    def next_expiry(self) -> float | None:
        """The instant at which the next waiting request runs out of patience."""
        request = self._first(self._expiry)
        return None if request is None else request.queue_deadline

    def oldest_arrival(self, tier: str) -> float | None:
        request = self._first(self._arrivals.get(tier, []))
        return None if request is None else request.arrival

    def clear(self) -> list[Request]:
        """Remove and return everything, in order of arrival."""
        everything = list(self)
        self._waiting.clear()
        self._lanes.clear()
        self._arrivals.clear()
        self._expiry.clear()
        self._per_tier.clear()
        return everything

    def rekey(self, key: OrderKey) -> None:
        """Order everything anew (the policy changed); ties keep their order of arrival. O(n)."""
        self._key = key
        for lane, heap in self._lanes.items():
            entries = [(key(entry[2]), entry[1], entry[2]) for entry in heap if self._alive(entry)]
            heapq.heapify(entries)
            self._lanes[lane] = entries

    def _alive(self, entry: Entry) -> bool:
        # An id may wait, leave and wait again: only the entry of its last arrival counts.
        return self._waiting.get(entry[2].id) == entry[1]

    def _first(self, heap: list[Entry]) -> Request | None:
        while heap and not self._alive(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def _shrink(self, request: Request) -> None:
        lane = self._lanes[(request.tier, request.lane)]
        if len(lane) > COMPACT_ABOVE and len(lane) > 2 * self._per_tier[request.tier]:
            self._compact(lane)
            self._compact(self._arrivals[request.tier])
        if len(self._expiry) > COMPACT_ABOVE and len(self._expiry) > 2 * len(self._waiting):
            self._compact(self._expiry)

    def _compact(self, heap: list[Entry]) -> None:
        heap[:] = [entry for entry in heap if self._alive(entry)]
        heapq.heapify(heap)
