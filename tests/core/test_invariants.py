"""The twenty invariants of the scheduler, each a line of prose and a property over random workloads and faults.

 1  every arrival ends in exactly one way         test_every_arrival_ends_in_exactly_one_way
 2  the in-flight table is the engine's truth     Plant._check, after every decision of every property here
 3  in flight <= the cap at each dispatch         test_no_dispatch_exceeds_the_cap_however_it_shrinks
 4  memory at its peak leaves the headroom        test_memory_at_its_peak_leaves_each_tiers_headroom
 5  the sum of service is the busy time           test_attributed_service_is_the_busy_time
 6  after a decision nobody else could go         test_after_a_decision_nobody_else_could_go
 7  floors hold over any interval                 test_floors_hold_over_any_interval
 8  backlogged tiers share by their weights       test_backlogged_tiers_are_never_far_apart_in_virtual_time
 9  an idle tier gains no credit                  test_idleness_earns_no_credit_and_virtual_time_never_falls
10  virtual time never falls                      the same
11  order inside a lane                           test_one_tenants_requests_of_a_lane_leave_in_the_order_of_their_keys
12  nothing is dispatched after its latest start  test_nothing_is_dispatched_after_its_latest_start_but_what_is_late
13  who may be evicted                            test_evictions_are_rare_rightful_and_lose_no_token
14  one eviction, no gap                          the same; Plant._deliver asserts the gaplessness everywhere
15  backfilling never delays a reservation        test_a_backfilled_request_never_delays_the_reservation
16  dwell between levels, level 0 reachable       test_levels_keep_their_dwell_and_level_zero_is_reached
17  same log, same decisions                      test_the_same_event_log_gives_the_same_decisions
18  a bad policy is replaced at once              test_a_policy_that_fails_is_replaced_within_one_decision
19  names of tenants mean nothing                 test_the_names_of_tenants_change_nothing
20  capacity never lowers the value               test_more_capacity_does_not_lower_the_value
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.core import policies as registry
from scheduler.core.batcher import InFlight
from scheduler.core.books import Books
from scheduler.core.degradation import DEFAULT_RULES, DWELL, Ladder, LevelChange, Pressure
from scheduler.core.guard import PolicyReplaced
from scheduler.core.kv_forecast import Forecast
from scheduler.core.policies import Offer, batching_aware
from scheduler.core.policies.batching_aware import BatchingAware
from scheduler.core.service import FLOOR_CLAMP, FLOOR_MOST
from scheduler.core.types import (
    Dispatch,
    Lane,
    OnInfeasible,
    Outcome,
    PolicyConfig,
    Preempt,
    Refusal,
    Request,
    TierSpec,
)
from scheduler.engines.simulated.machine import StepCost
from tests.core.plant import CAPACITY, COST, TIERS, Arrival, Plant, Trouble, merged, received, rounds, value
from tests.laws import laws

HARD = laws(20)
LONG = laws(3)  # for properties of half a minute of overload


@st.composite
def workloads(draw: st.DrawFn, size: int = 40, cancels: bool = True, tenants: int = 3) -> list[Arrival]:
    """Bursty arrivals of all tiers, with lengths that fit the plant."""
    at, arrivals = 0.0, []
    for _ in range(draw(st.integers(1, size))):
        at += draw(st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.5, 3.0]))
        output = draw(st.integers(1, 60))
        arrivals.append(
            Arrival(
                at,
                draw(st.sampled_from(sorted(TIERS))),
                draw(st.integers(1, 300)),
                output,
                output + draw(st.sampled_from([0, 0, 0, 40])),
                tenant=f"t{draw(st.integers(1, tenants))}",
                stream=draw(st.booleans()),
                cancel_after=draw(st.none() | st.floats(0.0, 2.0)) if cancels else None,
            )
        )
    return arrivals


policies = st.sampled_from(["batching_aware", "priority", "continuous", "edf", "wfq"])
instants = st.floats(0.0, 6.0)


def few(*parts: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.tuples(instants, *parts), max_size=2).map(tuple)


@st.composite
def contracts(draw: st.DrawFn) -> dict[str, TierSpec]:
    """The tiers with other weights, also none, and other deadlines."""
    return {
        name: replace(
            tier, weight=draw(st.sampled_from([0.0, 1.0, 80.0])), ttft=tier.ttft * draw(st.sampled_from([0.3, 1, 4]))
        )
        for name, tier in TIERS.items()
    }


@st.composite
def troubles(draw: st.DrawFn, switching: bool = True) -> Trouble:
    """Deaths, stalls, pauses, other slots, wrong estimates; `switching`: other contracts and policies as well."""
    configs = st.builds(PolicyConfig, name=policies, max_batch=st.none() | st.integers(1, 8))
    return Trouble(
        deaths=draw(few(st.floats(0.0, 3.0))),
        stalls=draw(few(st.sampled_from([0.05, 1.0, 12.0]))),
        pauses=draw(few(st.sampled_from([0.2, 5.0, 3600.0]))),
        changes=draw(few(contracts(), configs)) if switching else (),
        slots=draw(few(st.integers(1, 8))),
        belief=draw(st.sampled_from([1.0, 0.2, 5.0])),
    )


def weighted(*weights: float) -> dict[str, float]:
    return dict(zip(TIERS, weights, strict=True))


# Each law is tried with every kind of trouble at once, whatever chance draws: all tiers and three tenants, streams and
# others, lengths that were asked for and others, some who leave.
CROWD = [
    Arrival(
        at=0.08 * n,
        tier=("gold", "silver", "bronze")[n % 3],
        prompt=(20, 90, 40, 280, 60)[n % 5],
        output=(5, 30, 12, 50)[n % 4],
        max_tokens=(5, 30, 52, 50)[n % 4],
        tenant=f"t{n % 7 % 3 + 1}",
        stream=n % 4 > 0,
        cancel_after=0.4 if n % 11 == 5 else None,
    )
    for n in range(60)
]
PATIENT = [replace(arrival, cancel_after=None) for arrival in CROWD]
OTHER_WEIGHTS = {name: replace(TIERS[name], weight=weight) for name, weight in weighted(0, 80, 1).items()}
EVERYTHING = Trouble(
    deaths=((1.5, 0.3), (3.0, 1.0)),
    stalls=((0.7, 1.0),),
    pauses=((2.6, 0.2),),
    changes=((0.5, OTHER_WEIGHTS, PolicyConfig(name="priority")), (1.0, TIERS, PolicyConfig(max_batch=6))),
    slots=((0.3, 3), (3.6, 8)),
    belief=5.0,
)
WITHOUT_SWITCHING = replace(EVERYTHING, changes=())


@HARD
@example(CROWD, "batching_aware", EVERYTHING)
@given(workloads(), policies, troubles())
def test_every_arrival_ends_in_exactly_one_way(arrivals: list[Arrival], policy: str, trouble: Trouble) -> None:
    """1: finished, refused, expired, cancelled, aborted or failed: once each. 2: books and engine agree at the end."""
    plant = Plant(arrivals, policy, trouble=trouble).play()
    assert [len(fate.ends) for fate in plant.fates.values()] == [1] * len(arrivals)
    snapshot = plant.planner.snapshot(plant.now)
    assert (snapshot.in_flight, snapshot.kv_reserved, snapshot.level) == (0, 0.0, 0)
    assert plant.planner.waiting() == 0
    assert plant.machine.kv_usage == 0.0


@HARD
@example(CROWD, "batching_aware", EVERYTHING)
@given(workloads(), policies, troubles())
def test_no_dispatch_exceeds_the_cap_however_it_shrinks(arrivals: list[Arrival], policy: str, trouble: Trouble) -> None:
    """3: whoever enters is within the operator's and the engine's cap; what ran when they shrank may run on."""
    plant = Plant(arrivals, policy, trouble=trouble)
    enter = plant.planner.books.batcher.enter

    def checked(request: Request, now: float) -> None:
        enter(request, now)
        books = plant.planner.books
        assert len(books.batcher) <= min(books.capacity.max_seqs, books.config.max_batch or math.inf)

    plant.planner.books.batcher.enter = checked  # type: ignore[method-assign]
    plant.play()


@HARD
@example(CROWD, WITHOUT_SWITCHING)
@given(workloads(), troubles(switching=False))
def test_memory_at_its_peak_leaves_each_tiers_headroom(arrivals: list[Arrival], trouble: Trouble) -> None:
    """4: with the lengths that were believed, the peak to come is within (1 - h) of the pool at each admission.

    What is due in a middle rank has the best rank's h. The forecast rounds each request up to blocks twice, so that the
    worst case itself may be less.
    """
    plant = Plant(arrivals, trouble=trouble)
    enter = plant.planner.books.batcher.enter

    def checked(request: Request, now: float) -> None:
        books = plant.planner.books
        alone = not len(books.batcher)
        enter(request, now)
        cautious = plant.planner._policy._policy._cautious  # type: ignore[attr-defined]
        running = books.batcher.running()
        forecast = Forecast(
            [(flight.remaining(cautious), flight.blocks) for flight in running], CAPACITY.block_size
        ).peak
        worst = sum(CAPACITY.blocks(flight.request.worst_case_tokens) for flight in running)
        ranked = sorted(books.tiers.values(), key=lambda tier: tier.rank)
        tier = books.tier(request)
        headroom = tier.headroom if tier.rank == ranked[-1].rank else min(tier.headroom, ranked[0].headroom)
        assert alone or min(forecast, worst) <= (1 - headroom) * CAPACITY.total_blocks

    plant.planner.books.batcher.enter = checked  # type: ignore[method-assign]
    plant.play()


@HARD
@example(CROWD, "batching_aware", EVERYTHING)
@given(workloads(), policies, troubles())
def test_attributed_service_is_the_busy_time(arrivals: list[Arrival], policy: str, trouble: Trouble) -> None:
    """5: the sum of what all tiers received is the engine's busy time, to a millionth."""
    plant = Plant(arrivals, policy, trouble=trouble).play()
    service = plant.planner.books.service
    assert sum(received(plant).values()) + service.unattributed == pytest.approx(plant.busy, rel=1e-6, abs=1e-9)
    assert service.busy == pytest.approx(plant.busy, rel=1e-9, abs=1e-12)


@HARD
@example(PATIENT, "batching_aware", EVERYTHING)
@given(workloads(cancels=False), policies, troubles())
def test_after_a_decision_nobody_else_could_go(arrivals: list[Arrival], policy: str, trouble: Trouble) -> None:
    """6: asked again at the same instant without news, the planner dispatches nothing. An eviction is news."""

    def ask_again(plant: Plant) -> None:
        evicted = any(at == plant.now and isinstance(decision, Preempt) for at, decision in plant.log)
        if plant.alive and not evicted:
            plant.planner._changed = True
            assert not [one for one in plant.planner.decide(plant.now) if isinstance(one, Dispatch)]

    Plant(arrivals, policy, trouble=trouble, observe=ask_again).play()


def in_flight(plant: Plant) -> dict[str, list[float]]:
    """By tier: what each running request is predicted to cost, or has cost already if that is more."""
    books = plant.planner.books
    found: dict[str, list[float]] = {name: [] for name in books.tiers}
    for flight in books.batcher.running():
        cost = max(books.cost(flight.request), books.service.charged(flight.request.id))
        found[flight.request.tier].append(cost)
    return found


@dataclass
class FloorWatch:
    """Of one tier, while it waits without a break: the most that its service was ahead of its floor, and now is."""

    ahead: float = -math.inf
    undelivered: float = 0.0  # the most that was in flight undelivered in the interval, over all tiers


@LONG
@example(weighted(60, 10, 10), (0.05, 0.1, 0.6), 20, 2, Trouble(slots=((0.8, 6), (3.1, 3)), belief=0.2))
@example(weighted(10, 1, 1), (0.05, 0.1, 0.6), 164, 10, Trouble())
@example(weighted(1, 60, 1), (0.1, 0.5, 0.2), 96, 3, Trouble(slots=((0.4, 5),), belief=5.0))
@example(weighted(1, 60, 1), (0.3, 0.15, 0.05), 60, 20, Trouble(deaths=((1.0, 0.5), (4.0, 2.0))))
@given(
    st.fixed_dictionaries({name: st.sampled_from([1.0, 10.0, 60.0]) for name in TIERS}),
    st.sampled_from([(0.3, 0.15, 0.05), (0.1, 0.5, 0.2), (0.05, 0.1, 0.6)]),
    st.integers(20, 200),
    st.integers(2, 40),
    troubles(switching=False),
)
def test_floors_hold_over_any_interval(
    weights: dict[str, float], floors: tuple[float, float, float], prompt: int, output: int, trouble: Trouble
) -> None:
    """7: while tier i waits, levels 0 to 2: S_i >= m_i busy - (2 clamp + .25 + sum of U), over every interval.

    With D = S_i - m_i busy that is: D never falls from its highest point so far by more than the slack. Without stalls
    and pauses: nobody can be served during a step that takes long.
    """
    tiers = {
        name: replace(tier, weight=weights[name], floor=floor, on_infeasible=OnInfeasible.LATE, queue_max_wait=1e4)
        for (name, tier), floor in zip(TIERS.items(), floors, strict=True)
    }
    watches: dict[str, FloorWatch] = {}

    def check(plant: Plant) -> None:
        books = plant.planner.books
        undelivered = sum(max(costs, default=0.0) for costs in in_flight(plant).values())
        for name, seconds in received(plant).items():
            if not books.queue.length(name) or books.level > 2 or not plant.alive:
                watches.pop(name, None)
                continue
            watch = watches.setdefault(name, FloorWatch())
            ahead = seconds - tiers[name].floor * books.service.busy
            watch.ahead = max(watch.ahead, ahead)
            watch.undelivered = max(watch.undelivered, undelivered)
            assert watch.ahead - ahead <= 2 * FLOOR_CLAMP + 0.25 + watch.undelivered, (name, plant.now)

    rate = 1.2 / (prompt * COST.prefill_token + output * (COST.base / 4 + COST.decode_seq))  # 1.2 of what can be served
    Plant(
        rounds(dict.fromkeys(TIERS, rate), 25.0, prompt, output),
        tiers=tiers,
        trouble=replace(trouble, stalls=(), pauses=()),
        observe=check,
    ).play(until=27.0)


@LONG
@given(
    st.fixed_dictionaries({name: st.sampled_from([1.0, 10.0, 60.0]) for name in TIERS}),
    st.integers(20, 200),
    st.integers(2, 40),
)
def test_backlogged_tiers_are_never_far_apart_in_virtual_time(
    weights: dict[str, float], prompt: int, output: int
) -> None:
    """8: of tiers that wait without a break and without urgency, |V_i - V_j| <= (2 max U + burst) / min w.

    U: the cost of one request; burst: of all that were in flight at a time. The tiers differ in nothing but weight;
    the best rank, which has privileges, is another that sends nothing.
    """
    calm = TierSpec("", 2, ttft=1e4, e2e=1e4, tpot=1e3, queue_max_wait=1e5, headroom=0.1)
    tiers = {name: replace(calm, name=name, weight=weight) for name, weight in weights.items()}
    best = replace(calm, name="best", rank=1, weight=1.0)
    least_share = min(weights.values()) / (sum(weights.values()) + best.weight)
    largest = burst = 0.0

    def check(plant: Plant) -> None:
        nonlocal largest, burst
        books, costs = plant.planner.books, in_flight(plant)
        if not all(books.queue.length(name) for name in tiers):
            return
        largest = max(largest, *(max(one, default=0.0) for one in costs.values()))
        burst = max(burst, sum(map(sum, costs.values())))
        virtual = [books.service.tiers[name].own.virtual() for name in tiers]
        assert max(virtual) - min(virtual) <= (2 * largest + burst) / least_share

    arrivals = [replace(one, at=0.0) for one in rounds(dict.fromkeys(TIERS, 10.0), 15.0, prompt, output)]
    Plant(arrivals, tiers=tiers | {"best": best}, observe=check).play(until=20.0)


@HARD
@example(CROWD, WITHOUT_SWITCHING)
@given(workloads(), troubles(switching=False))
def test_idleness_earns_no_credit_and_virtual_time_never_falls(arrivals: list[Arrival], trouble: Trouble) -> None:
    """9: a tier with nothing waiting gains no floor credit, and nobody more than the clamp.

    10: V of every tier only grows; one that returns starts at v, the least V among those that waited, or above it.
    """
    seen = dict.fromkeys(TIERS, (0.0, 0.0, False))  # V, credit, waiting

    def check(plant: Plant) -> None:
        service = plant.planner.books.service
        for name, account in service.tiers.items():
            virtual, waits = account.own.virtual(), account.own.waiting > 0
            before, credit, waited = seen[name]
            assert virtual >= before - 1e-9
            assert -FLOOR_CLAMP <= account.credit <= FLOOR_MOST
            assert waited or waits or account.credit <= credit + 1e-9
            assert waited or not waits or virtual >= service._least - 1e-9
            seen[name] = (virtual, account.credit, waits)

    Plant(arrivals, trouble=trouble, observe=check).play()


@HARD
@example(PATIENT, "batching_aware", WITHOUT_SWITCHING)
@given(workloads(cancels=False), policies, troubles(switching=False))
def test_a_tenants_requests_of_a_lane_leave_by_their_keys(
    arrivals: list[Arrival], policy: str, trouble: Trouble
) -> None:
    """11: per (tier, lane, tenant) by the key that it came with, equal keys first come first served."""
    plant = Plant(arrivals, policy, trouble=trouble)
    start = plant.planner._start

    def checked(request: Request, now: float) -> None:
        heap = plant.planner.books.queue._tenants[request.tier, request.lane, request.tenant]
        waiting = sorted((key, order, place.request.id) for key, order, place in heap if place.alive)
        assert waiting[0][2] == request.id
        start(request, now)

    plant.planner._start = checked  # type: ignore[method-assign]
    plant.play()


@HARD
@example(PATIENT, WITHOUT_SWITCHING)
@given(workloads(cancels=False), troubles(switching=False))
def test_nothing_is_dispatched_after_its_latest_start_but_what_is_late(
    arrivals: list[Arrival], trouble: Trouble
) -> None:
    """12: a dispatch after the optimistic latest start, as it was believed when the request was looked at last, is of
    the late lane, or of what was taken out and goes on.
    """
    plant = Plant(arrivals, trouble=trouble)
    planner = plant.planner
    due, start = planner._due, planner._start
    told: dict[str, float] = {}

    def noted(request: Request) -> float:
        told[request.id] = due(request)
        return told[request.id]

    def checked(request: Request, now: float) -> None:
        latest = planner._policy._policy.latest_start(request)  # type: ignore[attr-defined]
        assert request.evictions or request.lane is Lane.LATE or now <= max(latest, told[request.id]) + 1e-3
        start(request, now)

    planner._due, planner._start = noted, checked  # type: ignore[method-assign]
    plant.play()


ONE_LONG = [Arrival(0.0, "bronze", 20, 200, 200), *(Arrival(at, "gold", 20, 5, 5) for at in (0.1, 0.8, 1.5))]


@HARD
@example(ONE_LONG, 1, Trouble())
@example(CROWD, 3, WITHOUT_SWITCHING)
@given(workloads(size=60), st.integers(1, 4), troubles(switching=False))
def test_evictions_are_rare_rightful_and_lose_no_token(arrivals: list[Arrival], slots: int, trouble: Trouble) -> None:
    """13: only preemptible tiers are evicted, for better ones. 14: at most once, and no token is lost or repeated."""
    plant = Plant(arrivals, capacity=replace(CAPACITY, max_seqs=slots), trouble=replace(trouble, slots=())).play()
    for _, decision in plant.log:
        if isinstance(decision, Preempt):
            assert TIERS[decision.request.tier].preemptible
            assert TIERS[decision.beneficiary.tier].rank < TIERS[decision.request.tier].rank
    for fate in plant.fates.values():
        assert fate.evictions <= 1
        if fate.ends == ["finished"]:
            assert fate.tokens == list(range(1, fate.arrival.output + 1))


@HARD
@given(
    st.lists(st.tuples(st.integers(50, 200), st.integers(5, 60)), min_size=9, max_size=40),
    st.integers(200, 400),
    st.data(),
)
def test_a_backfilled_request_never_delays_the_reservation(
    others: list[tuple[int, int]], prompt: int, data: st.DataObject
) -> None:
    """15: an urgent request that does not fit starts no later than its reservation first said.

    That is, if it says a start in time: what is late has no reservation. Lengths are known, a step takes the same
    time whatever is in it, and nobody is evicted.
    """
    recorded: list[float] = []
    reserve = batching_aware.reserve

    def noted(books: Books, request: Request, *rest: Any) -> Any:
        reservation = reserve(books, request, *rest)
        if request.tier == "gold":
            recorded.append(reservation.start)
        return reservation

    step = 0.02
    tiers = TIERS | {
        name: replace(TIERS[name], preemptible=False, on_infeasible=OnInfeasible.LATE, reserved_slots=0.0)
        for name in ("silver", "bronze")
    }
    arrivals = [
        Arrival(data.draw(st.floats(0.0, 1.0)), data.draw(st.sampled_from(["silver", "bronze"])), *lengths, lengths[1])
        for lengths in others
    ]
    arrivals.append(Arrival(data.draw(st.floats(0.1, 1.0)), "gold", prompt, 5, 5))
    with patch.object(batching_aware, "reserve", noted):
        capacity = replace(CAPACITY, step_tokens=4096, kv_tokens=1024)
        plant = Plant(merged(arrivals), tiers=tiers, cost=StepCost(base=step), capacity=capacity)
        plant.planner.books.lengths.quantile = lambda tenant, tier, most, *_: most  # type: ignore[method-assign]
        plant.play()
    (fate,) = (fate for fate in plant.fates.values() if fate.arrival.tier == "gold")
    if recorded and recorded[0] <= fate.arrival.at + tiers["gold"].ttft - 2 * step:
        assert fate.dispatches[0][0] <= recorded[0] + step + 1e-9


pressures = st.tuples(
    st.sampled_from([0.1, 0.5, 1.0, 3.0, 30.0]),  # seconds since the last look
    st.sampled_from([0.0, 0.0, 0.85, 0.92, 0.92, 0.97, 0.97, 1.2]),
    st.sampled_from([0.0] * 9 + [5.0]),
    st.sampled_from([""] * 18 + ["died", "recovered"]),
)


@laws(80)
@given(st.lists(pressures, min_size=20, max_size=60), st.booleans())
def test_levels_keep_their_dwell_and_level_zero_is_reached(
    looks: list[tuple[float, float, float, str]], hasty: bool
) -> None:
    """16: no two changes within the dwell, except jumps up to 3 or 4, and level 0 when the pressure ends."""
    rules = tuple(replace(rule, enter_for=0.0, leave_for=0.0) for rule in DEFAULT_RULES) if hasty else DEFAULT_RULES
    ladder, now, changes = Ladder(rules), 0.0, []
    for seconds, u, recomputes, happening in looks:
        now += seconds
        if happening == "died":
            changes.append(ladder.engine_failed(now, "it died"))
        elif happening == "recovered":
            ladder.engine_recovered(now)
        changes.append(ladder.update(now, Pressure(u, 0.0, recomputes)))
    told = [change for change in changes if change is not None]
    for earlier, later in pairwise(told):
        assert later.before == earlier.after
        assert later.at - earlier.at >= DWELL or later.after >= max(3, later.before)
    ladder.engine_recovered(now)
    for _ in range(120):
        now += 1.0
        ladder.update(now, Pressure(0.0, 0.0))
    assert ladder.level == 0


@HARD
@example(CROWD, "batching_aware", EVERYTHING)
@given(workloads(), policies, troubles())
def test_the_same_event_log_gives_the_same_decisions(arrivals: list[Arrival], policy: str, trouble: Trouble) -> None:
    """17: two plays of one log decide alike."""
    one, two = (Plant(arrivals, policy, trouble=trouble).play() for _ in range(2))
    assert (one.log, one.events) == (two.log, two.events)


class Brittle(BatchingAware):
    """The default policy; the n-th call of one of its methods raises, and so does every one after it."""

    fault, good_calls = "", 0

    def _call(self, name: str) -> None:
        if name == self.fault:
            Brittle.good_calls -= 1
            if Brittle.good_calls < 0:
                raise RuntimeError(f"a fault in {name}")

    def key(self, request: Request) -> float:
        self._call("key")
        return super().key(request)

    def admit(self, request: Request, now: float) -> Request | Refusal:
        self._call("admit")
        return super().admit(request, now)

    def overdue(self, request: Request, now: float) -> Request | Refusal | None:
        self._call("overdue")
        return super().overdue(request, now)

    def deciding(self, now: float) -> None:
        self._call("deciding")
        super().deciding(now)

    def candidates(self, now: float) -> Iterator[Offer]:
        for offer in super().candidates(now):
            self._call("candidates")
            yield offer

    def ended(self, flight: InFlight, outcome: Outcome, now: float) -> None:
        self._call("ended")
        super().ended(flight, outcome, now)


@HARD
@example(CROWD, WITHOUT_SWITCHING, "candidates", 20)
@given(
    workloads(),
    troubles(switching=False),
    st.sampled_from(["key", "admit", "overdue", "deciding", "candidates", "ended"]),
    st.integers(0, 40),
)
def test_a_policy_that_fails_is_replaced_within_one_decision(
    arrivals: list[Arrival], trouble: Trouble, fault: str, good_calls: int
) -> None:
    """18: after the decision in which it failed another policy is in use, the operator is told, nothing is lost."""
    Brittle.fault, Brittle.good_calls = fault, good_calls

    def check(plant: Plant) -> None:
        assert (Brittle.good_calls < 0) == (plant.planner.policy != "brittle")

    with patch.dict(registry.POLICIES, {"brittle": Brittle}):
        plant = Plant(arrivals, "brittle", trouble=trouble, observe=check).play()
    assert [len(fate.ends) for fate in plant.fates.values()] == [1] * len(arrivals)
    replaced = [event for event in plant.events if isinstance(event, PolicyReplaced)]
    assert len(replaced) == (Brittle.good_calls < 0)


@HARD
@example(PATIENT, "batching_aware", WITHOUT_SWITCHING)
@given(workloads(cancels=False, tenants=4), policies, troubles(switching=False))
def test_the_names_of_tenants_change_nothing(arrivals: list[Arrival], policy: str, trouble: Trouble) -> None:
    """19: permuting tenant names permutes nothing else."""
    swapped = {"t1": "t4", "t2": "t3", "t3": "t1", "t4": "t2"}
    renamed = [replace(arrival, tenant=swapped[arrival.tenant]) for arrival in arrivals]
    one, two = (Plant(load, policy, trouble=trouble).play() for load in (arrivals, renamed))
    assert [(at, type(d), d.request.id) for at, d in one.log] == [(at, type(d), d.request.id) for at, d in two.log]


@LONG
@given(
    st.fixed_dictionaries({name: st.integers(1, 14).map(float) for name in TIERS}),
    st.integers(20, 150),
    st.integers(5, 40),
    st.sampled_from([(1.5, 1.0), (1.0, 1.5), (1.25, 1.25), (2.0, 2.0)]),
)
def test_more_capacity_does_not_lower_the_value(
    rates: dict[str, float], prompt: int, output: int, more: tuple[float, float]
) -> None:
    """20: with more slots, more memory or both the attained value falls by no more than 2 %."""
    load = rounds(rates, 20.0, prompt, output)
    larger = replace(CAPACITY, max_seqs=int(CAPACITY.max_seqs * more[0]), kv_tokens=int(CAPACITY.kv_tokens * more[1]))
    assert value(Plant(load, capacity=larger).play()) >= value(Plant(load).play()) - 0.02


def test_the_degradation_level_returns_to_zero_when_the_load_stops() -> None:
    """16, with a whole planner: an overload climbs the ladder, and a calm minute leads back."""
    plant = Plant(rounds({"gold": 40, "silver": 60, "bronze": 60}, 20, 60, 20)).play()
    levels = [event for event in plant.events if isinstance(event, LevelChange)]
    assert levels
    assert plant.planner.snapshot(plant.now).level == 0
