"""What each policy does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core import policies
from scheduler.core.planner import Planner
from scheduler.core.policies.article import LatencyModel
from scheduler.core.types import Dispatch, Expire, Hold, Outcome, PolicyConfig, PoolCapacity, Reason, TierSpec
from tests.core.cast import TIERS, dispatched, planner, request
from tests.laws import laws

ROOMY = PoolCapacity(max_seqs=64, step_tokens=512, kv_tokens=64_000, block_size=16, max_model_len=4096)
DONE = Outcome(completion_tokens=10)


def fill(pool: Planner, tier: str, count: int, at: float = 0.0, **changes: object) -> list[str]:
    """`count` requests of the tier, `at` one instant; answers their ids."""
    ids = [f"{tier}-{at}-{n}" for n in range(count)]
    for id in ids:
        assert pool.arrive(request(id, tier, at, **changes), at) is None
    return ids


def finish(pool: Planner, ids: list[str], at: float) -> None:
    for id in ids:
        pool.progress(id, 1, at)
        pool.finished(id, DONE, at)


def held(pool: Planner, now: float) -> set[Reason]:
    return {decision.reason for decision in pool.decide(now) if isinstance(decision, Hold)}


# --- single, static, dynamic ----------------------------------------------------------------------------------------


def test_single_runs_one_request_at_a_time_in_order_of_arrival() -> None:
    pool = planner("single", ROOMY, max_wait_ms=50.0)
    pool.arrive(request("a", "bronze", 0.0), 0.0)
    pool.arrive(request("b", "gold", 0.1), 0.1)
    assert dispatched(pool.decide(0.1)) == ["a"]
    assert held(pool, 0.2) == set(), "without news there is nothing to decide"
    pool.arrive(request("c", "silver", 0.3), 0.3)
    assert held(pool, 0.3) == {Reason.BATCH_RUNNING, Reason.RANKED_BEHIND}
    pool.finished("a", DONE, 1.0)
    assert dispatched(pool.decide(1.0)) == ["b"]


@pytest.mark.parametrize(("policy", "wait"), [("static", 1.0), ("dynamic", 0.05)])
def test_a_batch_begins_when_it_is_full_or_its_oldest_has_waited_long_enough(policy: str, wait: float) -> None:
    pool = planner(policy, ROOMY, max_batch=3)
    first = fill(pool, "silver", 2)
    assert held(pool, 0.0) == {Reason.WAIT_WINDOW}
    assert pool.next_wakeup(0.0) == wait
    assert dispatched(pool.decide(wait)) == first
    finish(pool, first, 2.0)
    full = fill(pool, "silver", 4, 2.0)
    assert dispatched(pool.decide(2.0)) == full[:3]


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_batch_runs_to_its_end_before_the_next_begins(policy: str) -> None:
    pool = planner(policy, ROOMY, max_batch=2)
    first = fill(pool, "silver", 2)
    pool.decide(0.0)
    second = fill(pool, "gold", 2, 0.1)
    pool.finished(first[0], DONE, 1.0)
    assert held(pool, 1.0) == {Reason.BATCH_RUNNING}, "a free slot stays empty"
    pool.finished(first[1], DONE, 2.0)
    assert dispatched(pool.decide(2.0)) == second


def test_the_wait_of_a_batch_is_the_one_that_is_configured() -> None:
    assert planner_with_one("static", max_wait_ms=200.0).next_wakeup(0.0) == 0.2


def planner_with_one(policy: str, **config: object) -> Planner:
    pool = planner(policy, ROOMY, **config)
    fill(pool, "silver", 1)
    return pool


# --- edf, wfq -------------------------------------------------------------------------------------------------------


def test_edf_takes_the_earliest_deadline_whatever_its_tier_or_arrival() -> None:
    pool = planner("edf", replace(ROOMY, max_seqs=2))
    pool.arrive(request("gold", "gold", 0.0, deadline=9.0), 0.0)
    pool.arrive(request("later", "bronze", 0.1, deadline=3.0), 0.1)
    pool.arrive(request("soon", "bronze", 0.2, deadline=2.0), 0.2)
    decisions = pool.decide(0.3)
    assert dispatched(decisions) == ["soon", "later"]
    assert {d.reason for d in decisions if isinstance(d, Dispatch)} == {Reason.DEADLINE_ORDER}


WEIGHTED = {name: replace(tier, weight=weight) for (name, tier), weight in zip(TIERS.items(), (6, 3, 1), strict=True)}


def serve(pool: Planner, rounds: int, at: float = 0.0) -> list[str]:
    """Run `rounds` requests one after the other; answers their tiers."""
    tiers = []
    for n in range(rounds):
        (dispatch,) = (d for d in pool.decide(at + n) if isinstance(d, Dispatch))
        pool.finished(dispatch.request.id, DONE, at + n + 0.5)
        tiers.append(dispatch.request.tier)
    return tiers


def weighted_pool(**weights: float) -> Planner:
    tiers = {name: replace(tier, queue_max_length=1000) for name, tier in WEIGHTED.items()}
    tiers |= {name: replace(tiers[name], weight=weight) for name, weight in weights.items()}
    return Planner(replace(ROOMY, max_seqs=1), tiers, PolicyConfig(name="wfq"))


def test_wfq_serves_tiers_that_wait_by_their_weights() -> None:
    pool = weighted_pool()
    for tier in TIERS:
        fill(pool, tier, 100, queue_deadline=1e9)
    served = serve(pool, 100)
    assert [served.count(tier) for tier in ("gold", "silver", "bronze")] == pytest.approx([60, 30, 10], abs=2)


def test_wfq_gives_a_tier_nothing_for_the_time_that_it_was_idle() -> None:
    pool = weighted_pool()
    fill(pool, "silver", 100, queue_deadline=1e9)
    serve(pool, 50)
    fill(pool, "bronze", 100, 50.0, queue_deadline=1e9)
    served = serve(pool, 40, 50.0)
    assert served.count("bronze") == pytest.approx(10, abs=2)


def test_wfq_runs_a_tier_without_weight_only_when_no_other_waits() -> None:
    pool = weighted_pool(bronze=0.0)
    fill(pool, "bronze", 5, queue_deadline=1e9)
    fill(pool, "gold", 5, queue_deadline=1e9)
    assert serve(pool, 10) == ["gold"] * 5 + ["bronze"] * 5


def test_wfq_charges_what_was_produced_and_not_what_was_feared() -> None:
    pool = weighted_pool()
    fill(pool, "gold", 9, queue_deadline=1e9, max_tokens=1000)  # each asks for 1,000 tokens and produces 10
    fill(pool, "silver", 9, queue_deadline=1e9, max_tokens=10)
    served = serve(pool, 9)
    assert served.count("gold") == pytest.approx(6, abs=1)


# --- article --------------------------------------------------------------------------------------------------------


def batches(pool: Planner, now: float) -> list[list[str]]:
    """The batches that the pool makes at one instant, until it has nothing more to do at it."""
    made = []
    while batch := dispatched(pool.decide(now)):
        made.append(batch)
        wake = pool.next_wakeup(now)
        if wake is None or wake > now:
            break
    return made


def article(**config: object) -> Planner:
    tiers = {name: replace(tier, queue_max_length=1000) for name, tier in TIERS.items()}
    return Planner(ROOMY, tiers, PolicyConfig(name="article", **config))  # type: ignore[arg-type]


def test_article_takes_the_best_rank_in_batches_of_eight_and_others_in_what_is_left_of_32() -> None:
    pool = article()
    gold, silver = fill(pool, "gold", 10), fill(pool, "silver", 40)
    assert batches(pool, 0.05) == [gold[:8], gold[8:], silver[:22]]
    assert pool.snapshot(0.05).in_flight == 32


def test_article_waits_50_ms_for_company_on_an_idle_engine() -> None:
    pool = planner_with_one("article")
    assert pool.next_wakeup(0.0) == 0.05
    assert held(pool, 0.0) == {Reason.WAIT_WINDOW}


def test_article_gives_one_batch_in_eleven_to_the_worst_rank() -> None:
    pool = article(max_batch=1)
    fill(pool, "bronze", 3, queue_deadline=1e9)
    fill(pool, "gold", 30, queue_deadline=1e9)
    tiers = serve(pool, 24, 1.0)
    assert [n for n, tier in enumerate(tiers) if tier == "bronze"] == [10, 21]


def test_article_makes_its_batch_so_small_that_the_estimate_leaves_its_oldest_time() -> None:
    pool = article()
    warm = fill(pool, "silver", 4)
    pool.decide(0.05)
    finish(pool, warm, 1.05)  # a batch of four took a second: a quarter of a second each
    silver = fill(pool, "silver", 6, 2.0)  # due two seconds after; 70 % of 1.9 s hold five
    assert batches(pool, 2.1) == [silver[:5], silver[5:]]


def test_article_closes_a_batch_and_says_so() -> None:
    pool = article()
    fill(pool, "gold", 9)
    assert held(pool, 0.05) == {Reason.BATCH_CLOSED}


def test_article_learns_the_time_to_the_first_token_of_streams_and_to_the_last_of_others() -> None:
    pool = article()
    streams = fill(pool, "silver", 4)
    pool.decide(0.05)
    for id in streams:
        pool.progress(id, 1, 0.45)
    for id in streams:
        pool.finished(id, DONE, 60.0)
    silver = fill(pool, "silver", 20, 61.0)  # 0.1 s each: 13 in 70 % of 1.95 s
    assert len(batches(pool, 61.05)[0]) == 13
    assert silver


@pytest.mark.parametrize("a, b", [(0.02, 0.001), (0.0, 0.002), (0.1, 0.0)])
def test_the_latency_model_finds_the_coefficients_that_made_its_batches(a: float, b: float) -> None:
    model = LatencyModel()
    for size in range(1, 9):
        tokens = size * (50 + 13 * size % 7)
        model.learn(size, tokens, a * size + b * tokens)
    assert model.predict(10, 700) == pytest.approx(10 * a + 700 * b, rel=1e-6, abs=1e-9)


def test_the_latency_model_forgets_batches_of_long_ago() -> None:
    model = LatencyModel()
    for _ in range(1000):
        model.learn(2, 100, 9.0)
    for _ in range(1000):
        model.learn(2, 100, 1.0)
    assert model.predict(2, 100) == pytest.approx(1.0)


samples = st.tuples(st.integers(1, 32), st.integers(1, 5000), st.floats(0.0, 60.0))


@given(st.lists(samples, max_size=30), st.integers(1, 32), st.integers(0, 5000))
def test_the_estimate_of_a_batch_grows_with_it(seen: list[tuple[int, int, float]], size: int, tokens: int) -> None:
    """Never negative, and no smaller for more requests or more tokens."""
    model = LatencyModel()
    for sample in seen:
        model.learn(*sample)
    assert 0.0 <= model.predict(size, tokens) <= model.predict(size + 1, tokens + 10) + 1e-9


def test_a_rank_that_uses_its_own_reserved_slots_does_not_open_those_of_a_better_one() -> None:
    reserved = {name: replace(TIERS[name], reserved_slots=share) for name, share in [("gold", 0.2), ("silver", 0.2)]}
    pool = Planner(replace(ROOMY, max_seqs=10), TIERS | reserved, PolicyConfig(name="batching_aware"))
    fill(pool, "silver", 6, prompt_tokens=1)
    assert len(dispatched(pool.decide(0.0))) == 6
    fill(pool, "bronze", 3, prompt_tokens=1)
    assert len(dispatched(pool.decide(0.0))) == 2
    fill(pool, "silver", 1, at=0.1, prompt_tokens=1)
    assert dispatched(pool.decide(0.1)) == [], "the last two are the best rank's"
    fill(pool, "gold", 2, at=0.2, prompt_tokens=1)
    assert len(dispatched(pool.decide(0.2))) == 2


# --- every policy ---------------------------------------------------------------------------------------------------


@laws(100)
@given(
    st.sampled_from(sorted(policies.POLICIES)),
    st.lists(st.tuples(st.sampled_from(sorted(TIERS)), st.integers(1, 60), st.floats(0.0, 0.5)), max_size=40),
    st.sampled_from(sorted(policies.POLICIES)),
)
def test_every_policy_serves_everything_that_it_does_not_refuse(
    policy: str, arrivals: list[tuple[str, int, float]], other: str
) -> None:
    """Woken when it asks to be, it empties the queue; a switch on the way loses nothing."""
    pool = planner(policy, replace(ROOMY, max_seqs=3))
    now, waiting = 0.0, set()
    for n, (tier, output, gap) in enumerate(arrivals):
        now += gap
        if pool.arrive(request(f"r{n}", tier, now, max_tokens=output, queue_deadline=now + 1e6), now) is None:
            waiting.add(f"r{n}")
    pool.reconfigure(TIERS, PolicyConfig(name=other), now)
    ended = run_to_the_end(pool, now)
    assert sorted(ended) == sorted(waiting)


def run_to_the_end(pool: Planner, now: float) -> list[str]:
    """Each round ends what runs, then asks at the instant that the pool wants; answers the ids as they end."""
    ended = []
    for _ in range(1000):
        running = []
        for decision in pool.decide(now):
            if isinstance(decision, Dispatch):
                running.append(decision.request.id)
            elif isinstance(decision, Expire):
                ended.append(decision.request.id)
        if not running and not pool.waiting():
            return ended
        if not running:
            wake = pool.next_wakeup(now)
            assert wake is not None, "something waits and nothing runs: there must be an instant to ask again"
            now = max(wake, now)
        for id in running:
            pool.progress(id, 1, now)
            pool.finished(id, DONE, now)
            ended.append(id)
    raise AssertionError("the queue does not empty")


def test_a_tier_without_weight_is_not_told_to_come_back_in_a_far_future() -> None:
    tiers = TIERS | {"background": TierSpec("background", rank=4, weight=0.0, floor=0.0)}
    pool = Planner(ROOMY, tiers, PolicyConfig(name="batching_aware"))
    pool.books.level = 2
    waiting = replace(request("waits", prompt_tokens=400, max_tokens=400, deadline=9.0), tier="background")
    assert pool.arrive(waiting, 0.0) is None
    refusal = pool.arrive(replace(waiting, id="refused"), 0.0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == (Reason.DEGRADED, 60.0)
