"""Requests of several answers: each takes a slot and memory of its own, and all of them are one in the books."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.batcher import Batcher
from scheduler.core.kv_forecast import Forecast
from scheduler.core.planner import Planner
from scheduler.core.reservation import Reservation, may_pass, reserve
from scheduler.core.service import Service
from scheduler.core.types import Hold, Lane, Outcome, PolicyConfig, PoolCapacity, Preempt, Reason, Request, TierSpec
from tests.core.cast import CAPACITY, TIERS, dispatched, planner, request
from tests.laws import laws

ROOMY = PoolCapacity(max_seqs=64, step_tokens=64, kv_tokens=6400, block_size=16, max_model_len=256)
LONG = PoolCapacity(max_seqs=64, step_tokens=8192, kv_tokens=32_000, block_size=16, max_model_len=16_000)
flights = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 12)), max_size=8)


def several(id: str, many: int, **changes: Any) -> Request:
    return request(id, sequences=many, **changes)


def test_the_prompt_is_charged_once_and_every_answer_in_full() -> None:
    one = several("a", 3, prompt_tokens=10, max_tokens=20)
    assert (one.worst_case_tokens, one.longest_context) == (70, 30)
    assert [one.per_sequence(tokens) for tokens in (0, 1, 3, 4)] == [0, 1, 1, 2]


@laws(60)
@given(flights, st.integers(0, 200), st.integers(1, 12), st.integers(1, 5))
def test_several_more_peak_as_if_they_were_added_one_by_one(
    running: list[tuple[int, int]], remaining: int, blocks: int, count: int
) -> None:
    """The peak with `count` more of a kind is the peak of all of them, and `fits` says exactly that."""
    whole = Forecast([*running, *[(remaining, blocks)] * count], 16).peak
    forecast = Forecast(running, 16)
    assert forecast.peak_with(remaining, blocks, count) == whole
    assert forecast.fits(remaining, blocks, whole, count)
    assert not forecast.fits(remaining, blocks, whole - 1, count)


@laws(60)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6))
def test_the_books_of_answers_are_those_of_as_many_requests(shapes: list[tuple[int, int, int]]) -> None:
    """Slots, blocks, contexts and the forecast are the same as if each answer were a request; in the end all are 0."""
    together, apart = Batcher(ROOMY, None), Batcher(ROOMY, None)
    for number, (many, prompt, made) in enumerate(shapes):
        together.enter(several(f"{number}", many, prompt_tokens=prompt, max_tokens=80), 0.0)
        together.progress(f"{number}", many * made, 1.0)
        for index in range(many):
            apart.enter(request(f"{number}/{index}", prompt_tokens=prompt, max_tokens=80), 0.0)
            apart.progress(f"{number}/{index}", made, 1.0)
    for name in ("sequences", "decoding", "blocks", "context"):
        assert getattr(together, name) == getattr(apart, name)
    longest = lambda one, produced: one.max_tokens  # noqa: E731
    assert together.peak_share(longest) == apart.peak_share(longest)
    for number, (many, _, _) in enumerate(shapes):
        assert together.count("silver") >= many
        together.leave(f"{number}")
    assert (together.sequences, together.decoding, together.blocks, together.context) == (0, 0, 0, 0)
    assert together.count("silver") == 0


def test_what_needs_more_than_the_engine_has_never_fits() -> None:
    batcher = Batcher(CAPACITY, None)  # 2 slots, 20 blocks
    assert batcher.never_fits(several("a", 2)) is None
    assert batcher.never_fits(several("a", 3)) is Reason.NEVER_FITS
    assert batcher.never_fits(several("a", 2, prompt_tokens=150, max_tokens=20)) is Reason.NEVER_FITS
    assert batcher.never_fits(several("a", 2, prompt_tokens=250, max_tokens=20)) is Reason.CONTEXT_LENGTH


def test_answers_wait_for_as_many_free_slots() -> None:
    batcher = Batcher(ROOMY, 4)
    batcher.enter(several("a", 2), 0.0)
    assert batcher.blocked(several("b", 2)) is None
    assert batcher.blocked(several("b", 3)) is Reason.SLOTS_FULL
    batcher.leave("a")
    assert batcher.blocked(several("b", 5)) is None, "above the operator's cap it may run alone"


def test_answers_that_never_fit_beside_reserved_slots_run_alone() -> None:
    batcher = Batcher(ROOMY, 4)
    better = [TierSpec("gold", 1, reserved_slots=0.5)]
    assert batcher.reserved_against(several("a", 2), better) is None
    assert batcher.reserved_against(several("a", 3), better) is None
    batcher.enter(request("b"), 0.0)
    assert batcher.reserved_against(request("c"), better) is None
    assert batcher.reserved_against(several("c", 2), better) is Reason.SLOTS_RESERVED
    assert batcher.reserved_against(several("c", 3), better) is Reason.SLOTS_RESERVED


@pytest.mark.parametrize("policy", ["continuous", "batching_aware", "article"])
def test_a_request_of_several_answers_is_dispatched_whole_when_there_is_room(policy: str) -> None:
    pool = planner(policy, ROOMY, max_batch=4)
    assert pool.arrive(several("a", 3, lane=Lane.SHORT), 0.0) is None
    assert dispatched(pool.decide(5.0)) == ["a"]
    assert pool.arrive(several("b", 2, arrival=5.0), 5.0) is None
    assert dispatched(pool.decide(6.0)) == []
    snapshot = pool.snapshot(6.0)
    assert (snapshot.in_flight, snapshot.tiers["silver"].running, snapshot.tiers["silver"].waiting) == (3, 3, 1)


def test_every_answer_is_charged_its_part_of_a_step() -> None:
    """Of four decoders three are one request's: it is charged three quarters of the step."""
    service = Service({"silver": (0.0, 1.0)})
    for one in (several("a", 3, prompt_tokens=0), request("b", prompt_tokens=0, tenant="t2")):
        service.arrived(one.tier, one.tenant)
        service.left_queue(one.tier, one.tenant)
        service.dispatched(one, 0.0)
        service.started(one.id, 10)
    service.step(1.0, 0, (0.01, 0.0, 0.0, 0.001, 1e-5))
    assert service.charged("a") == pytest.approx(0.75)
    assert service.ended("a") + service.ended("b") == pytest.approx(1.0)


def test_wfq_charges_all_answers_when_they_are_dispatched() -> None:
    """Of two tiers of one weight, the one that has got eight answers lets the other have as many requests."""
    pool = planner("wfq", ROOMY)
    pool.arrive(several("wide", 8, max_tokens=50), 0.0)
    assert dispatched(pool.decide(0.0)) == ["wide"]
    for number in range(3):
        pool.arrive(request(f"s{number}", "silver", max_tokens=50, arrival=0.1), 0.1)
        pool.arrive(request(f"b{number}", "bronze", max_tokens=50, arrival=0.2), 0.2)
    assert dispatched(pool.decide(0.2)) == ["b0", "b1", "b2", "s0", "s1", "s2"]


def test_article_expects_the_tokens_of_all_answers_as_it_learns_them() -> None:
    """A token takes a fortieth of a second, however many answers there are: two times forty are not done in 1.4 s."""
    pool = planner("article", ROOMY)
    for round, many in enumerate((1, 4, 1, 4)):
        at, tokens = 10.0 * round, 10 * many
        pool.arrive(several(f"{round}", many, arrival=at, prompt_tokens=1, stream=False, deadline=at + 9.0), at)
        assert dispatched(pool.decide(at + 0.05)) == [f"{round}"]
        pool.progress(f"{round}", tokens, at + 0.1)
        pool.finished(f"{round}", Outcome(completion_tokens=tokens), at + 0.05 + tokens / 40)
    for id in ("a", "b"):
        pool.arrive(several(id, 4, arrival=50.0, prompt_tokens=1, stream=False, deadline=52.0), 50.0)
    assert dispatched(pool.decide(50.05)) == ["a"]


@pytest.mark.parametrize(("many", "held"), [(1, []), (3, [Reason.LONG_LANE])])
def test_the_long_lane_counts_the_memory_of_all_answers(many: int, held: list[Reason]) -> None:
    """Long prompts have 40 % of memory: beside one of an eighth there is room for another, and not for three."""
    pool = planner("batching_aware", LONG)
    for number in range(40):  # by them 4,000 tokens are long
        pool.arrive(request(f"short{number}", deadline=1e3), 0.0)
        pool.cancel(f"short{number}", 0.0)
    pool.arrive(request("first", prompt_tokens=4000, deadline=1e3), 0.0)
    assert dispatched(pool.decide(0.0)) == ["first"]
    pool.progress("first", 9, 1.0)  # well ahead of its pace, so that it can bear the next prompt
    pool.arrive(several("second", many, arrival=1.0, prompt_tokens=4000, deadline=1e3), 1.0)
    assert [one.reason for one in pool.decide(1.0) if isinstance(one, Hold)] == held


def test_a_reservation_is_for_all_answers() -> None:
    """Of four that run, as many must have ended as it has answers; nothing is left over then, nor promised."""
    pool = planner("continuous", ROOMY, max_batch=4)
    for number in range(4):
        pool.arrive(request(f"{number}", max_tokens=10 * number + 10), 0.0)
    assert len(dispatched(pool.decide(0.0))) == 4
    made = [reserve(pool.books, several("w", many), 4, 400, lambda one, _: one.max_tokens, 0.0) for many in range(1, 5)]
    assert [one.spare_slots for one in made] == [0, 0, 0, 0]
    starts = [one.start for one in made]
    assert starts == sorted(set(starts))


def test_answers_pass_a_reservation_only_with_a_spare_slot_for_each() -> None:
    pool = planner("continuous", ROOMY)
    reservation = Reservation(request("first"), start=0.0, spare_slots=2, spare_blocks=400)
    assert may_pass(pool.books, reservation, several("a", 2), 0.0)
    assert not may_pass(pool.books, reservation, several("a", 3), 0.0)


@pytest.mark.parametrize(("many", "goes"), [(2, ["wide"]), (3, [])])
def test_answers_wait_for_slots_within_what_an_overload_leaves(many: int, goes: list[str]) -> None:
    """At level 3 seven of ten slots are in use at most."""
    pool = planner("batching_aware", ROOMY, max_batch=10)
    for number in range(5):
        pool.arrive(request(f"{number}", "gold", prompt_tokens=1), 0.0)
    assert len(dispatched(pool.decide(0.0))) == 5
    for number in range(5):
        pool.progress(f"{number}", 9, 0.1)
    pool.arrive(several("wide", many, arrival=0.1), 0.1)
    pool.books.level = 3
    assert dispatched(pool.decide(0.1)) == goes


def test_answers_cost_as_much_as_they_produce_together() -> None:
    books = planner("continuous", ROOMY).books
    one, three = request("a", prompt_tokens=0), several("b", 3, prompt_tokens=0)
    assert books.cost(three) == pytest.approx(3 * books.cost(one))


def test_the_length_of_one_answer_is_learned_not_that_of_all() -> None:
    pool = planner("continuous", ROOMY)
    for number in range(50):
        pool.arrive(several(f"{number}", 4, max_tokens=100), 0.0)
        pool.decide(0.0)
        pool.finished(f"{number}", Outcome(completion_tokens=40), 1.0)
    assert pool.books.expected_tokens(request("next", max_tokens=100)) <= 16


@pytest.mark.parametrize(("resumable", "victims"), [(True, ["low"]), (False, [])])
def test_what_cannot_be_resumed_is_never_evicted(resumable: bool, victims: list[str]) -> None:
    """As requests of several answers cannot: the last chance of the best rank is then none."""
    tiers = TIERS | {"bronze": replace(TIERS["bronze"], preemptible=True)}
    pool = Planner(replace(ROOMY, max_seqs=1), tiers, PolicyConfig(name="batching_aware"))
    pool.arrive(request("low", "bronze", max_tokens=200, resumable=resumable, deadline=9.0), 0.0)
    assert dispatched(pool.decide(0.0)) == ["low"]
    pool.progress("low", 1, 0.1)
    pool.arrive(request("high", "gold", arrival=0.1), 0.1)
    assert [one.request.id for one in pool.decide(0.2) if isinstance(one, Preempt)] == victims
