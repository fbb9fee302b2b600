"""What each level of degradation gives up, as the table of `docs/scheduling.md` says it, and for whom."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from scheduler.core.degradation import LevelChange
from scheduler.core.planner import Planner
from scheduler.core.types import Dispatch, Hold, PolicyConfig, PoolCapacity, Preempt, Reason, Refusal, TierSpec
from tests.core.cast import dispatched, request

CAPACITY = PoolCapacity(max_seqs=10, step_tokens=512, kv_tokens=16_000, block_size=16, max_model_len=8192)
NUMBERS = itertools.count()
TIERS = {
    "gold": TierSpec("gold", rank=1, weight=60, floor=0.3, ttft=0.5, tpot=0.1, headroom=0.1),
    "silver": TierSpec("silver", rank=2, weight=30, floor=0.15, ttft=2.0, tpot=0.15, headroom=0.1, preemptible=True),
    "bronze": TierSpec("bronze", rank=3, weight=10, floor=0.05, ttft=5.0, tpot=0.25, headroom=0.1, preemptible=True),
}


def degraded(level: int, tiers: dict[str, TierSpec] = TIERS, capacity: PoolCapacity = CAPACITY) -> Planner:
    """A pool that has just come to that level."""
    pool = Planner(capacity, tiers, PolicyConfig(name="batching_aware"))
    pool._policy._policy._ladder.level = pool.books.level = level  # type: ignore[attr-defined]
    return pool


def arrivals(pool: Planner, tier: str, count: int, **changes: object) -> list[Refusal | None]:
    """So many arrivals at one instant; answers the refusals."""
    return [pool.arrive(request(f"{tier}{next(NUMBERS)}", tier, deadline=60.0, **changes), 0.0) for _ in range(count)]


def refused(pool: Planner, tier: str, count: int, **changes: object) -> list[bool]:
    answers = arrivals(pool, tier, count, **changes)
    assert {answer.reason for answer in answers if answer} <= {Reason.DEGRADED}
    return [answer is not None for answer in answers]


def test_level_one_halves_the_admission_of_the_worst_rank_each_second() -> None:
    pool = degraded(1)
    admitted = []
    for second in range(6):
        pool._policy.deciding(float(second))  # its tick
        admitted.append(refused(pool, "bronze", 80).count(False))
    assert admitted == [40, 20, 10, 5, 4, 4]
    assert not any(refused(pool, "silver", 5))
    assert not any(refused(pool, "gold", 5))


def test_from_level_one_on_the_worst_ranks_new_requests_are_shorter() -> None:
    pool = degraded(1)
    for tier in TIERS:
        while any(refused(pool, tier, 1, max_tokens=1000)):
            pass
    allowed = {waiting.tier: waiting.max_tokens for waiting in pool.books.queue}
    assert allowed == {"gold": 1000, "silver": 1000, "bronze": 256}


@pytest.mark.parametrize("level", [1, 2, 3])
def test_where_all_are_of_one_rank_nobody_is_the_worst(level: int) -> None:
    pool = degraded(level, {"only": replace(TIERS["gold"], name="only")})
    assert pool.arrive(replace(request("a", "gold", max_tokens=1000), tier="only"), 0.0) is None
    assert [waiting.max_tokens for waiting in pool.books.queue] == [1000]


@pytest.mark.parametrize("tier", ["silver", "bronze"])
def test_level_two_refuses_what_a_floor_does_not_serve_in_time(tier: str) -> None:
    work = {"prompt_tokens": 400, "max_tokens": 250}
    assert not any(refused(degraded(0), tier, 60, **work))
    answers = refused(degraded(2), tier, 60, **work)
    assert not answers[0]
    assert answers[-1]
    assert answers == sorted(answers), "from one length of the queue on"


def test_level_two_closes_the_long_lane_for_the_worst_rank() -> None:
    for level, tier, expected in [(1, "silver", False), (2, "silver", False), (2, "bronze", True)]:
        pool = degraded(level)
        for _ in range(40):
            pool._policy._policy._prompts.observe(10)  # type: ignore[attr-defined]
        assert refused(pool, tier, 1, prompt_tokens=4000) == [expected], (level, tier)


@pytest.mark.parametrize(("level", "expected"), [(1, False), (2, False), (3, True)])
def test_who_is_owed_its_floor_is_not_refused_below_level_three(level: int, expected: bool) -> None:
    pool = degraded(level)
    pool.books.service.tiers["bronze"].credit = 1.0
    assert any(refused(pool, "bronze", 60, prompt_tokens=400, max_tokens=250)) is expected


def test_level_three_runs_seven_tenths_of_the_batch_below_the_best_rank() -> None:
    pool = degraded(3)
    tiers = {"gold": 0, "silver": 0}
    arrivals(pool, "silver", 9, max_tokens=2, prompt_tokens=1)
    for round in range(12):
        for decision in pool.decide(round * 0.01):
            if isinstance(decision, Dispatch):
                pool.progress(decision.request.id, 1, round * 0.01)
                tiers["silver"] += 1
    assert tiers["silver"] == 7
    arrivals(pool, "gold", 5, max_tokens=2, prompt_tokens=1)
    assert len(dispatched(pool.decide(0.2))) == 3, "the best rank may use what the others may not"


@pytest.mark.parametrize(("level", "reason"), [(2, Reason.FLOOR_GUARD), (3, Reason.FAIR_TURN)])
def test_level_three_suspends_the_floors_of_all_but_the_best_rank(level: int, reason: Reason) -> None:
    pool = degraded(level)
    pool.books.service.tiers["silver"].credit = 1.0
    assert arrivals(pool, "silver", 1) == [None]
    (decision,) = [one for one in pool.decide(0.0) if isinstance(one, Dispatch)]
    assert decision.reason is reason


@pytest.mark.parametrize(("level", "passes"), [(2, True), (3, False)])
def test_level_three_lets_nobody_pass_a_reservation(level: int, passes: bool) -> None:
    """A gold request has no room; a short bronze one would be over before it has."""
    pool = degraded(level)
    arrivals(pool, "silver", 1, prompt_tokens=6000, max_tokens=1000)
    pool.decide(0.0)
    pool.progress(pool.books.batcher.running()[0].request.id, 1, 0.1)
    pool.arrive(request("big", "gold", 0.2, prompt_tokens=7500, max_tokens=600, deadline=2.1), 0.2)
    pool.arrive(request("small", "bronze", 0.2, prompt_tokens=1, max_tokens=1, deadline=60.0), 0.2)
    pool._policy._policy._ladder.level = pool.books.level = level  # type: ignore[attr-defined]
    decisions = pool.decide(0.2)
    assert Reason.KV_FULL in [one.reason for one in decisions if isinstance(one, Hold)]
    assert ("small" in dispatched(decisions)) is passes


def test_running_requests_that_outgrow_memory_cost_the_worst_rank_its_place() -> None:
    """Level 3 is entered at once; a better rank that lacks memory gets that of the cheapest of the worst rank."""
    pool = degraded(0)
    for n, tier in enumerate(["silver", "bronze", "bronze"]):
        prompt = 2000 + 500 * n
        assert (
            pool.arrive(
                request(f"runs{n}", tier, prompt_tokens=prompt, max_tokens=800, deadline=60.0, resumable=True), 0.0
            )
            is None
        )
        pool.decide(0.0)
        pool.progress(f"runs{n}", 1, 0.0)
    assert len(pool.books.batcher) == 3
    pool.resize(replace(CAPACITY, kv_tokens=8000), 2.0)
    assert pool.arrive(request("waits", "silver", 2.0, prompt_tokens=2000, deadline=60.0), 2.0) is None
    decisions = pool.decide(2.0)
    assert [event.after for event in pool.take_events() if isinstance(event, LevelChange)] == [3]
    (preempt,) = [one for one in decisions if isinstance(one, Preempt)]
    assert (preempt.request.tier, preempt.beneficiary.id) == ("bronze", "waits")
    assert not [one for one in pool.decide(2.1) if isinstance(one, Preempt)], "one at a time"
