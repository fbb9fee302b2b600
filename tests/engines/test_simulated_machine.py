"""The step machine alone: no loop, no clock, no files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.types import PoolCapacity
from scheduler.engines.simulated.machine import End, Machine, Place, Sequence, StepCost, StepResult


def machine(
    *, max_seqs: int = 8, step_tokens: int = 64, kv_tokens: int = 1024, block_size: int = 16, **cost: float
) -> Machine:
    return Machine(PoolCapacity(max_seqs, step_tokens, kv_tokens, block_size, kv_tokens), StepCost(**cost))


def sequence(name: str, prompt: int = 4, tokens: int = 4, **more: float) -> Sequence:
    priority = int(more.pop("priority", 0))
    return Sequence(name, prompt, tokens, End.LENGTH, priority=priority, **more)


def step(engine: Machine, now: float = 0.0) -> StepResult | None:
    """One whole step; None if there is nothing to do."""
    return None if engine.begin(now) is None else engine.finish(now)


def names(sequences: list[Sequence]) -> list[str]:
    return [one.id for one in sequences]


# --- scheduling -------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_a_step_is_prefilled_in_chunks() -> None:
    engine = machine(step_tokens=10)
    engine.add(sequence("long", prompt=25, tokens=1))
    results = [step(engine), step(engine), step(engine)]
    assert [result.prefill_tokens for result in results if result] == [10, 10, 5]
    assert results[2] is not None and names(results[2].ended) == ["long"]
    assert step(engine) is None


def test_decoders_come_before_prefills_in_a_step() -> None:
    engine = machine(step_tokens=10)
    engine.add(sequence("first", prompt=4, tokens=9))
    step(engine)
    engine.add(sequence("second", prompt=20))
    result = step(engine)
    assert result is not None
    assert (result.decode_seqs, result.prefill_tokens) == (1, 9)


def test_a_pipelined_machine_lets_in_what_came_during_a_step_only_after_the_next_one() -> None:
    engine = Machine(PoolCapacity(8, 64, 1024, 16, 1024), StepCost(), pipelined=True)
    engine.add(sequence("first", tokens=9))
    engine.begin(0.0)
    assert list(engine.running) == ["first"], "an empty machine makes nobody wait"
    engine.add(sequence("during"))
    engine.finish(0.0)
    engine.add(sequence("between"))  # the next step has been scheduled already
    step(engine)
    assert list(engine.running) == ["first"]
    assert engine.abort("between") is not None
    step(engine)
    assert list(engine.running) == ["first", "during"]
    assert not engine.waiting


def test_no_more_sequences_run_than_the_engine_has_slots_for() -> None:
    engine = machine(max_seqs=2)
    for name in "abc":
        engine.add(sequence(name))
    step(engine)
    assert list(engine.running) == ["a", "b"]
    assert list(engine.waiting) == ["c"]


def test_no_more_sequences_run_than_a_step_has_tokens_for() -> None:
    engine = machine(max_seqs=8, step_tokens=2)
    for name in "abc":
        engine.add(sequence(name, prompt=1))
    step(engine)
    assert list(engine.running) == ["a", "b"]


def test_waiting_is_ordered_by_priority_then_arrival_then_coming() -> None:
    engine = machine(max_seqs=1)
    engine.add(sequence("late", tokens=1, arrival=9.0))
    engine.add(sequence("worse", tokens=1, priority=1, arrival=0.0))
    engine.add(sequence("early", tokens=1, arrival=1.0))
    engine.add(sequence("early too", tokens=1, arrival=1.0))
    order = []
    while (result := step(engine)) is not None:
        order += names(result.ended)
    assert order == ["early", "early too", "late", "worse"]


def test_a_head_that_does_not_fit_lets_nobody_past() -> None:
    engine = machine(kv_tokens=64)
    engine.add(sequence("first", prompt=40, tokens=4))
    engine.add(sequence("big", prompt=20, tokens=4))
    engine.add(sequence("small", prompt=1, tokens=4))
    step(engine)
    assert list(engine.running) == ["first"]


def test_a_step_costs_what_it_does() -> None:
    engine = machine(base=1.0, prefill_token=0.1, decode_seq=0.01, kv_token=0.001)
    engine.add(sequence("a", prompt=5))
    assert engine.begin(0.0) == pytest.approx(1.0 + 5 * 0.1)
    engine.finish(0.0)
    engine.add(sequence("b", prompt=3))
    assert engine.begin(0.0) == pytest.approx(1.0 + 3 * 0.1 + 0.01 + 0.001 * 6)
    engine.finish(0.0)
    assert engine.begin(0.0) == pytest.approx(1.0 + 2 * 0.01 + 0.001 * (7 + 4))


def test_what_could_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="larger than the KV pool"):
        machine(kv_tokens=64).add(sequence("huge", prompt=60, tokens=5))


# --- memory -----------------------------------------------------------------------------------------------------


def test_a_full_pool_preempts_the_worst_and_loses_none_of_its_tokens() -> None:
    engine = machine(kv_tokens=64)
    good, bad = sequence("good", prompt=30, tokens=30), sequence("bad", prompt=17, tokens=20, priority=1)
    engine.add(bad)
    engine.add(good)
    prefilled, again = 0, 0
    while (result := step(engine)) is not None:
        prefilled += result.prefill_tokens
        if result.preemptions:
            assert bad.place is Place.WAITING
            again += bad.context
    assert again > 17
    assert prefilled == 30 + 17 + again
    assert (good.made, bad.made) == (30, 20)
    assert engine.kv_usage == 0.0


def test_a_sequence_that_is_itself_the_worst_waits_for_its_turn() -> None:
    engine = machine(kv_tokens=64)
    good, bad = sequence("good", prompt=30, tokens=30), sequence("bad", prompt=16, tokens=20, priority=1)
    engine.add(good)
    engine.add(bad)
    finished = []
    while (result := step(engine)) is not None:
        finished += names(result.ended)
    assert finished == ["good", "bad"]


def test_a_hung_sequence_keeps_its_memory() -> None:
    engine = machine(kv_tokens=64)
    engine.add(Sequence("hung", 30, 1, End.HANG, priority=9))
    engine.add(sequence("other", prompt=20, tokens=30))
    while step(engine) is not None:
        pass
    assert list(engine.running) == ["hung"]
    assert list(engine.waiting) == ["other"]
    assert engine.abort("hung") is not None
    ended: list[str] = []
    while (result := step(engine)) is not None:
        ended += names(result.ended)
    assert ended == ["other"]


# --- aborts -----------------------------------------------------------------------------------------------------


def test_an_abort_between_steps_frees_at_once() -> None:
    engine = machine()
    engine.add(sequence("gone"))
    step(engine)
    assert engine.abort("gone") is not None
    assert not engine.running
    assert engine.kv_usage == 0.0


def test_an_abort_in_a_step_frees_at_its_end_without_its_token() -> None:
    engine = machine()
    gone = sequence("gone", tokens=9)
    engine.add(gone)
    engine.add(sequence("stays", tokens=9))
    step(engine)
    engine.begin(0.0)
    assert engine.abort("gone") is None
    assert "gone" in engine.running
    assert names(list(engine.producers())) == ["stays"]
    result = engine.finish(0.0)
    assert names(result.freed) == ["gone"]
    assert list(engine.running) == ["stays"]
    assert gone.made == 1


def test_an_abort_in_the_step_that_would_have_ended_it_is_an_abort() -> None:
    engine = machine()
    engine.add(sequence("gone", tokens=1))
    engine.begin(0.0)
    engine.abort("gone")
    result = engine.finish(0.0)
    assert (names(result.freed), names(result.ended), names(result.first_tokens)) == (["gone"], [], [])


def test_an_aborted_waiter_frees_its_place_and_its_name() -> None:
    engine = machine(max_seqs=1)
    engine.add(sequence("first", tokens=1))
    engine.add(sequence("name"))
    step(engine)
    assert engine.abort("name") is not None
    engine.add(sequence("name", tokens=1))
    result = step(engine)
    assert result is not None and names(result.ended) == ["name"]


def test_aborting_the_unknown_does_nothing() -> None:
    assert machine().abort("nobody") is None


# --- pace -------------------------------------------------------------------------------------------------------


def test_a_paced_sequence_rests_before_each_token() -> None:
    engine = machine()
    engine.add(sequence("paced", tokens=2, pace=3.0))
    assert engine.begin(0.0) is None
    assert engine.next_ready() == 3.0
    result = step(engine, 3.0)
    assert result is not None
    assert (names(result.started), names(result.first_tokens)) == (["paced"], ["paced"])
    assert step(engine, 5.0) is None
    assert engine.next_ready() == 6.0
    result = step(engine, 6.0)
    assert result is not None and names(result.ended) == ["paced"]
    assert engine.next_ready() is None


def test_a_resting_sequence_that_was_aborted_is_not_waited_for() -> None:
    engine = machine()
    engine.add(sequence("paced", pace=3.0))
    engine.begin(0.0)
    engine.abort("paced")
    assert engine.next_ready() is None
    assert engine.begin(3.0) is None


# --- properties -------------------------------------------------------------------------------------------------

sequences = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt
        st.integers(1, 40),  # tokens
        st.integers(0, 2),  # priority
        st.sampled_from([0.0, 0.0, 0.0, 1.5]),  # pace
        st.integers(0, 30),  # added before this step
        st.integers(0, 120),  # aborted in this step, if it is still there
    ),
    min_size=1,
    max_size=12,
)


@given(sequences, st.integers(1, 5), st.integers(4, 32), st.integers(7, 20))
def test_slots_blocks_and_tokens_are_conserved(
    plan: list[tuple[int, int, int, float, int, int]], max_seqs: int, step_tokens: int, blocks: int
) -> None:
    """After each step: blocks held + blocks free = pool, no cap is exceeded, and what runs has the KV it needs.
    At the end every sequence has ended with exactly its tokens or was aborted, and the pool is empty."""
    engine = machine(max_seqs=max_seqs, step_tokens=step_tokens, kv_tokens=blocks * 16, kv_token=1.0)
    everything = {
        f"s{index}": sequence(f"s{index}", prompt, tokens, priority=priority, pace=pace)
        for index, (prompt, tokens, priority, pace, _, _) in enumerate(plan)
    }
    ended: list[str] = []
    aborted: list[str] = []
    now = 0.0
    for number in range(5000):
        for name, (_, _, _, _, added, _) in zip(everything, plan, strict=True):
            if added == number:
                engine.add(everything[name])
        cost = engine.begin(now)
        for name, (_, _, _, _, _, aborted_in) in zip(everything, plan, strict=True):
            if aborted_in == number and engine.abort(name) is not None:
                aborted.append(name)
        if cost is not None:
            decoding = [one for one in engine.running.values() if one.place is Place.DECODE]
            assert cost == sum(one.prompt_tokens + engine.tokens(one) for one in decoding)
            assert all(one.blocks * 16 >= one.prompt_tokens + engine.tokens(one) for one in decoding)
            assert all(one.blocks * 16 >= one.computed + one.chunk for one in engine.running.values())
            result = engine.finish(now)
            assert result.prefill_tokens + result.decode_seqs <= step_tokens
            ended += names(result.ended)
            aborted += names(result.freed)
        assert len(engine.running) <= max_seqs
        held = sum(one.blocks for one in engine.running.values())
        assert engine.kv_usage == pytest.approx(held / blocks)
        if number > 120 and not engine.running and not engine.waiting:
            break
        now += 1.0
    assert sorted(ended + aborted) == sorted(everything)
    assert all(everything[name].made == everything[name].target for name in ended)
    assert engine.kv_usage == pytest.approx(0.0)


@given(sequences)
def test_producers_are_exactly_the_sequences_whose_count_grows(
    plan: list[tuple[int, int, int, float, int, int]],
) -> None:
    """What `producers` announces between begin and finish is what finish then counts."""
    engine = machine(max_seqs=4, step_tokens=16, kv_tokens=7 * 16)
    everything = [
        sequence(f"s{index}", prompt, tokens, priority=priority)
        for index, (prompt, tokens, priority, _, _, _) in enumerate(plan)
    ]
    for one in everything:
        engine.add(one)
    while engine.begin(0.0) is not None:
        before = {one.id: engine.tokens(one) for one in everything}
        announced = names(list(engine.producers()))
        engine.finish(0.0)
        grown = [one.id for one in everything if engine.tokens(one) == before[one.id] + 1]
        assert sorted(announced) == sorted(grown)
    assert all(engine.tokens(one) == one.target for one in everything)
