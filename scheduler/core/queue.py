"""The waiting requests of one pool: heaps per (tier, lane) and per (tier, lane, tenant), and one heap of instants.

Push and pop cost O(log n), a look at all heads O(tiers x lanes). Removal marks an entry as dead; a heap with more dead
than living entries is rebuilt, so that memory follows the number of waiting requests.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from scheduler.core.types import Lane, Request

OrderKey = Callable[[Request], float]
COMPACT_ABOVE = 64  # below this, dead entries are not worth a rebuild


@dataclass(slots=True, eq=False)
class Waiting:
    """A place in the queue. A request that moves to another lane gets a new one."""

    request: Request
    cost: float  # predicted engine-seconds
    alive: bool = True

    def __lt__(self, other: Waiting) -> bool:
        """Only asked of a place and its successor after a move, of which one is dead: their order is no matter."""
        return False


Entry = tuple[float, int, Waiting]  # key, order of arrival (ties are FIFO), place
Heap = list[Entry]


class WaitingQueue:
    """Requests by id, ordered inside each lane by `key`, smallest first."""

    def __init__(self, key: OrderKey = lambda request: request.arrival) -> None:
        self._key = key
        self._order = itertools.count()
        self._waiting: dict[str, tuple[int, Waiting]] = {}
        self._lanes: dict[tuple[str, Lane], Heap] = {}
        self._tenants: dict[tuple[str, Lane, str], Heap] = {}
        self._instants: Heap = []
        self._arrivals: dict[str, Heap] = {}
        self._per_tier: Counter[str] = Counter()
        self._prompt_bytes: Counter[str] = Counter()
        self._cost: dict[str, float] = {}
        self._tenant_cost: dict[tuple[str, str], tuple[int, float]] = {}  # (tier, tenant) -> waiting, their cost

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests in order of arrival."""
        return iter([place.request for _, place in sorted(self._waiting.values(), key=lambda one: one[0])])

    def get(self, request_id: str) -> Request | None:
        found = self._waiting.get(request_id)
        return None if found is None else found[1].request

    def length(self, tier: str) -> int:
        return self._per_tier[tier]

    def prompt_bytes(self, tier: str) -> int:
        """Memory that the prompts of what waits in the tier take."""
        return self._prompt_bytes[tier]

    def cost(self, tier: str) -> float:
        """Predicted engine-seconds of what waits in the tier."""
        return self._cost.get(tier, 0.0) if self._per_tier[tier] else 0.0

    def tenant_cost(self, tier: str, tenant: str) -> float:
        """Predicted engine-seconds of what one tenant has waiting in the tier."""
        return self._tenant_cost.get((tier, tenant), (0, 0.0))[1]

    def push(self, request: Request, cost: float = 0.0, due: float | None = None) -> None:
        """Add a request. `due`: when to look at it again (default: when its waiting ends). ValueError on a known id."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} is waiting already")
        self._insert(next(self._order), Waiting(request, cost), due)

    def remove(self, request_id: str) -> Request:
        """Take a request out, wherever it stands. Raises KeyError if it does not wait."""
        _, place = self._waiting.pop(request_id)
        place.alive = False
        request = place.request
        self._per_tier[request.tier] -= 1
        self._prompt_bytes[request.tier] -= request.prompt_bytes
        self._cost[request.tier] -= place.cost
        self._count_tenant(request, -1, -place.cost)
        self._shrink(request)
        return request

    def move(self, request_id: str, lane: Lane) -> Request:
        """Let a request wait in another lane, at the place of its arrival; it is next due when its waiting ends."""
        order, place = self._waiting[request_id]
        self.remove(request_id)
        moved = replace(place.request, lane=lane)
        self._insert(order, Waiting(moved, place.cost), None)
        return moved

    def head(self, tier: str, lane: Lane) -> Request | None:
        """The first request of the lane, whoever's it is."""
        return self._first(self._lanes.get((tier, lane)))

    def tenant_head(self, tier: str, lane: Lane, tenant: str) -> Request | None:
        """The first request of one tenant in the lane."""
        return self._first(self._tenants.get((tier, lane, tenant)))

    def heads(self) -> list[Request]:
        """The first request of every (tier, lane) that has one."""
        found = (self._first(heap) for heap in self._lanes.values())
        return [request for request in found if request is not None]

    def pop_due(self, now: float) -> list[Request]:
        """The waiting requests whose instant has come; they go on waiting until removed or `remind`ed."""
        due = {}
        while (request := self._first(self._instants)) is not None and self._instants[0][0] <= now:
            heapq.heappop(self._instants)
            due[request.id] = request  # one that was reminded twice is due once
        return list(due.values())

    def remind(self, request_id: str, due: float) -> None:
        """Look at a waiting request (again) at `due`."""
        order, place = self._waiting[request_id]
        heapq.heappush(self._instants, (due, order, place))

    def next_due(self) -> float | None:
        """The next instant at which `pop_due` has something."""
        return self._instants[0][0] if self._first(self._instants) is not None else None

    def oldest_arrival(self, tier: str) -> float | None:
        request = self._first(self._arrivals.get(tier))
        return None if request is None else request.arrival

    def clear(self) -> list[Request]:
        """Remove and return everything, in order of arrival."""
        everything = list(self)
        for request in everything:
            self.remove(request.id)
        return everything

    def rekey(self, key: OrderKey) -> None:
        """Order everything anew (the policy changed); ties keep their order of arrival. O(n)."""
        self._key = key
        for heap in (*self._lanes.values(), *self._tenants.values()):
            heap[:] = [(key(place.request), order, place) for _, order, place in heap if place.alive]
            heapq.heapify(heap)

    def reschedule(self, due: OrderKey) -> None:
        """Look at everything anew at its instant `due`, and forget the instants before. O(n)."""
        self._instants = [(due(place.request), order, place) for order, place in self._waiting.values()]
        heapq.heapify(self._instants)

    # --- details ----------------------------------------------------------------------------------------------------

    def _insert(self, order: int, place: Waiting, due: float | None) -> None:
        request = place.request
        self._waiting[request.id] = (order, place)
        entry = (self._key(request), order, place)
        heapq.heappush(self._lanes.setdefault((request.tier, request.lane), []), entry)
        heapq.heappush(self._tenants.setdefault((request.tier, request.lane, request.tenant), []), entry)
        heapq.heappush(self._arrivals.setdefault(request.tier, []), (request.arrival, order, place))
        heapq.heappush(self._instants, (request.queue_deadline if due is None else due, order, place))
        self._per_tier[request.tier] += 1
        self._prompt_bytes[request.tier] += request.prompt_bytes
        self._cost[request.tier] = self.cost(request.tier) + place.cost
        self._count_tenant(request, 1, place.cost)

    def _count_tenant(self, request: Request, number: int, cost: float) -> None:
        key = (request.tier, request.tenant)
        waiting, total = self._tenant_cost.get(key, (0, 0.0))
        if waiting + number:
            self._tenant_cost[key] = (waiting + number, total + cost)
        else:
            del self._tenant_cost[key]

    def _first(self, heap: Heap | None) -> Request | None:
        while heap and not heap[0][2].alive:
            heapq.heappop(heap)
        return heap[0][2].request if heap else None

    def _shrink(self, request: Request) -> None:
        tenant = (request.tier, request.lane, request.tenant)
        if self._first(self._tenants[tenant]) is None:
            del self._tenants[tenant]
        else:
            _compact(self._tenants[tenant], len(self._waiting))
        _compact(self._lanes[request.tier, request.lane], self._per_tier[request.tier])
        _compact(self._arrivals[request.tier], self._per_tier[request.tier])
        _compact(self._instants, len(self._waiting))


def _compact(heap: Heap, living: int) -> None:
    """Drop dead entries when they are the majority (`living`: an upper bound of those that are not)."""
    if len(heap) > COMPACT_ABOVE and len(heap) > 2 * living:
        heap[:] = [entry for entry in heap if entry[2].alive]
        heapq.heapify(heap)
