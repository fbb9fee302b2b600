"""Figures of runs that were made in blocks: every arm once in each block, so that what disturbs a block disturbs all.

The intervals are 95 % bootstrap intervals over blocks (percentile method). With few blocks they are little more than
the range that was seen; whoever prints them says how many blocks there were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

RESAMPLES = 2_000
TAIL = 0.025


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


def _bootstrap(blocks: int, estimate: Callable[[Sequence[int]], float]) -> Interval:
    draw = random.Random(1)
    resamples = sorted(estimate(draw.choices(range(blocks), k=blocks)) for _ in range(RESAMPLES))
    return Interval(estimate(range(blocks)), resamples[int(TAIL * RESAMPLES)], resamples[int((1 - TAIL) * RESAMPLES)])
