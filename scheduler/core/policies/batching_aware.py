"""The default policy: hold every tier's promise while the batch stays full. `docs/scheduling.md` explains it.

Four kinds of turn, in this order:

    guard    a tier whose floor is owed to it
    urgent   a request whose latest start is near, smallest key first
    fair     the tier, then the tenant, that has received least engine time for its weight
    late     what can no longer meet its deadline and is served all the same

and five tests that each of them must pass: a slot that is not kept for better ranks, memory at its future peak, the
prefill that the running step can take, the pace promised to open streams, the long lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scheduler.core.books import Books
from scheduler.core.length_model import PromptHistory
from scheduler.core.policies.base import Blocked, Candidate, Policy
from scheduler.core.reservation import Reservation, may_pass, reserve
from scheduler.core.service import FLOOR_CLAMP
from scheduler.core.types import Lane, OnInfeasible, Reason, Refusal, Request, TierSpec

GUARD_ABOVE = 0.25  # engine-seconds of floor credit
URGENT_SHARE = 0.35  # of the tier's deadline
LEAD_BOUND = 2.0  # engine-seconds that an urgent tier may be ahead of the others
PACE_MARGIN = 1.15
PREFILL_SHARE = 0.5  # of a step, for prompts of worse ranks in flight
LONG_SHARE = 0.25  # of the best rank's deadline: a longer prefill is long
LONG_QUANTILE = 0.95  # of recent prompts
LONG_KV_SHARE = 0.40  # of the pool, for all long prompts that run
LONG_FLOOR = 0.10  # of its tier's dispatched work, while the long lane waits
BEST_QUIET = 30.0  # seconds without the best rank, after which two long prompts may be prefilled at a time
ALPHA = 4.0  # weight of the prefill time in the order of deadlines
OPTIMISTIC, CAUTIOUS = 0.1, 0.75
BACKLOG_FAILURES = 2
REOPEN_AT = 0.8
LANES = (Lane.SHORT, Lane.LONG)
NO_ROOM = (Reason.SLOTS_FULL, Reason.SLOTS_RESERVED, Reason.KV_FULL)


class BatchingAware(Policy):
    """See the module text."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._failing: dict[str, int] = {}  # tier -> arrivals in a row that the backlog test failed
        self._prompts = PromptHistory()
        self._best_seen = 0.0  # when a request of the best rank came last
        self._lane_cost: dict[tuple[str, Lane], float] = {}  # work dispatched while both lanes of a tier waited
        self._refresh_ranks()

    def _refresh_ranks(self) -> None:
        tiers = self.books.tiers
        self._ranked = sorted(tiers.values(), key=lambda tier: (tier.rank, tier.name))
        self._best = self._ranked[0].rank if self._ranked else 1
        self._better = {tier.name: [one for one in self._ranked if one.rank < tier.rank] for tier in self._ranked}

    # --- arrival ----------------------------------------------------------------------------------------------------

    def key(self, request: Request) -> float:
        """Deadline plus weighted prefill time: of two like deadlines the shorter work first."""
        return request.deadline + ALPHA * self.books.alone_seconds(request.prompt_tokens)

    def latest_start(self, request: Request) -> float:
        """The instant after which even an empty engine is too late, by the optimistic quantile."""
        needed = self.books.alone_seconds(request.prompt_tokens) * self.books.steps.quantile(OPTIMISTIC)
        if not request.stream:
            tokens = self.books.expected_tokens(request, OPTIMISTIC)
            needed += tokens * self.books.steps.predict(self.books.load()) * self.books.steps.quantile(OPTIMISTIC)
        return request.deadline - needed

    def due(self, request: Request) -> float:
        return min(request.queue_deadline, self.latest_start(request))

    def admit(self, request: Request, now: float) -> Request | Refusal:
        tier = self.books.tier(request)
        if tier.rank == self._best:
            self._best_seen = now
        if self.latest_start(request) < now:
            return self._infeasible(request, tier, now)
        if tier.on_infeasible is OnInfeasible.REJECT and (refusal := self._backlog(request, tier, now)):
            return refusal
        return replace(request, lane=Lane.LONG) if self._is_long(request) else request

    def _is_long(self, request: Request) -> bool:
        """Long for the best rank's deadline, and long among its like: on a slow engine half of all would be the first."""
        self._prompts.observe(request.prompt_tokens)
        seconds = self.books.alone_seconds(request.prompt_tokens)
        if seconds <= LONG_SHARE * self._ranked[0].deadline(0.0, True, 0, None):
            return False
        return request.prompt_tokens > self._prompts.quantile(LONG_QUANTILE)

    def overdue(self, request: Request, now: float) -> Request | Refusal | None:
        if request.lane is Lane.LATE or self.latest_start(request) > now:
            return None
        return self._infeasible(request, self.books.tier(request), now)

    def _infeasible(self, request: Request, tier: TierSpec, now: float) -> Request | Refusal:
        if tier.on_infeasible is OnInfeasible.LATE:
            return replace(request, lane=Lane.LATE)
        return Refusal(
            Reason.DEADLINE_INFEASIBLE,
            f"The deadline of {request.deadline - request.arrival:.1f} s cannot be met at the present load.",
            self._clears_in(tier),
        )

    def _backlog(self, request: Request, tier: TierSpec, now: float) -> Refusal | None:
        """Refuse early what would expire in the queue: the tier's queued work over the rate that it is guaranteed."""
        start = now + self._clears_in(tier)
        latest = self.latest_start(request)
        failures = self._failing.get(tier.name, 0)
        threshold = latest if failures < BACKLOG_FAILURES else now + REOPEN_AT * (latest - now)
        if start <= threshold:
            self._failing[tier.name] = 0
            return None
        self._failing[tier.name] = failures + 1
        if failures + 1 < BACKLOG_FAILURES:
            return None
        return Refusal(
            Reason.DEADLINE_INFEASIBLE,
            f"The requests of this tier that wait already take {start - now:.1f} s.",
            max(start - now - REOPEN_AT * (latest - now), 0.1),
        )

    def _clears_in(self, tier: TierSpec) -> float:
        """Predicted seconds until what waits in the tier has been started."""
        return self.books.queue.cost(tier.name) / max(self._rate(tier), 1e-3)

    def _rate(self, tier: TierSpec) -> float:
        """Engine-seconds a second that the tier can count on: by weights among those that wait, floor at least."""
        waiting = [one for one in self._ranked if self.books.queue.length(one.name) or one is tier]
        total = sum(one.weight for one in waiting)
        return max(tier.weight / total if total else 0.0, tier.floor)

    # --- turns ------------------------------------------------------------------------------------------------------

    def candidates(self, now: float) -> Iterator[Candidate | Blocked]:
        tiers = [tier for tier in self._ranked if self.books.queue.length(tier.name)]
        if not tiers:
            return
        self.books.service.pace()
        reservation: Reservation | None = None
        for request, reason in self._turns(tiers, self._urgent(tiers, now), now):
            tier = self.books.tier(request)
            blocked = self._room(request, tier) or self._interference(request, tier, reason, now)
            if blocked is None and reservation is not None and not self._passes(reservation, request, tier, now):
                blocked = Reason.RESERVATION
            if blocked is None:
                yield Candidate(request, reason)
                continue
            yield Blocked(request, blocked)
            if reservation is None and reason in (Reason.FLOOR_GUARD, Reason.URGENT) and blocked in NO_ROOM:
                reservation = self._reserve(request, tier, now)

    def dispatched(self, request: Request, now: float) -> None:
        queue, tier = self.books.queue, request.tier
        if all(queue.head(tier, lane) is not None for lane in LANES):
            key = (tier, request.lane)
            self._lane_cost[key] = self._lane_cost.get(key, 0.0) + self.books.cost(request)

    def _turns(self, tiers: list[TierSpec], urgent: list[Request], now: float) -> Iterator[tuple[Request, Reason]]:
        offered: set[str] = set()
        accounts = self.books.service.tiers
        for tier in sorted(tiers, key=lambda one: -accounts[one.name].credit / max(one.floor, 1e-9)):
            credit = accounts[tier.name].credit
            if credit > GUARD_ABOVE and (not urgent or credit >= FLOOR_CLAMP):
                yield from self._offer(self._fair_head(tier), Reason.FLOOR_GUARD, offered)
        for request in urgent:
            yield from self._offer(request, Reason.URGENT, offered)
        for tier in sorted(tiers, key=lambda one: (accounts[one.name].own.order(), one.rank)):
            yield from self._offer(self._fair_head(tier), Reason.FAIR_TURN, offered)
            yield from self._offer(self._first(tier), Reason.FAIR_TURN, offered)
            yield from self._offer(self.books.queue.head(tier.name, Lane.LATE), Reason.LATE_TURN, offered)

    def _offer(self, request: Request | None, reason: Reason, offered: set[str]) -> Iterator[tuple[Request, Reason]]:
        if request is not None and request.id not in offered:
            offered.add(request.id)
            yield request, reason

    def _urgent(self, tiers: list[TierSpec], now: float) -> list[Request]:
        """Heads whose latest start is near, of tiers that are not too far ahead of the others; smallest key first."""
        two_steps = 2 * self.books.step_time()
        accounts = self.books.service.tiers
        least = min((accounts[tier.name].own.virtual() for tier in tiers), default=0.0)
        found = []
        for tier in tiers:
            lead = accounts[tier.name].own.weight * (accounts[tier.name].own.virtual() - least)
            if len(tiers) > 1 and lead >= LEAD_BOUND:
                continue
            window = max(two_steps, URGENT_SHARE * tier.deadline(0.0, True, 0, None))
            for lane in LANES:
                head = self.books.queue.head(tier.name, lane)
                if head is not None and self.latest_start(head) - now < window:
                    found.append(head)
        return sorted(found, key=lambda head: (self.key(head), head.arrival, head.id))

    def _first(self, tier: TierSpec) -> Request | None:
        heads = [self.books.queue.head(tier.name, lane) for lane in LANES]
        return min((head for head in heads if head is not None), key=self.key, default=None)

    def _fair_head(self, tier: TierSpec) -> Request | None:
        """The first request of the tenant whose turn it is; the long lane goes first while it is owed its floor."""
        tenant = self.books.service.tiers[tier.name].next_tenant()
        if tenant is None:
            return None
        short, long = (self.books.queue.tenant_head(tier.name, lane, tenant) for lane in LANES)
        if short is None or long is None:
            return short or long
        return long if self._long_is_owed(tier) else min(short, long, key=self.key)

    def _long_is_owed(self, tier: TierSpec) -> bool:
        short, long = (self._lane_cost.get((tier.name, lane), 0.0) for lane in LANES)
        return long < LONG_FLOOR * (short + long)

    # --- tests ------------------------------------------------------------------------------------------------------

    def _room(self, request: Request, tier: TierSpec) -> Reason | None:
        """Slots and memory, with what is kept for better ranks and for growth."""
        batcher = self.books.batcher
        return (
            batcher.blocked(request)
            or batcher.reserved_against(tier, self._better[tier.name])
            or batcher.forecast(request, tier.headroom, self._cautious)
        )

    def _passes(self, reservation: Reservation, request: Request, tier: TierSpec, now: float) -> bool:
        """A better rank never waits for a worse one's reservation."""
        owner = self.books.tier(reservation.request)
        return tier.rank < owner.rank or may_pass(self.books, reservation, request, now)

    def _reserve(self, request: Request, tier: TierSpec, now: float) -> Reservation:
        blocks = int((1 - tier.headroom) * self.books.capacity.total_blocks)
        return reserve(self.books, request, self.books.batcher.cap, blocks, self._cautious, now)

    def _cautious(self, request: Request, produced: int) -> int:
        return self.books.expected_tokens(request, CAUTIOUS, produced)

    def _interference(self, request: Request, tier: TierSpec, reason: Reason, now: float) -> Reason | None:
        """What the prompt does to others: the best rank's next prefill, and the pace of open streams."""
        books = self.books
        if tier.rank == self._best or not len(books.batcher):
            return None
        if request.lane is Lane.LONG and self._long_lane_full(request, now):
            return Reason.LONG_LANE
        pending = books.service.remaining_prefill()
        if pending and pending + request.prompt_tokens > PREFILL_SHARE * books.capacity.step_tokens:
            return Reason.PREFILL_BUDGET
        if reason is Reason.FLOOR_GUARD and books.service.tiers[tier.name].credit >= FLOOR_CLAMP:
            return None
        chunk = min(pending + request.prompt_tokens, books.capacity.step_tokens)
        stall = PACE_MARGIN * books.step_time(chunk)
        for flight in books.batcher.running():
            if flight.first_token is not None:
                tpot = books.tiers[flight.request.tier].tpot
                if flight.first_token + flight.tokens * tpot - now < stall:
                    return Reason.STREAM_PACE
        return None

    def _long_lane_full(self, request: Request, now: float) -> bool:
        """One long prefill at a time (two while the best rank is quiet), and a bounded part of memory for them."""
        books = self.books
        running = [flight for flight in books.batcher.running() if flight.request.lane is Lane.LONG]
        prefilling = sum(1 for flight in running if flight.first_token is None)
        if prefilling >= (2 if now - self._best_seen > BEST_QUIET else 1):
            return True
        blocks = sum(flight.blocks for flight in running) + books.capacity.blocks(request.prompt_tokens)
        return bool(running) and blocks > LONG_KV_SHARE * books.capacity.total_blocks
