"""The parts of the benchmark on the real engine that need no engine."""

from __future__ import annotations

import random
from statistics import median

import pytest

from benchmarks.calibration import fit, slowdown
from benchmarks.live import StepSample
from benchmarks.paired import holm, median_difference, ratio_of_totals, signed_rank, wilson
from benchmarks.scheduling import block_workload, fit_rows, parse, scaled_tiers, synthetic_trace
from scheduler.engines.simulated.machine import StepCost
from scheduler.simulator.profiles import PROFILES
from scheduler.simulator.workload import DEFAULT_TIERS, Demand


def test_the_synthetic_trace_has_the_published_medians_and_a_mean_gap_of_one() -> None:
    rows = synthetic_trace()
    assert median(row.prompt_tokens for row in rows) == pytest.approx(1016, rel=0.05)
    assert median(row.output_tokens for row in rows) == pytest.approx(114, rel=0.05)
    assert rows[-1].arrival / len(rows) == pytest.approx(1.0, rel=0.05)


def test_the_fit_finds_the_step_cost_again_though_some_steps_were_disturbed() -> None:
    draw = random.Random(1)
    samples = []
    for _ in range(2000):
        prefill, decoding = draw.randrange(256), draw.randrange(1, 32)
        context = decoding * draw.randrange(50, 500)
        period = 4e-3 + 1e-5 * prefill + 1e-4 * decoding + 2e-7 * context + draw.uniform(-1e-4, 1e-4)
        disturbed = draw.random() < 0.05
        samples.append(StepSample(prefill, decoding, context, period + (0.05 if disturbed else 0.0), period))
    cost, error = fit(samples)
    assert (cost.base, cost.prefill_token) == pytest.approx((4e-3, 1e-5), rel=0.05)
    assert (cost.decode_seq, cost.kv_token) == pytest.approx((1e-4, 2e-7), rel=0.1)
    assert error < 0.02


def test_steps_that_take_half_as_long_again_as_predicted_are_a_slowdown_of_one_and_a_half() -> None:
    cost = StepCost(base=1e-3, prefill_token=1e-5, decode_seq=1e-4, kv_token=0.0)
    samples = [StepSample(100, 0, 0, 3e-3, 2e-3), StepSample(0, 10, 500, 3e-3, 2e-3)]
    assert slowdown(samples, cost) == pytest.approx(1.5)


@pytest.mark.parametrize("load", [0.7, 1.3])
def test_a_block_offers_the_load_that_was_asked_for(load: float) -> None:
    profile = PROFILES["cpu-sim"]
    rows = fit_rows(synthetic_trace(), (0.1, 0.1), profile.longest)
    workload = block_workload(rows, profile, DEFAULT_TIERS, 0.5, Demand(rho=load), seconds=60.0)
    assert workload.rho == pytest.approx(load)
    assert workload.span == pytest.approx(60.0, rel=0.05)


def test_deadlines_are_the_shipped_ones_unless_the_idle_engine_is_too_slow_for_them() -> None:
    assert scaled_tiers(0.01)["vip"].ttft == 0.5
    slow = scaled_tiers(0.2)
    assert [slow[name].ttft for name in ("vip", "paid", "free")] == pytest.approx([1.0, 4.0, 10.0])


def test_one_sided_blocks_are_significant_and_like_ones_are_not() -> None:
    assert signed_rank([2.0 + n for n in range(8)], [1.0 * n for n in range(8)]) == pytest.approx(2 / 2**8)
    assert signed_rank([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == 1.0


def test_several_questions_at_once_are_harder_to_answer() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_interval_of_a_share_is_wilsons() -> None:
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe (1998), table I
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)


def test_two_like_arms_have_a_ratio_of_one_and_no_difference() -> None:
    ratio = ratio_of_totals([3.0, 1.0, 2.0], [3.0, 1.0, 2.0])
    assert ratio is not None
    assert (ratio.low, ratio.middle, ratio.high) == (1.0, 1.0, 1.0)
    assert median_difference([3.0, 1.0], [3.0, 1.0]).middle == 0.0


def test_there_is_no_ratio_to_an_arm_that_has_nothing() -> None:
    assert ratio_of_totals([1.0], [0.0]) is None


@pytest.mark.parametrize("wrong", [["--arms", "nonsense"], ["--seconds", "1"], ["--blocks", "0"]])
def test_options_that_make_no_sense_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)
    assert "error" in capsys.readouterr().err
