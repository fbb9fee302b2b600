"""The sweep of step budgets, without an engine."""

from __future__ import annotations

import pytest

from benchmarks.scheduling import block_workload, synthetic_trace
from benchmarks.step_budget import PACED, SATURATED, Result, predict, show_results
from scheduler.simulator.profiles import PROFILES
from scheduler.simulator.workload import DEFAULT_TIERS, Demand


def test_the_table_has_the_median_of_each_budget_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    def results(budget: int, *throughputs: float) -> list[Result]:
        return [Result(budget, tokens, tokens / 1e4, None) for tokens in throughputs]

    show_results("Title", {512: results(512, 30.0, 10.0, 20.0), 64: results(64, 3.0, 1.0, 2.0)})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [line[:3] for line in lines] == [["64", "2", "0"], ["512", "20", "2"]]


def test_a_step_that_is_too_small_costs_throughput_and_time_to_first_token() -> None:
    profile = PROFILES["cpu-tiny"]
    rows = [row for row in synthetic_trace()[:2000] if row.prompt_tokens + row.output_tokens <= 2048]
    full, paced = (
        block_workload(rows, profile, DEFAULT_TIERS, 0.0, Demand(rho=load, seed=1), 5.0) for load in (SATURATED, PACED)
    )
    small, large = (predict(profile, budget, full, paced) for budget in (48, 512))
    assert small.tokens_per_second < 0.95 * large.tokens_per_second
    assert small.ttft_p95 > 2 * large.ttft_p95
