"""What batching is worth on an engine: how tokens per second and seconds per token grow with the batch.

A step with n sequences of the workload's mean lengths (prompt P, output N) makes n tokens. To keep n running, it also
prefills what ends are replaced by: n P / N tokens a step.

    T(n) = b0 + n (b3 + b4 (P + N/2) + b1 P/N)      S(n) = n T(1) / T(n)      U(n) = 1 - b0 / T(n)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.types import TierSpec
from scheduler.simulator.profiles import Profile
from scheduler.simulator.workload import Workload, full_batch


@dataclass(frozen=True, slots=True)
class EngineCurve:
    """One entry per batch size, from 1 to a full batch B*."""

    sizes: list[int]
    token_time: list[float]  # T(n): seconds from a token of a sequence to its next
    throughput: list[float]  # tokens per second
    speed_up: list[float]  # S(n): throughput over that of one sequence
    utilisation: list[float]  # U(n): share of a step that is spent on sequences, not on what every step costs

    @classmethod
    def of(cls, workload: Workload, profile: Profile) -> EngineCurve:
        """The curve for the workload's mean lengths."""
        count, cost = len(workload.requests), profile.cost
        prompt = sum(request.prompt_tokens for request in workload.requests) / count
        output = sum(workload.outputs) / count
        sequence = cost.decode_seq + cost.kv_token * (prompt + output / 2) + cost.prefill_token * prompt / output
        sizes = list(range(1, max(int(full_batch(profile, prompt + output)), 1) + 1))
        token_time = [cost.base + size * sequence for size in sizes]
        return cls(
            sizes=sizes,
            token_time=token_time,
            throughput=[size / time for size, time in zip(sizes, token_time, strict=True)],
            speed_up=[size * token_time[0] / time for size, time in zip(sizes, token_time, strict=True)],
            utilisation=[1 - cost.base / time for time in token_time],
        )

    def chosen(self, tiers: Iterable[TierSpec]) -> int:
        """The largest batch whose steps keep the pace that every tier promises; 1 if none does."""
        tightest = min(tier.tpot for tier in tiers)
        return self.sizes[max(bisect_right(self.token_time, tightest), 1) - 1]
