"""What one scheduling decision costs, by policy and by how many requests wait, and what a waiting request weighs.

A full engine of 32 slots; each round one request ends and one decision fills its slot. The last column compares with
the same policy's first row: a decision should cost about the same however long the queue is.
"""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

from benchmarks.report import keep, percentile, show
from scheduler.core.planner import Planner
from scheduler.core.policies import POLICIES
from scheduler.core.types import Dispatch, Outcome, PolicyConfig, PoolCapacity, Request, TierSpec

TIERS = {
    name: TierSpec(name, rank=rank, weight=weight, queue_max_length=1_000_000)
    for rank, (name, weight) in enumerate([("vip", 60.0), ("paid", 30.0), ("free", 10.0)], start=1)
}
CAPACITY = PoolCapacity(max_seqs=32, step_tokens=2048, kv_tokens=64_000, block_size=32, max_model_len=4096)
DEPTHS = (100, 1_000, 10_000)  # waiting requests
ROUNDS = 2_000
MOST_SECONDS = 3.0  # for the rounds of one policy at one depth


def request(number: int) -> Request:
    """Tiers by 20, 30, 50 per cent; lengths that repeat every hundred."""
    tier = ("vip", "paid", "paid", "free", "free")[number % 5] if number % 10 < 8 else "free"
    return Request(
        id=f"r{number}",
        tenant=f"t{number % 50}",
        tier=tier,
        arrival=number * 0.001,
        prompt_tokens=20 + number % 100,
        max_tokens=100,
        stream=True,
        deadline=1e6 + number,
        queue_deadline=2e6,
    )


def filled(policy: str, depth: int) -> Planner:
    """A planner with `depth` requests waiting."""
    planner = Planner(CAPACITY, TIERS, PolicyConfig(name=policy))
    for number in range(depth):
        planner.arrive(request(number), 1.0)
    return planner


def decision_times(policy: str, depth: int) -> list[float]:
    """Seconds of each of up to ROUNDS decisions, with `depth` requests waiting."""
    planner = filled(policy, depth + CAPACITY.max_seqs)
    running = [decision.request.id for decision in planner.decide(1.0) if isinstance(decision, Dispatch)]
    arrived = depth + CAPACITY.max_seqs
    times: list[float] = []
    give_up = time.perf_counter() + MOST_SECONDS
    while len(times) < ROUNDS and time.perf_counter() < give_up:
        now = 2.0 + len(times) * 0.01
        if running:  # a policy that waits for a batch leaves the engine empty at times
            planner.finished(running.pop(0), Outcome(completion_tokens=50), now)
            planner.arrive(request(arrived), now)
            arrived += 1
        start = time.perf_counter()
        decisions = planner.decide(now)
        times.append(time.perf_counter() - start)
        running += [decision.request.id for decision in decisions if isinstance(decision, Dispatch)]
    return times


def bytes_per_request(policy: str, depth: int) -> float:
    """What a waiting request holds in memory, itself included."""
    tracemalloc.start()
    planner = filled(policy, depth)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del planner  # it had to live until here
    return held / depth


def main() -> None:
    rows: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for policy in sorted(POLICIES):
        weight = bytes_per_request(policy, DEPTHS[-1])
        first = None
        for depth in DEPTHS:
            times = decision_times(policy, depth)
            p50, p99 = percentile(times, 50), percentile(times, 99)
            first = first or p50
            rows.append(
                [policy, str(depth), f"{p50 * 1e6:.1f}", f"{p99 * 1e6:.1f}", f"{p50 / first:.2f}", f"{weight:.0f}"]
            )
            results.append(
                {"policy": policy, "waiting": depth, "p50": p50, "p99": p99, "bytes_per_request": round(weight)}
            )
    headings = ["policy", "waiting", "p50 µs", "p99 µs", "ratio", f"bytes a request at {DEPTHS[-1]}"]
    show("One scheduling decision", headings, rows)
    keep("core", results)


if __name__ == "__main__":
    main()
