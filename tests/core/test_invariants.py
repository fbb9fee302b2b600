"""The twenty invariants of the scheduler over random workloads and faults, each a line of prose and a property."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler.core.kv_forecast import Forecast
from scheduler.core.types import Dispatch, Expire, Lane, OnInfeasible, PolicyConfig, Preempt, Reason
from scheduler.engines.simulated.machine import StepCost
from tests.core.plant import CAPACITY, COST, TIERS, Arrival, Plant, coefficients

HARD = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


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


@HARD
@given(workloads(), policies, st.lists(st.floats(0.0, 5.0), max_size=2))
def test_every_arrival_ends_in_exactly_one_way(arrivals: list[Arrival], policy: str, faults: list[float]) -> None:
    """1: finished, refused, expired, cancelled, aborted or failed: once each. 2: books and engine agree at the end."""
    plant = Plant(arrivals, policy, faults=tuple(faults)).play()
    assert [len(fate.ends) for fate in plant.fates.values()] == [1] * len(arrivals)
    snapshot = plant.planner.snapshot(plant.now)
    assert (snapshot.in_flight, snapshot.kv_reserved) == (0, 0.0)
    assert plant.planner.waiting() == 0
    assert plant.machine.kv_usage == 0.0


@HARD
@given(workloads())
def test_memory_at_its_peak_leaves_each_tiers_headroom(arrivals: list[Arrival]) -> None:
    """4: with the lengths that were believed, the forecast peak is within (1 - h) of the pool at each admission."""
    plant = Plant(arrivals)
    enter = plant.planner.books.batcher.enter

    def checked(request, now):  # type: ignore[no-untyped-def]
        books = plant.planner.books
        alone = not len(books.batcher)
        enter(request, now)
        tier = books.tiers[request.tier]
        cautious = plant.planner._policy._policy._cautious
        flights = [(flight.remaining(cautious), flight.blocks) for flight in books.batcher.running()]
        limit = (1 - tier.headroom) * CAPACITY.total_blocks
        assert alone or Forecast(flights, CAPACITY.block_size).peak <= limit

    plant.planner.books.batcher.enter = checked  # type: ignore[method-assign]
    plant.play()


@HARD
@given(workloads())
def test_attributed_service_is_the_busy_time(arrivals: list[Arrival]) -> None:
    """5: the sum of what all tiers received is the engine's busy time, to a millionth."""
    plant = Plant(arrivals).play()
    service = plant.planner.books.service
    received = sum(account.own.meter.read() for account in service.tiers.values()) + service.unattributed
    assert received == pytest.approx(plant.busy, rel=1e-6, abs=1e-9)
    assert service.busy == pytest.approx(plant.busy, rel=1e-9, abs=1e-12)


@HARD
@given(workloads(cancels=False))
def test_after_a_decision_nobody_else_could_go(arrivals: list[Arrival]) -> None:
    """6: asked again at the same instant without news, the planner dispatches nothing."""
    plant = Plant(arrivals)
    decide = plant._decide

    def twice() -> None:
        decide()
        plant.planner._changed = True
        again = plant.planner.decide(plant.now)
        assert not [decision for decision in again if isinstance(decision, Dispatch)]

    plant._decide = twice  # type: ignore[method-assign]
    plant.play()


@HARD
@given(workloads())
def test_virtual_time_never_falls_and_idleness_earns_no_credit(arrivals: list[Arrival]) -> None:
    """9: floor credit stays within its clamp. 10: V of every tier only grows, and starts at v after a pause."""
    plant = Plant(arrivals)
    decide, seen = plant._decide, dict.fromkeys(TIERS, 0.0)

    def watched() -> None:
        decide()
        for name, account in plant.planner.books.service.tiers.items():
            virtual = account.own.virtual()
            assert virtual >= seen[name] - 1e-9
            assert -2.0 <= account.credit <= 2.0
            seen[name] = virtual

    plant._decide = watched  # type: ignore[method-assign]
    plant.play()


@HARD
@given(workloads(cancels=False))
def test_one_tenants_requests_of_a_lane_leave_in_the_order_of_their_keys(arrivals: list[Arrival]) -> None:
    """11: per (tier, lane, tenant) by key, equal keys first come first served."""
    plant = Plant(arrivals)
    decide = plant._decide

    def watched() -> None:
        before = {request.id: request for request in plant.planner.books.queue}
        position = len(plant.log)
        decide()
        key = plant.planner._policy.key
        for _, decision in plant.log[position:]:
            if not isinstance(decision, Dispatch) or decision.request.id not in before:
                continue
            gone = before.pop(decision.request.id)
            for other in before.values():
                if (other.tier, other.lane, other.tenant) == (gone.tier, gone.lane, gone.tenant):
                    assert key(gone) <= key(other)

    plant._decide = watched  # type: ignore[method-assign]
    plant.play()


@HARD
@given(workloads(cancels=False))
def test_nothing_is_dispatched_after_its_latest_start_but_what_is_late(arrivals: list[Arrival]) -> None:
    """12: a dispatch after the optimistic latest start is of the late lane, or of a tier that serves late."""
    plant = Plant(arrivals).play()
    latest = plant.planner._policy._policy.latest_start
    for at, decision in plant.log:
        if isinstance(decision, Dispatch) and not decision.request.evictions:
            tier = TIERS[decision.request.tier]
            late = decision.request.lane is Lane.LATE
            assert late or tier.on_infeasible is OnInfeasible.LATE or at <= latest(decision.request) + COST.base


@HARD
@given(workloads(size=60))
def test_evictions_are_rare_rightful_and_lose_no_token(arrivals: list[Arrival]) -> None:
    """13: only preemptible tiers are evicted. 14: at most once; emitted tokens have no gap (the plant asserts that)."""
    plant = Plant(arrivals, capacity=replace(CAPACITY, max_seqs=4)).play()
    for _, decision in plant.log:
        if isinstance(decision, Preempt):
            assert TIERS[decision.request.tier].preemptible
            assert TIERS[decision.beneficiary.tier].rank < TIERS[decision.request.tier].rank
    for fate in plant.fates.values():
        assert fate.evictions <= 1
        if fate.ends == ["finished"]:
            assert fate.tokens == list(range(1, fate.arrival.output + 1))


@HARD
@given(workloads(), st.lists(st.floats(0.0, 5.0), max_size=1))
def test_the_same_event_log_gives_the_same_decisions(arrivals: list[Arrival], faults: list[float]) -> None:
    """17: two plays of one log decide alike."""
    assert Plant(arrivals, faults=tuple(faults)).play().log == Plant(arrivals, faults=tuple(faults)).play().log


@HARD
@given(workloads(cancels=False, tenants=4))
def test_the_names_of_tenants_change_nothing(arrivals: list[Arrival]) -> None:
    """19: permuting tenant names permutes nothing else."""
    swapped = {"t1": "t4", "t2": "t3", "t3": "t1", "t4": "t2"}
    renamed = [replace(arrival, tenant=swapped[arrival.tenant]) for arrival in arrivals]
    one, two = Plant(arrivals).play(), Plant(renamed).play()
    assert [(at, type(d), d.request.id) for at, d in one.log] == [(at, type(d), d.request.id) for at, d in two.log]


@HARD
@given(workloads(), st.lists(st.tuples(st.floats(0, 4), policies, st.integers(0, 80)), min_size=1, max_size=4))
def test_changes_of_weights_and_policy_lose_nothing(
    arrivals: list[Arrival], edits: list[tuple[float, str, int]]
) -> None:
    """Weights, also zero, and policies may change while requests wait."""
    changes = tuple(
        (at, TIERS | {"bronze": replace(TIERS["bronze"], weight=float(weight))}, PolicyConfig(name=policy))
        for at, policy, weight in edits
    )
    plant = Plant(arrivals, changes=changes).play()
    assert [len(fate.ends) for fate in plant.fates.values()] == [1] * len(arrivals)


def flood(
    tier: str, rate: float, seconds: float, tenant: str = "t1", prompt: int = 60, output: int = 20
) -> list[Arrival]:
    """Even arrivals of one tier."""
    return [
        Arrival(n / rate, tier, prompt, output, output, tenant=tenant, stream=True) for n in range(int(rate * seconds))
    ]


def merged(*parts: list[Arrival]) -> list[Arrival]:
    return sorted((arrival for part in parts for arrival in part), key=lambda arrival: arrival.at)


def service(plant: Plant) -> dict[str, float]:
    return {name: account.own.meter.read() for name, account in plant.planner.books.service.tiers.items()}


def test_a_backlogged_tier_receives_its_floor_whatever_the_others_do() -> None:
    """7: with everybody backlogged each tier has at least its floor, less the clamp and what is in flight."""
    plant = Plant(merged(flood("gold", 60, 60), flood("silver", 30, 60), flood("bronze", 30, 60))).play(until=60.0)
    received = service(plant)
    for name, tier in TIERS.items():
        assert received[name] >= tier.floor * plant.busy - (2 * 2.0 + 0.25 + 1.0), (name, received, plant.busy)


def test_two_tenants_of_a_tier_share_it_evenly_however_many_one_sends() -> None:
    """8: a tenant that floods does not take the other's turn."""
    plant = Plant(merged(flood("bronze", 40, 40, "loud"), flood("bronze", 4, 40, "quiet"))).play(until=40.0)
    done = {"loud": 0, "quiet": 0}
    for fate in plant.fates.values():
        done[fate.arrival.tenant] += fate.ends == ["finished"]
    sent = sum(fate.arrival.tenant == "quiet" for fate in plant.fates.values())
    assert done["quiet"] >= 0.9 * sent - 4


def test_background_runs_only_when_nobody_else_can() -> None:
    """A tier of weight zero gets idle capacity, and all of it."""
    tiers = TIERS | {"bronze": replace(TIERS["bronze"], weight=0.0, floor=0.0, on_infeasible=OnInfeasible.LATE)}
    busy = Plant(merged(flood("silver", 40, 20), flood("bronze", 20, 20)), tiers=tiers).play(until=20.0)
    assert service(busy)["bronze"] <= 0.1 * busy.busy
    idle = Plant(flood("bronze", 20, 20), tiers=tiers).play()
    assert all(fate.ends == ["finished"] for fate in idle.fates.values())


def test_the_degradation_level_returns_to_zero_when_the_load_stops() -> None:
    """16: no two changes within the dwell, and level 0 is reached again."""
    overload = merged(flood("gold", 40, 20), flood("silver", 60, 20), flood("bronze", 60, 20))
    calm = [replace(arrival, at=arrival.at + 20.0) for arrival in flood("gold", 2, 60)]
    plant = Plant(merged(overload, calm)).play()
    changes = [change for change in plant.planner.take_events() if hasattr(change, "before") and change.after < 3]
    levels = [change for change in changes if type(change).__name__ == "LevelChange"]
    assert all(later.at - earlier.at >= 1.0 for earlier, later in pairwise(levels))
    assert plant.planner.snapshot(plant.now).level == 0


def test_more_capacity_does_not_lower_the_value() -> None:
    """20: with twice the slots and memory the attained value falls by no more than 2 %."""
    load = merged(flood("gold", 8, 30), flood("silver", 10, 30), flood("bronze", 14, 30))
    small = value(Plant(load).play())
    large = value(Plant(load, capacity=replace(CAPACITY, max_seqs=16, kv_tokens=4096)).play())
    assert large >= small - 0.02


def value(plant: Plant) -> float:
    """Attained requests weighted by tier weight, over all."""
    won = total = 0.0
    for fate in plant.fates.values():
        tier = TIERS[fate.arrival.tier]
        total += tier.weight
        if fate.ends == ["finished"] and fate.first is not None and fate.last is not None:
            pace = (fate.last - fate.first) / max(fate.arrival.output - 1, 1)
            won += tier.weight * (fate.first - fate.arrival.at <= tier.ttft and pace <= tier.tpot)
    return won / total


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_step_model_that_is_wrong_by_five_finds_back(factor: float) -> None:
    """Bad estimates: predictions are within a tenth after a hundred steps, and nothing is lost meanwhile."""
    wrong = tuple(b * factor for b in coefficients(COST))
    plant = Plant(merged(flood("gold", 6, 20), flood("silver", 6, 20)), believed=wrong).play()  # type: ignore[arg-type]
    assert [len(fate.ends) for fate in plant.fates.values()] == [1] * len(plant.fates)
    assert plant.planner.books.steps.quantile(0.5) == pytest.approx(1.0, abs=0.1)


def test_max_tokens_far_above_what_is_produced_does_not_empty_the_batch() -> None:
    """Lengths are learned: after some ends a request that may produce 400 tokens counts with the 10 it will."""
    load = [replace(arrival, max_tokens=400, output=10) for arrival in flood("silver", 20, 20, prompt=30)]
    plant = Plant(load).play()
    late = [fate for fate in plant.fates.values() if fate.arrival.at > 10.0]
    assert sum(fate.ends == ["finished"] for fate in late) >= 0.95 * len(late)


def test_an_engine_that_reports_nothing_for_ten_seconds_loses_nobody() -> None:
    """Silence: no step for ten seconds; what waits too long is answered, the rest runs when it is back."""
    load = merged(flood("gold", 4, 15), flood("bronze", 4, 15))
    plant = Plant(load, cost=StepCost(base=10.0)).play()
    assert [len(fate.ends) for fate in plant.fates.values()] == [1] * len(load)


def test_expired_requests_are_told_when_to_come_back() -> None:
    """A deadline that cannot be met is refused with the time after which it could."""
    plant = Plant(flood("bronze", 200, 3)).play()
    told = [d for _, d in plant.log if isinstance(d, Expire) and d.reason is Reason.DEADLINE_INFEASIBLE]
    assert all(decision.retry_after is not None and decision.retry_after > 0 for decision in told)
