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

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from scheduler.core.batcher import InFlight
from scheduler.core.books import Books
from scheduler.core.controller import Completion, Controller, Load
from scheduler.core.degradation import Ladder, LevelChange, Pressure
from scheduler.core.length_model import PromptHistory
from scheduler.core.policies.base import Blocked, Candidate, Evict, Offer, Policy
from scheduler.core.reservation import Reservation, may_pass, reserve
from scheduler.core.service import FLOOR_CLAMP
from scheduler.core.step_model import StepLoad
from scheduler.core.types import (
    Lane,
    OnInfeasible,
    Outcome,
    Reason,
    Refusal,
    Request,
    StepReport,
    TierSpec,
    retry_advice,
)

GUARD_ABOVE = 0.25  # engine-seconds of floor credit
URGENT_SHARE = 0.9  # of the tier's deadline
LEAD_BOUND = 2.0  # engine-seconds that an urgent tier may be ahead of the others
PACE_MARGIN = 1.15
PREFILL_SHARE = 0.5  # of a step, for prompts of worse ranks in flight
LEVEL_PREFILL_SHARE = 0.25  # the same while degraded
LONG_SHARE = 0.25  # of the best rank's deadline: a longer prefill is long
LONG_QUANTILE = 0.95  # of recent prompts
LONG_KV_SHARE = 0.40  # of the pool, for all long prompts that run
LONG_FLOOR = 0.10  # of its tier's dispatched work, while the long lane waits
BEST_QUIET = 30.0  # seconds without the best rank, after which two long prompts may be prefilled at a time
TICK = 1.0  # seconds between two looks of controller and ladder
STEPS_KEPT = 256
EVICT_BEFORE = 0.70  # of its expected output: a victim that is further is nearly done
LEVEL_MAX_TOKENS = 256  # output cap of the worst rank's new requests from level 1 on
LEVEL_RATE_CUT, LEVEL_RATE_GAIN, LEVEL_RATE_LEAST = 0.5, 0.05, 0.05  # a second: admission of the worst rank (AIMD)
LEVEL_3_BATCH = 0.7
ALPHA = 4.0  # weight of the prefill time in the order of deadlines
OPTIMISTIC, CAUTIOUS = 0.1, 0.75
BACKLOG_FAILURES = 2
REOPEN_AT = 0.8
LANES = (Lane.SHORT, Lane.LONG)
NO_ROOM = (Reason.SLOTS_FULL, Reason.SLOTS_RESERVED, Reason.KV_FULL)
DUE = (Reason.FLOOR_GUARD, Reason.URGENT)


class BatchingAware(Policy):
    """See the module text."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._failing: dict[str, int] = {}  # tier -> arrivals in a row that the backlog test failed
        self._prompts = PromptHistory()
        self._best_seen = 0.0  # when a request of the best rank came last
        self._lane_cost: dict[tuple[str, Lane], float] = {}  # work dispatched while both lanes of a tier waited
        self._controller = Controller(books.batcher.cap)
        self._ladder = Ladder()
        self._next_tick = 0.0
        self._looked_at = 0.0  # the last decision
        self._step_times: deque[float] = deque(maxlen=STEPS_KEPT)
        self._preemptions = 0  # engine recomputes since the last tick
        self._reservation: Reservation | None = None  # of this pass over the candidates
        self._busy_seen = books.service.busy
        self._admission = 1.0  # share of the worst rank's arrivals that is let in while degraded
        self._admission_credit = 0.0
        self.reconfigured()

    def reconfigured(self) -> None:
        tiers = self.books.tiers
        self._ranked = sorted(tiers.values(), key=lambda tier: (tier.rank, tier.name))
        self._best = self._ranked[0].rank if self._ranked else 1
        self._worst = self._ranked[-1].rank if self._ranked else 1
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
        if request.evictions:
            return request.queue_deadline
        return min(request.queue_deadline, self.latest_start(request))

    def admit(self, request: Request, now: float) -> Request | Refusal:
        tier = self.books.tier(request)
        if tier.rank == self._best:
            self._best_seen = now
        if self.latest_start(request) < now:
            return self._unreachable(request, tier) or self._infeasible(request, tier)
        if tier.on_infeasible is OnInfeasible.REJECT and (refusal := self._backlog(request, tier, now)):
            return refusal
        long = self._is_long(request)
        if self.books.level and (refusal := self._degraded(request, tier, long)):
            return refusal
        if self.books.level and self._best != tier.rank == self._worst:
            request = replace(request, max_tokens=min(request.max_tokens, LEVEL_MAX_TOKENS))
        return replace(request, lane=Lane.LONG) if long else request

    def _is_long(self, request: Request) -> bool:
        """Long for the best rank's deadline and among its like: on a slow engine the first holds for half of all."""
        self._prompts.observe(request.prompt_tokens)
        seconds = self.books.alone_seconds(request.prompt_tokens)
        if seconds <= LONG_SHARE * self._ranked[0].deadline(0.0, True, 0, None):
            return False
        return request.prompt_tokens > self._prompts.quantile(LONG_QUANTILE)

    def overdue(self, request: Request, now: float) -> Request | Refusal | None:
        if request.lane is Lane.LATE or request.evictions or self.latest_start(request) > now:
            return None
        return self._infeasible(request, self.books.tier(request))

    def _unreachable(self, request: Request, tier: TierSpec) -> Refusal | None:
        """The refusal of what an idle engine could not serve in time either: another try would end like this one."""
        books = self.books
        seconds = books.alone_seconds(request.prompt_tokens)
        if not request.stream:
            alone = StepLoad(0, 1, request.prompt_tokens)
            seconds += books.expected_tokens(request, OPTIMISTIC) * books.steps.predict(alone)
        promised = request.deadline - request.arrival
        if tier.on_infeasible is OnInfeasible.LATE or seconds * books.steps.quantile(OPTIMISTIC) <= promised:
            return None
        return Refusal(
            Reason.DEADLINE_UNREACHABLE,
            f"The model needs about {seconds:.1f} s for this request alone, and its deadline is {promised:.1f} s.",
        )

    def _infeasible(self, request: Request, tier: TierSpec) -> Request | Refusal:
        if tier.on_infeasible is OnInfeasible.LATE:
            return replace(request, lane=Lane.LATE)
        return Refusal(
            Reason.DEADLINE_INFEASIBLE,
            f"The deadline of {request.deadline - request.arrival:.1f} s cannot be met at the present load.",
            retry_advice(self._clears_in(tier)),
        )

    def _backlog(self, request: Request, tier: TierSpec, now: float) -> Refusal | None:
        """Refuse early what would expire in the queue: the tier's queued work over the rate that it is guaranteed."""
        start = now + self._clears_in(tier, request.tenant)
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
            retry_advice(start - now - REOPEN_AT * (latest - now)),
        )

    def _clears_in(self, tier: TierSpec, tenant: str | None = None) -> float:
        """Predicted seconds until what waits in the tier has been started, or what one tenant's next request waits for.

        Tenants take turns: a request has its tenant's own queue before it, and as much of each other tenant's.
        """
        queue = self.books.queue
        work = queue.cost(tier.name)
        if tenant is not None:
            account = self.books.service.tiers[tier.name]
            own = queue.tenant_cost(tier.name, tenant)
            others = account.waiting_tenants - (own > 0)
            work = min(work, own * (1 + others))
        return work / max(self._rate(tier), 1e-3)

    def _rate(self, tier: TierSpec) -> float:
        """Engine-seconds a second that the tier can count on: by weights among those that wait, floor at least."""
        waiting = [one for one in self._ranked if self.books.queue.length(one.name) or one is tier]
        total = sum(one.weight for one in waiting)
        return max(tier.weight / total if total else 0.0, tier.floor)

    def _degraded(self, request: Request, tier: TierSpec, long: bool) -> Refusal | None:
        """What the ladder refuses. A tier that is owed its floor is never refused by levels 1 and 2."""
        level = self.books.level
        owed = level < 3 and self.books.service.tiers[tier.name].credit > GUARD_ABOVE
        if tier.rank == self._best or level > 3 or owed:
            return None
        deadline = tier.deadline(0.0, request.stream, request.max_tokens, None)
        over_floor = self.books.queue.cost(tier.name) / max(tier.floor, 1e-3) > deadline
        if tier.rank != self._worst:
            refused = level >= 2 and over_floor
        elif level >= 2:
            refused = over_floor or long
        else:
            self._admission_credit += self._admission
            refused = self._admission_credit < 1.0
            self._admission_credit -= 0.0 if refused else 1.0
        if not refused:
            return None
        wait = retry_advice(self._clears_in(tier))
        return Refusal(Reason.DEGRADED, f"The service is degraded (level {level}); better tiers go first.", wait)

    # --- once a second ----------------------------------------------------------------------------------------------

    def deciding(self, now: float) -> None:
        self._looked_at = now
        if now < self._next_tick:
            return
        elapsed = max(now - self._next_tick + TICK, TICK) if self._next_tick else TICK
        self._next_tick = now + TICK
        books = self.books
        busy = min((books.service.busy - self._busy_seen) / elapsed, 1.0)
        self._busy_seen = books.service.busy
        self._controller.resize(books.batcher.cap)
        load = Load(self._step_mean(), self._preemptions / elapsed, busy, len(books.queue) > 0)
        change = self._controller.tick(now, books.tiers, load)
        if change is not None:
            books.changes.append(change)
        self._climb(now, elapsed)

    def _climb(self, now: float, elapsed: float) -> None:
        books = self.books
        waits = [self._oldest_wait(tier, now) for tier in self._ranked if tier.rank != self._worst]
        pressure = Pressure(
            books.batcher.peak_share(self._cautious), max(waits, default=0.0), self._preemptions / elapsed
        )
        self._preemptions = 0
        self._note(self._ladder.update(now, pressure))
        if books.level:
            self._admission = max(self._admission * LEVEL_RATE_CUT, LEVEL_RATE_LEAST)
        else:
            self._admission = min(self._admission + LEVEL_RATE_GAIN, 1.0)

    def next_wakeup(self, now: float) -> float | None:
        """Levels are entered and left by time alone, and a request of the best rank becomes urgent by it."""
        instants = [self._next_tick] if self.books.level or len(self.books.queue) else []
        for tier in self._ranked:
            if tier.rank == self._best:
                heads = [self._urgent_head(tier, lane) for lane in LANES]
                instants += [self._urgent_from(head, tier) for head in heads if head is not None]
        return min((instant for instant in instants if instant > self._looked_at), default=None)

    def engine_failed(self, now: float, cause: str) -> None:
        self._note(self._ladder.engine_failed(now, cause))

    def engine_recovered(self, now: float) -> None:
        self._ladder.engine_recovered(now)

    def _note(self, change: LevelChange | None) -> None:
        if change is not None:
            self.books.changes.append(change)
        self.books.level = self._ladder.level

    def _oldest_wait(self, tier: TierSpec, now: float) -> float:
        """Wait of the tier's first feasible request, and what it still has to wait, over its deadline."""
        head = self._first(tier)
        if head is None:
            return 0.0
        promised = max(head.deadline - head.arrival, 1e-3)
        return (now - head.arrival + self.books.alone_seconds(head.prompt_tokens)) / promised

    def _step_mean(self) -> float:
        return sum(self._step_times) / len(self._step_times) if self._step_times else 0.0

    def stepped(self, report: StepReport) -> None:
        self._step_times.append(report.elapsed / report.steps)
        self._preemptions += report.preemptions

    def ended(self, flight: InFlight, outcome: Outcome, now: float) -> None:
        if outcome.reason is not None or flight.first_token is None:
            return
        request, tier = flight.request, self.books.tier(flight.request)
        in_time = (flight.first_token if request.stream else now) <= request.deadline
        tokens = max(
            flight.tokens, request.per_sequence(outcome.completion_tokens)
        )  # the last ones may not have been reported one by one
        paced = not request.stream or now - flight.first_token <= max(tokens - 1, 0) * tier.tpot
        self._controller.completed(Completion(now, tier.name, in_time and paced, missed_pace=not paced))

    # --- turns ------------------------------------------------------------------------------------------------------

    def candidates(self, now: float) -> Iterator[Offer]:
        tiers = [tier for tier in self._ranked if self.books.queue.length(tier.name)]
        if not tiers:
            return
        self.books.service.pace()
        self._reservation = None
        waiting: Request | None = None  # the one that has the pool's reservation
        served = self._worst  # ranks behind it may not go: a due prompt waits until open streams can bear it
        seen: set[str] = set()  # a request has its first turn only
        for request, reason in self._turns(tiers, self._urgent(tiers, now)):
            if request is None or request.id in seen:
                continue
            seen.add(request.id)
            tier = self.books.tier(request)
            blocked = self._room(request, tier, reason) or self._interference(request, tier, reason, now)
            if blocked is None and tier.rank > served:
                blocked = Reason.RESERVATION
            if blocked is None and waiting is not None and not self._passes(waiting, request, tier, now):
                blocked = Reason.RESERVATION
            if blocked is None:
                yield Candidate(request, reason)
                continue
            yield Blocked(request, blocked)
            if reason in DUE and blocked is Reason.STREAM_PACE:
                served = min(served, tier.rank)
            if waiting is None and reason in DUE and blocked in NO_ROOM:
                waiting = request
                if reason is Reason.URGENT and (victim := self._victim(request, tier, now)):
                    yield Evict(request, victim)
            if blocked is Reason.KV_FULL and self.books.level == 3 and (victim := self._overload_victim(tier)):
                yield Evict(request, victim)

    def dispatched(self, request: Request, now: float) -> None:
        queue, tier = self.books.queue, request.tier
        if all(queue.head(tier, lane) is not None for lane in LANES):
            key = (tier, request.lane)
            self._lane_cost[key] = self._lane_cost.get(key, 0.0) + self.books.cost(request)

    def _turns(self, tiers: list[TierSpec], urgent: list[Request]) -> Iterator[tuple[Request | None, Reason]]:
        accounts = self.books.service.tiers
        for tier in sorted(tiers, key=self._floor_order):
            credit = accounts[tier.name].credit
            suspended = self.books.level >= 3 and tier.rank != self._best
            if credit > GUARD_ABOVE and not suspended and (not urgent or self._absolute(tier)):
                yield self._floor_head(tier), Reason.FLOOR_GUARD
        for request in urgent:
            yield request, Reason.URGENT
        for tier in sorted(tiers, key=lambda one: (accounts[one.name].own.order(), one.rank)):
            yield self._fair_head(tier), Reason.FAIR_TURN
            yield self._first(tier), Reason.FAIR_TURN
            yield self.books.queue.head(tier.name, Lane.LATE), Reason.LATE_TURN

    def _urgent(self, tiers: list[TierSpec], now: float) -> list[Request]:
        """Heads whose latest start is near, of tiers that are not too far ahead of the others.

        Better ranks first, then the smallest key: with more urgent work than room, deadline order alone would let
        every rank miss by a little.
        """
        accounts = self.books.service.tiers
        least = min((accounts[tier.name].own.virtual() for tier in tiers), default=0.0)
        found = []
        for tier in tiers:
            if not tier.weight:
                continue  # background is never urgent
            lead = accounts[tier.name].own.weight * (accounts[tier.name].own.virtual() - least)
            if len(tiers) > 1 and lead >= LEAD_BOUND:
                continue
            heads = [self._urgent_head(tier, lane) for lane in LANES]
            found += [head for head in heads if head is not None and self._urgent_from(head, tier) <= now]
        return sorted(found, key=lambda head: (self.books.tier(head).rank, self.key(head), head.arrival, head.id))

    def _urgent_from(self, head: Request, tier: TierSpec) -> float:
        """The instant from which on a head is urgent: at once in the best rank while the last slot is contended."""
        if tier.rank == self._best and self.books.batcher.sequences >= self._cap() - 1:
            return head.arrival
        window = max(2 * self.books.step_time(), URGENT_SHARE * tier.deadline(0.0, True, 0, None))
        return self.latest_start(head) - window

    def _urgent_head(self, tier: TierSpec, lane: Lane) -> Request | None:
        """The smallest key of the lane; but a tenant that is far ahead of the others of its tier waits for its turn."""
        queue, account = self.books.queue, self.books.service.tiers[tier.name]
        head = queue.head(tier.name, lane)
        if head is None or account.waiting_tenants < 2:
            return head
        tenant = account.next_tenant()
        if tenant is None or account.tenants[head.tenant].virtual() - account.least < LEAD_BOUND:
            return head
        return queue.tenant_head(tier.name, lane, tenant)

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

    def _floor_head(self, tier: TierSpec) -> Request | None:
        """Whom the tier's floor serves: what is late has a right to it too, after what can still be in time."""
        return self._fair_head(tier) or self._first(tier) or self.books.queue.head(tier.name, Lane.LATE)

    def _absolute(self, tier: TierSpec) -> bool:
        """Its floor has been withheld for so long that it goes before everybody."""
        return self.books.service.tiers[tier.name].credit >= FLOOR_CLAMP

    def _floor_order(self, tier: TierSpec) -> tuple[bool, float]:
        credit = self.books.service.tiers[tier.name].credit
        return not self._absolute(tier), -credit / max(tier.floor, 1e-9)

    def _long_is_owed(self, tier: TierSpec) -> bool:
        short, long = (self._lane_cost.get((tier.name, lane), 0.0) for lane in LANES)
        return long < LONG_FLOOR * (short + long)

    # --- tests ------------------------------------------------------------------------------------------------------

    def _room(self, request: Request, tier: TierSpec, reason: Reason) -> Reason | None:
        """Slots and memory, with what is kept for better ranks and for growth."""
        batcher = self.books.batcher
        most = self._cap()
        if tier.rank != self._best and len(batcher) and batcher.sequences + request.sequences > most:
            return Reason.SLOTS_FULL
        return (
            batcher.blocked(request)
            or batcher.reserved_against(request, self._better[tier.name])
            or batcher.forecast(request, self._headroom(tier, reason in DUE), self._cautious)
        )

    def _headroom(self, tier: TierSpec, due: bool) -> float:
        """The part of memory that the tier leaves free.

        What is due in a middle rank may have the best rank's room: headroom is kept from those that can wait.
        """
        return self._ranked[0].headroom if due and tier.rank < self._worst else tier.headroom

    def _victim(self, request: Request, tier: TierSpec, now: float) -> Request | None:
        """Whom to evict so that an urgent request of the best rank starts in time: the cheapest to compute again."""
        books = self.books
        if tier.rank != self._best or books.evicting:
            return None
        if self._reserve(request, tier, now).start <= self.latest_start(request):
            return None
        return self._cheapest([flight for flight in books.batcher.running() if self._may_evict(flight, tier)])

    def _overload_victim(self, tier: TierSpec) -> Request | None:
        """While running requests outgrow memory: one of the worst rank, in place of whom the engine would choose."""
        books = self.books
        if tier.rank == self._worst or books.evicting or books.batcher.peak_share(self._cautious) <= 1.0:
            return None
        return self._cheapest(
            [
                flight
                for flight in books.batcher.running()
                if books.tier(flight.request).rank == self._worst and self._may_evict(flight, tier)
            ]
        )

    def _cheapest(self, victims: list[InFlight]) -> Request | None:
        return min(victims, key=self._price_of_eviction).request if victims else None

    def _may_evict(self, flight: InFlight, tier: TierSpec) -> bool:
        request, owner = flight.request, self.books.tier(flight.request)
        if not owner.preemptible or owner.rank <= tier.rank or request.evictions or not request.resumable:
            return False
        expected = flight.tokens + flight.remaining(self._cautious)
        return flight.tokens < EVICT_BEFORE * expected

    def _price_of_eviction(self, flight: InFlight) -> tuple[float, str]:
        seconds = self.books.alone_seconds(flight.request.prompt_tokens + flight.tokens)
        return seconds / max(flight.blocks, 1), flight.request.id

    def _passes(self, waiting: Request, request: Request, tier: TierSpec, now: float) -> bool:
        """A better rank waits for a worse one's reservation only if nothing else would keep the worse one's floor.

        From level 3 on nobody else passes.
        """
        owner = self.books.tier(waiting)
        if tier.rank < owner.rank and not self._absolute(owner):
            return True
        # The reservation looks at all that runs, so it is made only when somebody could pass.
        return self.books.level < 3 and may_pass(self.books, self._reserve(waiting, owner, now), request, now)

    def _cap(self) -> int:
        """How many may run; the best rank may use what the controller takes from the others."""
        cap = self._controller.cap
        return max(int(cap * LEVEL_3_BATCH), 1) if self.books.level >= 3 else cap

    def _reserve(self, request: Request, tier: TierSpec, now: float) -> Reservation:
        if self._reservation is None or self._reservation.request is not request:
            blocks = int((1 - self._headroom(tier, due=True)) * self.books.capacity.total_blocks)
            slots = self.books.batcher.cap if tier.rank == self._best else self._cap()
            self._reservation = reserve(self.books, request, slots, blocks, self._cautious, now)
        return self._reservation

    def _cautious(self, request: Request, produced: int) -> int:
        return self.books.expected_tokens(request, CAUTIOUS, produced)

    def _interference(self, request: Request, tier: TierSpec, reason: Reason, now: float) -> Reason | None:
        """What the prompt does to others: the best rank's next prefill, and the pace of open streams."""
        books = self.books
        if tier.rank == self._best or not len(books.batcher):
            return None
        if request.lane is Lane.LONG and self._long_lane_full(request, now):
            return Reason.LONG_LANE
        if reason is Reason.FLOOR_GUARD and self._absolute(tier):
            return None
        pending = books.service.remaining_prefill()
        share = LEVEL_PREFILL_SHARE if books.level else PREFILL_SHARE
        if pending and pending + request.prompt_tokens > share * books.capacity.step_tokens:
            return Reason.PREFILL_BUDGET
        chunk = min(pending + request.prompt_tokens, books.capacity.step_tokens)
        in_hand = books.batcher.next_behind(books.tiers) - now
        return Reason.STREAM_PACE if in_hand < PACE_MARGIN * books.step_time(chunk) else None

    def _long_lane_full(self, request: Request, now: float) -> bool:
        """One long prefill at a time (two while the best rank is quiet), and a bounded part of memory for them."""
        books = self.books
        running = [flight for flight in books.batcher.running() if flight.request.lane is Lane.LONG]
        prefilling = sum(1 for flight in running if flight.first_token is None)
        if prefilling >= (2 if now - self._best_seen > BEST_QUIET else 1):
            return True
        own = request.sequences * books.capacity.blocks(request.prompt_tokens)
        blocks = sum(flight.blocks for flight in running) + own
        return bool(running) and blocks > LONG_KV_SHARE * books.capacity.total_blocks
