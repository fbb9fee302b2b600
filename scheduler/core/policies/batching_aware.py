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
from scheduler.core.policies.base import Blocked, Candidate, Policy
from scheduler.core.service import FLOOR_CLAMP
from scheduler.core.types import Lane, OnInfeasible, Reason, Refusal, Request, TierSpec

GUARD_ABOVE = 0.25  # engine-seconds of floor credit
URGENT_SHARE = 0.35  # of the tier's deadline
LEAD_BOUND = 2.0  # engine-seconds that an urgent tier may be ahead of the others
PACE_MARGIN = 1.15
PREFILL_SHARE = 0.5  # of a step, for prompts of worse ranks in flight
LONG_SHARE = 0.25  # of the best rank's deadline: a longer prefill is long
LONG_KV_SHARE = 0.40
OPTIMISTIC, CAUTIOUS = 0.1, 0.75
BACKLOG_FAILURES = 2
REOPEN_AT = 0.8
LANES = (Lane.SHORT, Lane.LONG)


class BatchingAware(Policy):
    """See the module text."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._failing: dict[str, int] = {}  # tier -> arrivals in a row that the backlog test failed
        self._refresh_ranks()

    def _refresh_ranks(self) -> None:
        tiers = self.books.tiers
        self._ranked = sorted(tiers.values(), key=lambda tier: (tier.rank, tier.name))
        self._best = self._ranked[0].rank if self._ranked else 1
        self._better = {tier.name: [one for one in self._ranked if one.rank < tier.rank] for tier in self._ranked}

    # --- arrival ----------------------------------------------------------------------------------------------------

    def key(self, request: Request) -> float:
        """Deadline plus remaining prefill time: of two equal deadlines the shorter work first."""
        alpha = 4.0 if self.books.level else 1.0
        return request.deadline + alpha * self.books.steps.coefficients[1] * request.prompt_tokens

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
        if self.latest_start(request) < now:
            return self._infeasible(request, tier, now)
        if tier.on_infeasible is OnInfeasible.REJECT and (refusal := self._backlog(request, tier, now)):
            return refusal
        return request

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
        urgent = self._urgent(tiers, now)
        for request, reason in self._turns(tiers, urgent, now):
            blocked = self._tests(request, self.books.tier(request), reason, now)
            yield Candidate(request, reason) if blocked is None else Blocked(request, blocked)

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
        heads = [self.books.queue.tenant_head(tier.name, lane, tenant) for lane in LANES]
        return min((head for head in heads if head is not None), key=self.key, default=None)

    # --- tests ------------------------------------------------------------------------------------------------------

    def _tests(self, request: Request, tier: TierSpec, reason: Reason, now: float) -> Reason | None:
        batcher = self.books.batcher
        return (
            batcher.reserved_against(tier, self._better[tier.name])
            or batcher.forecast(request, tier.headroom, self._cautious)
            or self._interference(request, tier, reason, now)
        )

    def _cautious(self, request: Request, produced: int) -> int:
        return self.books.expected_tokens(request, CAUTIOUS, produced)

    def _interference(self, request: Request, tier: TierSpec, reason: Reason, now: float) -> Reason | None:
        """What the prompt does to others: the best rank's next prefill, and the pace of open streams."""
        books = self.books
        if tier.rank == self._best or not len(books.batcher):
            return None
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
