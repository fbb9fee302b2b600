"""What the calls of the scheduling core cost, and what a waiting request weighs in it.

    policies   one decision of each policy: it should cost about the same however many requests wait
    load       every call of a planner for which 10,000 requests wait and as many run as an H100 takes
    replay     every decision while a trace offers 1.3 times what an engine can do

CPU is that of the thread: the garbage collector is in it, and so is what neighbours on the machine do to its caches. A
fixed piece of work in between says how much that is. What a whole scheduler process holds of a waiting request is in
`benchmarks/memory.py`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from benchmarks.report import keep, percentile, show
from benchmarks.scheduling import synthetic_trace
from scheduler.core.planner import Planner
from scheduler.core.policies import POLICIES
from scheduler.core.types import Dispatch, Outcome, PolicyConfig, PoolCapacity, Request, StepReport
from scheduler.engines.simulated import machine
from scheduler.simulator.profiles import PROFILES
from scheduler.simulator.replay import replay
from scheduler.simulator.trace import TraceRow, read_trace
from scheduler.simulator.workload import DEFAULT_TIERS, Demand, build_workload

P = ParamSpec("P")
T = TypeVar("T")

OURS = "batching_aware"
WAITING = 10_000  # requests
TENANTS = 50
DEPTHS = (100, 1_000, WAITING)
SMALL = PoolCapacity(max_seqs=32, step_tokens=2048, kv_tokens=64_000, block_size=32, max_model_len=4096)
ROUNDS = 2_000  # decisions of one policy at one depth
MOST_SECONDS = 3.0  # for them
LARGE = PROFILES["h100-8b"]
WARM_UP = 400  # engine steps: by then the engine is full and step times and lengths are known
STEPS = 4_000
PROMISE = 86_400.0  # seconds that a tier lets its requests wait, so that many can
REPLAYED = ("h100-8b", "a10g-7b")
LOAD = 1.3
FIXED = "a fixed piece of work"

# The shipped tiers. The best rank keeps its deadline, so that those of its requests that wait are late or urgent.
PATIENT = {
    tier.name: replace(tier, queue_max_length=10 * WAITING, queue_max_wait=PROMISE)
    if tier.rank == 1
    else replace(tier, queue_max_length=10 * WAITING, queue_max_wait=PROMISE, ttft=PROMISE)
    for tier in DEFAULT_TIERS.values()
}


def tier_of(number: int) -> str:
    """By 20, 30, 50 per cent."""
    return ("vip", "vip", "paid", "paid", "paid", "free", "free", "free", "free", "free")[number * 7 % 10]


def forget_the_past() -> None:
    """What lives now is not looked at by the collector again, as in a scheduler process that has been idle."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


# --- policies ---------------------------------------------------------------------------------------------------------


def short_request(number: int) -> Request:
    """Lengths that repeat every hundred; nobody is in a hurry."""
    return Request(
        id=f"r{number}",
        tenant=f"t{number % TENANTS}",
        tier=tier_of(number),
        arrival=number * 0.001,
        prompt_tokens=20 + number % 100,
        max_tokens=100,
        stream=True,
        deadline=1e6 + number,
        queue_deadline=2e6,
    )


def filled(policy: str, depth: int) -> Planner:
    """A planner with `depth` requests waiting."""
    planner = Planner(SMALL, PATIENT, PolicyConfig(name=policy))
    for number in range(depth):
        planner.arrive(short_request(number), 1.0)
    return planner


def decision_times(policy: str, depth: int) -> list[float]:
    """CPU seconds of each of up to ROUNDS decisions, with `depth` requests waiting and one that has just ended."""
    forget_the_past()
    planner = filled(policy, depth + SMALL.max_seqs)
    running = [decision.request.id for decision in planner.decide(1.0) if isinstance(decision, Dispatch)]
    arrived = depth + SMALL.max_seqs
    times: list[float] = []
    give_up = time.perf_counter() + MOST_SECONDS
    while len(times) < ROUNDS and time.perf_counter() < give_up:
        now = 2.0 + len(times) * 0.01
        if running:  # a policy that waits for a batch leaves the engine empty at times
            planner.finished(running.pop(0), Outcome(completion_tokens=50), now)
            planner.arrive(short_request(arrived), now)
            arrived += 1
        start = time.thread_time()
        decisions = planner.decide(now)
        times.append(time.thread_time() - start)
        running += [decision.request.id for decision in decisions if isinstance(decision, Dispatch)]
    return times


def bytes_in_planner(policy: str) -> float:
    """What a planner holds of a waiting request, the `Request` included."""
    tracemalloc.start()
    planner = filled(policy, WAITING)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del planner  # it had to live until here
    return held / WAITING


def measure_policies() -> list[dict[str, Any]]:
    rows: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for policy in sorted(POLICIES):
        weight = bytes_in_planner(policy)
        first = None
        for depth in DEPTHS:
            times = decision_times(policy, depth)
            p50, p99 = percentile(times, 50), percentile(times, 99)
            first = first or p50
            rows.append([policy, str(depth), *microseconds(times), f"{p50 / first:.2f}", f"{weight:.0f}"])
            results.append(
                {"policy": policy, "waiting": depth, "p50": p50, "p99": p99, "bytes_per_request": round(weight)}
            )
    headings = ["policy", "waiting", *MICROSECONDS, "ratio", f"bytes a request at {WAITING}"]
    show(f"One decision that fills one of {SMALL.max_seqs} slots", headings, rows)
    return results


MICROSECONDS = ("p50 µs", "p99 µs", "most µs")


def microseconds(times: Sequence[float]) -> list[str]:
    return [f"{value * 1e6:.1f}" for value in (percentile(times, 50), percentile(times, 99), max(times))]


# --- load -------------------------------------------------------------------------------------------------------------


def fixed_work() -> int:
    """The same every time, and of the kind that decisions are made of: calls, tuples, a sort, a dictionary."""
    pairs = sorted((place * 7919 % 1009, place) for place in range(400))
    return len(dict(pairs))


@dataclass
class Loaded:
    """A planner with WAITING requests and a full engine under it. Whatever leaves is replaced by a new arrival."""

    rows: Iterator[TraceRow]
    planner: Planner = field(
        default_factory=lambda: Planner(LARGE.capacity, PATIENT, PolicyConfig(name=OURS), cpu_clock=time.thread_time)
    )
    engine: machine.Machine = field(default_factory=lambda: machine.Machine(LARGE.capacity, LARGE.cost))
    now: float = 100.0
    times: dict[str, list[float]] = field(default_factory=dict)  # call -> CPU seconds of each
    running: list[int] = field(default_factory=list)  # at the decisions
    _arrived: int = 0

    def run(self) -> None:
        self._fill()
        for _ in range(WARM_UP):
            self._step()
        self.times.clear()
        self.running.clear()
        for _ in range(STEPS):
            self._step()

    def _fill(self) -> None:
        """What waits already came a second ago or earlier: the best rank's are late by now."""
        while (waiting := self.planner.waiting()) < WAITING:
            self._arrive(self.now - 1.0 - waiting / WAITING)
        self._decide()

    def _step(self) -> None:
        elapsed = self.engine.begin(self.now)
        assert elapsed is not None  # there is always something to do
        began, self.now = self.now, self.now + elapsed
        step = self.engine.finish(self.now)
        report = StepReport(
            at=self.now,
            elapsed=self.now - began,
            prefill_tokens=step.prefill_tokens,
            decode_seqs=step.decode_seqs,
            running=len(self.engine.running),
            waiting=len(self.engine.waiting),
            kv_usage=self.engine.kv_usage,
            preemptions=step.preemptions,
            decode_context=step.decode_context,
        )
        self._timed(FIXED, fixed_work)
        self._timed("step", self.planner.step, report)
        self._timed("progress of all that run", self._progress)
        for sequence in step.ended:
            self._timed("finished", self.planner.finished, sequence.id, Outcome(sequence.made), self.now)
        self._decide()
        while self.planner.waiting() < WAITING:
            self._arrive(self.now)
            self._decide()

    def _progress(self) -> None:
        for sequence in self.engine.running.values():
            self.planner.progress(sequence.id, self.engine.tokens(sequence), self.now)

    def _arrive(self, arrival: float) -> None:
        row, number = next(self.rows), self._arrived
        self._arrived += 1
        tier = PATIENT[tier_of(number)]
        request = Request(
            id=f"r{number}",
            tenant=f"t{number % TENANTS}",
            tier=tier.name,
            arrival=arrival,
            prompt_tokens=row.prompt_tokens,
            max_tokens=row.output_tokens,
            stream=True,
            deadline=tier.deadline(arrival, True, row.output_tokens, None),
            queue_deadline=arrival + tier.queue_max_wait,
        )
        refusal = self._timed("arrive", self.planner.arrive, request, self.now)
        assert refusal is None, refusal

    def _decide(self) -> None:
        self.running.append(len(self.engine.running))
        for decision in self._timed("decide", self.planner.decide, self.now):
            if isinstance(decision, Dispatch):
                request = decision.request
                self.engine.add(
                    machine.Sequence(
                        request.id,
                        request.prompt_tokens,
                        request.max_tokens,
                        machine.End.LENGTH,
                        priority=decision.engine_priority,
                        arrival=request.arrival,
                    )
                )
        self._timed("next_wakeup", self.planner.next_wakeup, self.now)

    def _timed(self, name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        start = time.thread_time()
        answer = call(*args, **kwargs)
        self.times.setdefault(name, []).append(time.thread_time() - start)
        return answer


def measure_load(rows: Sequence[TraceRow]) -> dict[str, Any]:
    forget_the_past()
    loaded = Loaded(itertools.cycle(rows))
    loaded.run()
    assert loaded.planner.policy == OURS, loaded.planner.take_events()  # it has not been replaced for being slow
    table = [[name, str(len(times)), *microseconds(times)] for name, times in loaded.times.items()]
    running = sum(loaded.running) / len(loaded.running)
    show(
        f"{WAITING} wait in {len(PATIENT)} tiers of {TENANTS} tenants, {running:.0f} run on {LARGE.name}: {OURS}",
        ["call", "calls", *MICROSECONDS],
        table,
    )
    calls = {name: figures(times) for name, times in loaded.times.items()}
    return {"waiting": WAITING, "running": running, "calls": calls}


def figures(times: Sequence[float]) -> dict[str, float]:
    return {"calls": len(times), "p50": percentile(times, 50), "p99": percentile(times, 99), "most": max(times)}


# --- replay -----------------------------------------------------------------------------------------------------------


def measure_replays(rows: Sequence[TraceRow], trace: str) -> list[dict[str, Any]]:
    table: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for name in REPLAYED:
        profile = PROFILES[name]
        workload = build_workload(rows, profile, DEFAULT_TIERS, Demand(rho=LOAD))
        forget_the_past()
        times = [ns / 1e9 for ns in replay(workload, profile, PolicyConfig(name=OURS)).decision_ns]
        table.append([name, str(len(times)), *microseconds(times)])
        results.append({"profile": name, "trace": trace, "requests": len(rows), "rho": LOAD, **figures(times)})
    show(f"{len(rows)} requests of {trace} at rho {LOAD}: {OURS}", ["profile", "decisions", *MICROSECONDS], table)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="CSV: arrival_s,prompt_tokens,output_tokens; default: synthetic")
    options = parser.parse_args()
    rows = synthetic_trace() if options.trace is None else read_trace(options.trace)
    trace = "a synthetic trace" if options.trace is None else options.trace.name
    policies = measure_policies()
    load = measure_load(rows)
    keep("core", {"policies": policies, "load": load, "replays": measure_replays(rows, trace)})


if __name__ == "__main__":
    main()
