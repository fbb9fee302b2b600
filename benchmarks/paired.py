"""Figures of runs that were made in blocks: every arm once in each block, so that what disturbs a block disturbs all.

The intervals are 95 % bootstrap intervals over blocks (percentile method). With few blocks they are little more than
the range that was seen; whoever prints them says how many blocks there were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from scipy.stats import wilcoxon

RESAMPLES = 2_000
TAIL = 0.025
Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and where 95 % of its resamples lie."""

    middle: float
    low: float
    high: float

    def __format__(self, number: str) -> str:
        return f"{self.middle:{number}} [{self.low:{number}}, {self.high:{number}}]"


def median_difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Median over the blocks of ours less theirs."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    return _bootstrap(len(differences), lambda blocks: median(differences[block] for block in blocks))


def ratio_of_totals(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """Sum of ours over sum of theirs; None if they have nothing at all."""
    if not sum(theirs):
        return None

    def ratio(blocks: Sequence[int]) -> float:
        total = sum(theirs[block] for block in blocks)
        return sum(ours[block] for block in blocks) / total if total else float("inf")

    return _bootstrap(len(ours), ratio)


def signed_rank(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test over blocks; 1 if no block differs."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    return float(wilcoxon(differences).pvalue) if any(differences) else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for being asked together (Holm, 1979)."""
    order = sorted(range(len(p_values)), key=lambda position: p_values[position])
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    for place, position in enumerate(order):
        worst = max(worst, min((len(p_values) - place) * p_values[position], 1.0))
        adjusted[position] = worst
    return adjusted


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson, 1927); (0, 1) if nothing was tried."""
    if not trials:
        return 0.0, 1.0
    share, square = successes / trials, Z_95**2
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = Z_95 / (1 + square / trials) * math.sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _bootstrap(blocks: int, estimate: Callable[[Sequence[int]], float]) -> Interval:
    draw = random.Random(1)
    resamples = sorted(estimate(draw.choices(range(blocks), k=blocks)) for _ in range(RESAMPLES))
    return Interval(estimate(range(blocks)), resamples[int(TAIL * RESAMPLES)], resamples[int((1 - TAIL) * RESAMPLES)])
