"""What is seen of an engine from outside, and what follows from it."""

from __future__ import annotations

from dataclasses import replace

from scheduler.core.types import PoolCapacity, StepReport
from scheduler.worker.engine_watch import Caution, EngineWatch

CAPACITY = PoolCapacity(max_seqs=32, step_tokens=64, kv_tokens=4096, block_size=16, max_model_len=512)
STEP = StepReport(at=1.0, elapsed=0.01, prefill_tokens=0, decode_seqs=1, running=1, waiting=0, kv_usage=0.1)


def test_silence_is_five_predicted_steps_and_no_less_than_ten_seconds():
    watch = EngineWatch()
    watch.stepped(STEP)
    assert watch.silence(11.0, step=0.01) is None
    assert watch.silence(11.1, step=0.01) is not None
    assert watch.silence(11.1, step=3.0) is None
    assert watch.silence(16.1, step=3.0) is not None


def test_a_token_is_a_sign_of_life_and_an_idle_engine_is_not_silent():
    watch = EngineWatch()
    watch.stepped(STEP)
    watch.alive(9.0)
    assert watch.silence(18.0, step=0.01) is None
    watch.idle()
    assert watch.silence(100.0, step=0.01) is None  # it has just been given something
    assert watch.silence(111.0, step=0.01) == 11.0


def step(at: float, waiting: int) -> StepReport:
    return replace(STEP, at=at, waiting=waiting)


def test_an_engine_is_crowded_after_three_steps_with_more_than_two_waiting_and_until_one_is_left():
    watch = EngineWatch()
    seen = []
    for at, waiting in enumerate((3, 3, 2, 3, 3, 3, 2, 3, 2, 1, 2, 3)):
        watch.stepped(step(at, waiting))
        seen.append(watch.crowded)
    assert seen == [False] * 5 + [True] * 4 + [False] * 3
    assert [watch.stepped(step(100.0 + at, 3)) for at in range(2)] == [False, True]
    watch.idle()
    assert not watch.crowded, "its queue is empty whatever it said last"


def test_a_queue_that_fills_again_and_again_is_one_alarm_until_ten_seconds_have_been_calm():
    watch = EngineWatch()
    refilled = [watch.stepped(step(0.1 * number, waiting)) for number, waiting in enumerate([5, 5, 5, 4, 3, 0, 0] * 20)]
    assert (sum(refilled), refilled.index(True)) == (1, 2)
    last = 0.1 * (len(refilled) - 3)
    watch.idle()
    assert not any(watch.stepped(step(last + 9.0 + 0.1 * number, 5)) for number in range(4)), "the same episode goes on"
    watch.stepped(step(last + 9.5, 0))
    again = [watch.stepped(step(last + 20.0 + 0.1 * number, 5)) for number in range(4)]
    assert again == [False, False, True, False]


def test_each_death_halves_the_sequences_and_five_quiet_minutes_give_a_tenth_back():
    caution = Caution()
    assert caution.capacity(CAPACITY, 0.0) == CAPACITY
    assert caution.died(100.0) is False
    assert caution.capacity(CAPACITY, 100.0) == replace(CAPACITY, max_seqs=16, kv_tokens=3686)
    assert caution.step_tokens(CAPACITY, 100.0) == 32
    assert caution.died(110.0) is False
    assert caution.capacity(CAPACITY, 409.0).max_seqs == 8
    assert caution.capacity(CAPACITY, 410.0).max_seqs == 11
    assert caution.capacity(CAPACITY, 10_000.0) == CAPACITY
    assert caution.step_tokens(CAPACITY, 10_000.0) is None


def test_a_third_death_within_ten_minutes_is_an_alarm_and_one_sequence_always_runs():
    caution = Caution()
    assert [caution.died(at) for at in (0.0, 10.0, 620.0, 625.0)] == [False, False, False, False]
    assert [caution.died(at) for at in (1000.0, 1010.0, 2000.0)] == [True, True, True]
    for at in range(10):
        caution.died(2000.0 + at)
    assert caution.capacity(CAPACITY, 2010.0).max_seqs == 1


def test_after_the_alarm_nothing_is_given_back():
    caution = Caution()
    for at in (0.0, 10.0, 20.0):
        caution.died(at)
    assert caution.capacity(CAPACITY, 1e6).max_seqs == 4


def test_whatever_the_model_allows_for_one_request_still_fits():
    caution = Caution()
    for at in range(30):
        caution.died(float(at))
    assert caution.capacity(CAPACITY, 30.0).kv_tokens == CAPACITY.max_model_len
    assert caution.step_tokens(CAPACITY, 30.0) == CAPACITY.max_seqs, "each sequence needs a token"
