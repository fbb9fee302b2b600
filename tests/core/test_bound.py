"""The bound against what can be enumerated, and against what policies reach."""

from __future__ import annotations

import itertools
import random
import sys

import pytest

from scheduler.bound import Bound, BoundUnavailable, Job, attainable, compute_bound, greedy, jobs_of, optimum
from scheduler.core.types import PolicyConfig
from scheduler.simulator.profiles import PROFILES
from scheduler.simulator.replay import replay
from scheduler.simulator.results import judge
from scheduler.simulator.trace import TraceRow
from scheduler.simulator.workload import DEFAULT_TIERS, Demand, Workload, build_workload
from tests.core.traces import chat_rows

H100 = PROFILES["h100-8b"]


def workload(rho: float = 1.5, count: int = 600) -> Workload:
    return build_workload(chat_rows(count), H100, DEFAULT_TIERS, Demand(rho=rho))


def few_jobs(seed: int, count: int = 7) -> list[Job]:
    """So tight that not all of them fit."""
    source = random.Random(seed)
    arrivals = sorted(source.uniform(0, 2) for _ in range(count))
    return [
        Job(
            weight=source.choice([60.0, 30.0, 10.0]),
            arrival=arrival,
            prefill=source.uniform(0.1, 0.6),
            prefill_due=(due := arrival + source.uniform(0.6, 1.5)),
            decode=source.uniform(0.0, 0.6),
            decode_due=due + source.uniform(0.0, 2.0),
        )
        for arrival in arrivals
    ]


def overfull(jobs: list[Job]) -> bool:
    """Does any interval hold more work than time?"""
    dues = [due for job in jobs for due in (job.prefill_due, job.decode_due)]
    return any(
        sum(
            job.prefill * (job.prefill_due <= due) + job.decode * (job.decode_due <= due)
            for job in jobs
            if job.arrival >= first.arrival
        )
        > due - first.arrival + 1e-9
        for first in jobs
        for due in dues
        if due > first.arrival
    )


def best_subset(jobs: list[Job]) -> float:
    """The truth, by enumeration: the greatest weight of jobs that fit together."""
    subsets = itertools.chain.from_iterable(itertools.combinations(jobs, size) for size in range(len(jobs) + 1))
    return max(sum(job.weight for job in subset) for subset in subsets if not overfull(list(subset)))


@pytest.mark.parametrize("seed", range(25))
def test_the_truth_of_few_jobs_lies_between_greedy_and_bound(seed: int) -> None:
    jobs = few_jobs(seed)
    truth = best_subset(jobs)
    kept = greedy(jobs)
    value, converged = optimum(jobs)
    assert not overfull(kept)
    assert sum(job.weight for job in kept) <= truth + 1e-6
    assert truth <= value + 1e-6
    assert value <= sum(job.weight for job in jobs) + 1e-6
    assert converged


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_is_what_all_intervals_together_give(seed: int) -> None:
    numpy = pytest.importorskip("numpy")
    linprog = pytest.importorskip("scipy.optimize").linprog
    jobs = few_jobs(seed, count=12)
    intervals = [
        (first.arrival, due)
        for first in jobs
        for job in jobs
        for due in (job.prefill_due, job.decode_due)
        if due > first.arrival
    ]
    matrix = numpy.array(
        [
            [
                (job.arrival >= start) * (job.prefill * (job.prefill_due <= end) + job.decode * (job.decode_due <= end))
                for job in jobs
            ]
            for start, end in intervals
        ]
    )
    lengths = [end - start for start, end in intervals]
    everything = linprog([-job.weight for job in jobs], A_ub=matrix, b_ub=lengths, bounds=(0, 1))
    assert optimum(jobs)[0] == pytest.approx(-everything.fun, rel=2e-3)


def test_one_job_that_fits_half_counts_half() -> None:
    assert optimum([Job(10.0, 0.0, 2.0, 1.0, 0.0, 1.0)])[0] == pytest.approx(5.0)
    assert greedy([Job(10.0, 0.0, 2.0, 1.0, 0.0, 1.0)]) == []


def test_the_greedy_gives_up_what_is_worth_least_for_its_time() -> None:
    cheap, dear = Job(10.0, 0.0, 0.5, 1.0, 0.0, 1.0), Job(60.0, 0.1, 0.6, 1.0, 0.0, 1.0)
    assert greedy([cheap, dear]) == [dear]


@pytest.mark.parametrize("policy", ["continuous", "priority"])
@pytest.mark.parametrize("rho", [0.7, 1.5])
def test_no_policy_exceeds_the_bound(policy: str, rho: float) -> None:
    made = workload(rho)
    bound = compute_bound(made, H100)
    assert isinstance(bound, Bound) and bound.converged
    assert judge(replay(made, H100, PolicyConfig(name=policy))).value <= bound.value + 1e-9
    assert bound.greedy_value <= bound.value + 1e-9


def test_a_request_that_misses_even_alone_counts_for_nothing() -> None:
    rows = [TraceRow(0, 40_000, 10), TraceRow(50, 100, 10)]
    made = build_workload(rows, H100, DEFAULT_TIERS, Demand(mix=(1, 0, 0)))
    assert [attainable(request, DEFAULT_TIERS["vip"], H100) for request in made.requests] == [False, True]
    assert len(jobs_of(made, H100)) == 1
    assert compute_bound(made, H100).value == pytest.approx(0.5)


def test_the_horizon_is_the_longest_time_to_a_last_due_date() -> None:
    rows = [TraceRow(0, 100, 101), TraceRow(550, 100, 10)]
    bound = compute_bound(build_workload(rows, H100, DEFAULT_TIERS, Demand(mix=(0, 0, 1))), H100)
    assert bound.horizon == pytest.approx(5 + 100 * 0.25)
    assert bound.horizons == pytest.approx(550 / 30)


def test_without_the_solver_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(BoundUnavailable, match=r"llm-harness\[replay\]"):
        compute_bound(workload(count=10), H100)
