"""What the scheduler believes of steps, lengths and memory, each against a truth that is known here."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.kv_forecast import Forecast
from scheduler.core.length_model import LengthModel, PromptHistory, bucket
from scheduler.core.step_model import Coefficients, StepLoad, StepModel

TRUTH: Coefficients = (0.010, 4e-4, 0.0, 5e-4, 2e-7)


def seconds(load: StepLoad, b: Coefficients = TRUTH) -> float:
    return b[0] + b[1] * load.prefill_tokens + b[3] * load.decode_seqs + b[4] * load.decode_context


def loads(steps: int, seed: int = 1) -> list[StepLoad]:
    rng = random.Random(seed)
    return [
        StepLoad(rng.choice([0, 0, 64, 128]), decodes := rng.randint(1, 16), decodes * rng.randint(50, 400))
        for _ in range(steps)
    ]


def taught(model: StepModel, b: Coefficients, steps: int, noise: float = 0.02, seed: int = 1) -> StepModel:
    rng = random.Random(seed + 100)
    for load in loads(steps, seed):
        model.learn(load, seconds(load, b) * rng.uniform(1 - noise, 1 + noise))
    return model


def error(model: StepModel, b: Coefficients = TRUTH) -> float:
    return max(abs(model.predict(load) / seconds(load, b) - 1) for load in loads(50, seed=9))


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_a_prior_that_is_wrong_by_five_is_corrected_within_a_hundred_steps(factor: float) -> None:
    b = tuple(factor * one for one in TRUTH)
    assert error(taught(StepModel(b), TRUTH, 100)) < 0.1  # type: ignore[arg-type]


def test_it_stays_right_for_a_hundred_thousand_steps() -> None:
    assert error(taught(StepModel(TRUTH), TRUTH, 100_000)) < 0.05


def test_an_engine_that_changes_is_followed() -> None:
    slower: Coefficients = (TRUTH[0], 2 * TRUTH[1], 0.0, TRUTH[3], TRUTH[4])
    model = taught(taught(StepModel(TRUTH), TRUTH, 1000), slower, 1500, seed=2)
    assert error(model, slower) < 0.1


def test_one_step_that_stalls_does_not_bend_the_model() -> None:
    model = taught(StepModel(TRUTH), TRUTH, 1000)
    model.learn(StepLoad(0, 4, 400), 5.0)
    for load in loads(8, seed=3):
        model.learn(load, seconds(load))
    assert error(model) < 0.1


def test_a_model_that_cannot_be_right_falls_back_to_the_last_that_was() -> None:
    model = taught(StepModel(TRUTH), TRUTH, 500)
    for n, load in enumerate(loads(150, seed=4)):
        model.learn(load, 10.0 if n % 2 else 0.001)
    assert not model.trusted
    assert error(model) < 0.5


def test_coefficients_are_never_negative() -> None:
    model = StepModel(TRUTH)
    for n in range(200):
        model.learn(StepLoad(n, 1, 100), 1.0 / (n + 1))
    assert all(b >= 0 for b in model.coefficients)


def test_quantiles_tell_the_spread() -> None:
    model = taught(StepModel(TRUTH), TRUTH, 1000, noise=0.2)
    assert model.quantile(0.1) < 0.9 < model.quantile(0.5) < 1.1 < model.quantile(0.9)


def test_without_history_a_request_may_produce_all_it_asks_for() -> None:
    assert LengthModel().quantile("t", "gold", 400, 0.5) == 400


def test_a_tenants_habit_is_learned_and_others_borrow_from_their_tier() -> None:
    model = LengthModel()
    for _ in range(200):
        model.observe("terse", "gold", 400, 12)
        model.observe("wordy", "gold", 400, 300)
    assert model.quantile("terse", "gold", 400, 0.75) <= 40
    assert model.quantile("wordy", "gold", 400, 0.5) >= 200
    assert 8 <= model.quantile("new", "gold", 400, 0.25) <= 40 <= model.quantile("new", "gold", 400, 0.9)


def test_what_has_been_produced_is_never_unsaid() -> None:
    model = LengthModel()
    for _ in range(100):
        model.observe("t", "gold", 400, 20)
    assert model.quantile("t", "gold", 400, 0.75, produced=150) > 150


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 5000), st.integers(0, 5000))
def test_quantiles_rise_with_q_and_keep_to_the_cap(lengths: list[int], cap: int, produced: int) -> None:
    """Between what is produced and max_tokens, and monotone in q."""
    model = LengthModel()
    for length in lengths:
        model.observe("t", "gold", 5000, length)
    answers = [model.quantile("t", "gold", cap, q, produced) for q in (0.1, 0.25, 0.5, 0.75, 0.9)]
    assert answers == sorted(answers)
    assert all(min(produced + 1, cap) <= answer <= cap for answer in answers)


@given(st.integers(1, 1 << 21))
def test_a_bucket_holds_its_lengths(tokens: int) -> None:
    """Bucket i > 0 holds 2^(i-1) < n <= 2^i."""
    index = bucket(tokens)
    assert tokens == 1 if index == 0 else 2 ** (index - 1) < tokens <= 2**index


def test_the_history_of_prompts_knows_its_high_end() -> None:
    history = PromptHistory()
    for tokens in [100] * 95 + [4000] * 5:
        history.observe(tokens)
    assert history.quantile(0.5) <= 110
    assert history.quantile(0.99) >= 4000


FLIGHTS = st.tuples(st.integers(0, 60), st.integers(1, 8))  # remaining tokens, current blocks


@given(st.lists(FLIGHTS, min_size=1, max_size=6), st.integers(1, 16))
def test_the_peak_is_what_stepping_through_time_finds(flights: list[tuple[int, int]], block: int) -> None:
    """The formula is the maximum over all steps, blocks counted whole for each request's growth."""
    longest = max(remaining for remaining, _ in flights)
    by_time = max(
        sum(blocks + -(-min(step, remaining) // block) for remaining, blocks in flights if remaining >= step)
        for step in range(longest + 1)
    )
    assert Forecast(flights, block).peak == by_time


@given(st.lists(FLIGHTS, max_size=8), st.lists(FLIGHTS, min_size=1, max_size=4), st.integers(1, 16))
def test_a_forecast_with_more_requests_is_the_forecast_of_all_of_them(
    flights: list[tuple[int, int]], more: list[tuple[int, int]], block: int
) -> None:
    """Asking for one more and adding one more agree with a forecast that was made of all at once."""
    forecast = Forecast(flights, block)
    for number, one in enumerate(more, 1):
        whole = Forecast([*flights, *more[:number]], block).peak
        assert forecast.fits(*one, whole)
        assert not forecast.fits(*one, whole - 1)
        assert forecast.peak_with(*one) == whole
        forecast.add(*one)
        assert forecast.peak == whole


def test_the_peak_of_nothing_is_nothing() -> None:
    assert Forecast([], 16).peak == 0
    assert Forecast(itertools.repeat((0, 3), 4), 16).peak == 12
