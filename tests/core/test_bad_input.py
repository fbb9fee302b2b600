"""What nobody asks for and everybody gets: each has defined behaviour, and nothing is stuck or lost by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from scheduler.core.types import Expire, OnInfeasible, PolicyConfig, Reason, Refusal
from tests.core.plant import TIERS, Plant, Trouble, flood, merged, received, rounds


def ends(plant: Plant) -> dict[str, int]:
    """How many requests ended in which way; every one has ended, and only once."""
    assert [len(fate.ends) for fate in plant.fates.values()] == [1] * len(plant.fates)
    counts: dict[str, int] = {}
    for fate in plant.fates.values():
        counts[fate.ends[0]] = counts.get(fate.ends[0], 0) + 1
    return counts


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_step_model_that_is_wrong_by_five_finds_back(factor: float) -> None:
    """Predictions are within a tenth after a hundred steps, and what could be served is served."""
    plant = Plant(rounds({"gold": 6, "silver": 6}, 20, 60, 20), trouble=Trouble(belief=factor)).play()
    assert ends(plant)["finished"] >= 0.97 * len(plant.fates)
    assert plant.planner.books.steps.quantile(0.5) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("away", [5.0, 3600.0])
def test_a_clock_that_jumps_ahead_ends_what_has_waited_too_long_and_serves_the_rest(away: float) -> None:
    """The machine slept: at the first look afterwards everything overdue is answered, and new requests run as ever."""
    before, after = rounds({"gold": 20, "silver": 40}, 1, 60, 20), flood("gold", 4, 5)
    after = [replace(arrival, at=arrival.at + away + 2.0) for arrival in after]
    plant = Plant(merged(before, after), trouble=Trouble(pauses=((0.9, away),))).play()
    assert {"finished", "expired"} <= ends(plant).keys() <= {"finished", "expired", "refused"}
    patience = {"gold": TIERS["gold"].queue_max_wait, "silver": TIERS["silver"].ttft}  # gold is served late as well
    for fate in plant.fates.values():
        assert fate.request is not None
        begun = fate.dispatches[0][0] if fate.dispatches else fate.request.arrival
        assert begun <= fate.request.arrival + patience[fate.request.tier]
    assert all(fate.ends == ["finished"] for fate in plant.fates.values() if fate.arrival.at > away)
    assert plant.planner.snapshot(plant.now).level == 0


def test_a_clock_that_steps_back_changes_no_end() -> None:
    """By milliseconds, by half a second, by more than any deadline: whoever would have been served is."""
    load = rounds({"gold": 6, "silver": 6}, 10, 60, 20)
    instants: list[float] = []
    back = Trouble(pauses=((2.0, -0.02), (4.0, -0.5), (6.0, -5.0)))
    plant = Plant(load, trouble=back, observe=lambda plant: instants.append(plant.now)).play()
    assert sum(later < earlier for earlier, later in pairwise(instants)) == 3
    assert ends(plant) == {"finished": len(load)}


def test_a_tenant_that_floods_does_not_take_the_others_turn() -> None:
    plant = Plant(merged(flood("bronze", 40, 40, "loud"), flood("bronze", 4, 40, "quiet"))).play(until=40.0)
    quiet = [fate for fate in plant.fates.values() if fate.arrival.tenant == "quiet"]
    assert sum(fate.ends == ["finished"] for fate in quiet) >= 0.9 * len(quiet) - 4


def test_max_tokens_far_above_what_is_produced_does_not_empty_the_batch() -> None:
    """Lengths are learned: after some ends a request that may produce 400 tokens counts with the 10 it will."""
    load = [replace(arrival, max_tokens=400, output=10) for arrival in flood("silver", 30, 20, prompt=30)]
    plant = Plant(load).play()
    late = [fate for fate in plant.fates.values() if fate.arrival.at > 10.0]
    assert sum(fate.ends == ["finished"] for fate in late) >= 0.95 * len(late)


def test_a_tier_of_weight_zero_gets_what_nobody_else_wants_and_all_of_it() -> None:
    tiers = TIERS | {"bronze": replace(TIERS["bronze"], weight=0.0, floor=0.0, on_infeasible=OnInfeasible.LATE)}
    busy = Plant(merged(flood("silver", 40, 20), flood("bronze", 20, 20)), tiers=tiers).play(until=20.0)
    assert received(busy)["bronze"] <= 0.1 * busy.busy
    idle = Plant(flood("bronze", 20, 20), tiers=tiers).play()
    assert ends(idle) == {"finished": len(idle.fates)}


def test_where_no_tier_has_a_weight_all_are_served() -> None:
    tiers = {name: replace(tier, weight=0.0, floor=0.0) for name, tier in TIERS.items()}
    plant = Plant(rounds(dict.fromkeys(TIERS, 3), 10, 60, 20), tiers=tiers).play()
    assert ends(plant) == {"finished": len(plant.fates)}


def test_weights_that_change_while_requests_wait_rule_from_then_on_and_lose_nobody() -> None:
    """Nine to one for ten seconds, then one to nine: what was received before is not held against anybody.

    All that the tiers differ in is their weight: nothing is kept for one of them.
    """
    alike = replace(TIERS["bronze"], on_infeasible=OnInfeasible.LATE, queue_max_wait=1e4, ttft=1e3, e2e=1e3, floor=0.0)
    tiers = {name: replace(alike, name=name, rank=tier.rank) for name, tier in TIERS.items()}
    one = tiers | {"silver": replace(tiers["silver"], weight=90), "bronze": replace(tiers["bronze"], weight=10)}
    two = tiers | {"silver": replace(tiers["silver"], weight=10), "bronze": replace(tiers["bronze"], weight=90)}
    trouble = Trouble(changes=((10.0, two, PolicyConfig()),))
    load = [replace(arrival, at=0.0) for arrival in rounds({"silver": 60, "bronze": 60}, 6, 60, 20)]
    shares = []

    def watch(plant: Plant) -> None:
        if len(shares) < 2 and plant.now >= 10.0 * (len(shares) + 1) - 0.1:
            shares.append(received(plant)["silver"])

    plant = Plant(load, tiers=one, trouble=trouble, observe=watch).play()
    assert shares[0] == pytest.approx(9.0, abs=0.8)
    assert shares[1] - shares[0] == pytest.approx(1.0, abs=0.8), "less what was in the engine"
    assert ends(plant) == {"finished": len(load)}


def test_an_engine_that_reports_nothing_for_ten_seconds_loses_nobody() -> None:
    """What runs goes on when it is back; what cannot wait that long is answered meanwhile, at its time."""
    load = rounds({"gold": 3, "bronze": 3}, 20, 60, 20)
    plant = Plant(load, trouble=Trouble(stalls=((2.0, 10.0),))).play()
    assert ends(plant).keys() == {"finished", "expired", "refused"}
    during = [fate.arrival.at + 5.0 for fate in plant.fates.values() if fate.ends == ["expired"]]
    told = [at for at, decision in plant.log if isinstance(decision, Expire)]
    assert all(at <= due for at, due in zip(told, during, strict=True)), "not only when the engine is back"
    others = [fate for fate in plant.fates.values() if not 2.0 <= fate.arrival.at <= 13.0]
    assert all(fate.ends == ["finished"] for fate in others)


def test_who_cannot_be_served_in_time_is_told_when_to_come_back() -> None:
    refusals: list[Refusal] = []
    plant = Plant(flood("bronze", 200, 3))
    arrive = plant.planner.arrive

    def noted(request, now):  # type: ignore[no-untyped-def]
        refusal = arrive(request, now)
        refusals.extend([refusal] if refusal else [])
        return refusal

    plant.planner.arrive = noted  # type: ignore[method-assign]
    plant.play()
    told = [one.retry_after for one in refusals if one.reason is Reason.DEADLINE_INFEASIBLE]
    told += [
        one.retry_after for _, one in plant.log if isinstance(one, Expire) and one.reason is Reason.DEADLINE_INFEASIBLE
    ]
    assert told
    assert all(wait is not None and wait > 0 for wait in told)
