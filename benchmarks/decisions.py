"""What one scheduling decision costs, by policy and by how many requests wait: `python benchmarks/decisions.py`.

A full engine of 32 slots; each round one request ends and one decision fills its slot. The last column compares with
the first row: a decision should cost the same however long the queue is.
"""

from __future__ import annotations

import time
from statistics import median, quantiles

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


def decision_times(policy: str, depth: int) -> list[float]:
    """Seconds of each of ROUNDS decisions, with `depth` requests waiting."""
    planner = Planner(CAPACITY, TIERS, PolicyConfig(name=policy))
    arrived = 0

    def arrive(now: float) -> None:
        nonlocal arrived
        planner.arrive(request(arrived), now)
        arrived += 1

    for _ in range(depth + CAPACITY.max_seqs):
        arrive(1.0)
    running = [decision.request.id for decision in planner.decide(1.0) if isinstance(decision, Dispatch)]
    times = []
    for round_number in range(ROUNDS):
        now = 2.0 + round_number * 0.01
        planner.finished(running.pop(0), Outcome(completion_tokens=50), now)
        arrive(now)
        start = time.perf_counter()
        decisions = planner.decide(now)
        times.append(time.perf_counter() - start)
        running += [decision.request.id for decision in decisions if isinstance(decision, Dispatch)]
    return times


def main() -> None:
    print(f"{'policy':<18}{'waiting':>8}{'p50 µs':>10}{'p99 µs':>10}{'ratio':>8}")
    first = None
    for policy in sorted(POLICIES):
        for depth in DEPTHS:
            times = decision_times(policy, depth)
            middle = median(times)
            first = first or middle
            print(
                f"{policy:<18}{depth:>8}{middle * 1e6:>10.1f}{quantiles(times, n=100)[98] * 1e6:>10.1f}"
                f"{middle / first:>8.2f}"
            )


if __name__ == "__main__":
    main()
