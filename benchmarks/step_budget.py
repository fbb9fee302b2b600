"""How many tokens a step of vLLM should hold: the same requests under each step budget.

    calibrate      what a step costs on this CPU, with the budget of the other benchmarks
    replay         every budget in virtual time with that cost; no noise, but no more than the cost says
    each round     every budget on the engine, in random order, each on one of its own (--rounds 0: none)

Twice with each budget: 1.5 of what the engine can do, for the throughput when there is always work, and half of it, for
the time to first token. All is first come, first served, so that no policy evens out what the engine does. A budget
that is too small pays the constant part of a step too often; one that is too large makes every stream wait for long
prompts.
Of the rounds only ratios within one count, and on a machine that others use not even those.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.calibration import Calibration, calibrate
from benchmarks.live import LiveEngine, Run, Served
from benchmarks.report import keep, percentile, show
from benchmarks.scheduling import (
    CONTEXT,
    DATA_DIR,
    ENGINE,
    ENGINE_FIXED,
    MEMORY_GIB,
    SCALES,
    block_workload,
    fit_rows,
    prepare_model,
    synthetic_trace,
)
from scheduler.core.types import PolicyConfig
from scheduler.simulator.profiles import Profile
from scheduler.simulator.replay import replay
from scheduler.simulator.results import latencies
from scheduler.simulator.trace import TraceRow, read_trace
from scheduler.simulator.workload import DEFAULT_TIERS, Demand, Workload

BUDGETS = (64, 128, 256, 512, 1024)
POLICY = "continuous"
SATURATED, PACED = 1.5, 0.5  # of what the engine can do


@dataclass(frozen=True, slots=True)
class Result:
    """One budget in one round or replay; seconds."""

    budget: int
    tokens_per_second: float
    ttft_p95: float
    step_p95: float | None


def predict(profile: Profile, budget: int, full: Workload, paced: Workload) -> Result:
    """What the simulator says of a budget."""
    profile = replace(profile, capacity=replace(profile.capacity, step_tokens=budget))
    policy = PolicyConfig(name=POLICY)
    records = replay(full, profile, policy).records
    ends = [record.last_token for record in records if record.last_token is not None]
    tokens = sum(record.request.max_tokens for record in records if record.last_token is not None)
    ttft, _ = latencies(replay(paced, profile, policy).records)
    return Result(budget, tokens / max(ends), percentile(ttft, 95), None)


class Sweep:
    """The engines of one run of this program, one after another, and what they gave."""

    def __init__(self, options: argparse.Namespace, model: Path, rows: list[TraceRow]) -> None:
        self._options = options
        self._model = model
        self._rows = rows
        self.predicted: list[Result] = []
        self.results: dict[int, list[Result]] = defaultdict(list)

    async def run(self) -> None:
        live = await self._start(ENGINE["step_tokens"])
        try:
            seconds = self._options.calibration
            found = await calibrate(live, self._rows, seconds, self._options.model, self._calibration_load)
        finally:
            await live.engine.aclose()
        full, paced = (self._workload(found, load, 0) for load in (SATURATED, PACED))
        self.predicted = [predict(found.profile, budget, full, paced) for budget in self._options.budgets]
        draw = random.Random(1)
        for number in range(self._options.rounds):
            for budget in draw.sample(self._options.budgets, len(self._options.budgets)):
                result = await self._one(budget, number, found)
                self.results[budget].append(result)
                print(f"round {number + 1} of {self._options.rounds}: {result}", flush=True)

    async def _start(self, budget: int) -> LiveEngine:
        options = {"path": str(self._model), "kv_space_gib": MEMORY_GIB[self._options.model], **ENGINE, **ENGINE_FIXED}
        return await LiveEngine.start({**options, "step_tokens": budget}, DATA_DIR)

    def _calibration_load(self, rough: Profile) -> Workload:
        return block_workload(self._rows, rough, DEFAULT_TIERS, 0.9, Demand(rho=PACED), self._options.calibration / 2)

    async def _one(self, budget: int, number: int, found: Calibration) -> Result:
        live = await self._start(budget)
        try:
            full, span = await self._serve(live, found, SATURATED, number)
            paced, _ = await self._serve(live, found, PACED, number)
        finally:
            await live.engine.aclose()
        ttft, _ = latencies(paced.records)
        periods = [sample.period for sample in paced.samples]
        return Result(budget, full.delivered / span, percentile(ttft, 95), percentile(periods, 95))

    def _workload(self, found: Calibration, load: float, number: int) -> Workload:
        part = number / (self._options.rounds + 1)
        demand = Demand(rho=load, seed=number)
        return block_workload(self._rows, found.profile, DEFAULT_TIERS, part, demand, self._options.seconds)

    async def _serve(self, live: LiveEngine, found: Calibration, load: float, number: int) -> tuple[Served, float]:
        """What came of the round's requests, and the seconds in which they were sent."""
        workload = self._workload(found, load, number)
        run = Run(live, workload, POLICY, f"{load}-{number}", found.learned)
        return await run.serve(), workload.span


def show_results(title: str, results: dict[int, list[Result]]) -> None:
    """A row for each budget: the medians of what is known of it."""
    rows = []
    for budget, rounds in sorted(results.items()):
        steps = [one.step_p95 for one in rounds if one.step_p95 is not None]
        rows.append(
            [
                str(budget),
                f"{median(one.tokens_per_second for one in rounds):.0f}",
                f"{median(one.ttft_p95 for one in rounds) * 1e3:.0f} ms",
                f"{median(steps) * 1e3:.1f} ms" if steps else "-",
            ]
        )
    show(title, ["tokens per step", "tokens/s", "TTFT P95", "step P95"], rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=("tiny", "demo"), default="tiny", help="two random layers, or the demo model")
    add("--budgets", type=lambda text: [int(part) for part in text.split(",")], default=list(BUDGETS))
    add("--trace", type=Path, help="CSV, also gzipped: arrival_s,prompt_tokens,output_tokens; default: synthetic")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=10.0, help="of arrivals in each run")
    add("--calibration", type=float, default=20.0, help="seconds")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    trace = synthetic_trace() if options.trace is None else read_trace(options.trace)
    sweep = Sweep(options, prepare_model(options.model), fit_rows(trace, SCALES[options.model], CONTEXT))
    asyncio.run(sweep.run())
    show_results("Replayed", {one.budget: [one] for one in sweep.predicted})
    if sweep.results:
        show_results(f"On the engine, medians of {options.rounds} rounds", sweep.results)
    rounds = [asdict(one) for results in sweep.results.values() for one in results]
    keep("step_budget", {"replayed": [asdict(one) for one in sweep.predicted], "rounds": rounds})


if __name__ == "__main__":
    main()
