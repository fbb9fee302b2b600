"""The most KV memory that what runs will hold at any time to come.

Requests end one by one, the shortest remainder first. Just before the j-th longest ends, the j longest are alive and
each has grown by that remainder:

    total_j = sum of current blocks of the j longest-remaining + j x blocks(remaining_j)        Peak = max over j

Admission against the present use alone lets output growth run into preemption; admission against the sum of all
maxima leaves half of the memory empty.

One more sequence of `b` blocks at place p of that order leaves the totals before it as they are, and adds to each after
it its own blocks and those that it will have grown by: total_j + b + blocks(remaining_j). One decision asks for several
candidates, so that the totals are kept.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from itertools import accumulate, count, repeat
from operator import add, mul


class Forecast:
    """Peak of some flights, given as pairs (remaining tokens, current blocks), and of those with another."""

    def __init__(self, flights: Iterable[tuple[int, int]], block_size: int) -> None:
        ordered = sorted(flights, reverse=True)
        self._block_size = block_size
        self._order = [-remaining for remaining, _ in ordered]  # the longest remainder first, ascending to be bisected
        self._growths = [-(order // block_size) for order in self._order]  # blocks(remaining)
        self._held = list(accumulate([blocks for _, blocks in ordered]))  # by the j longest
        self._totals = list(map(add, self._held, map(mul, count(1), self._growths)))
        self.peak = max(self._totals, default=0)  # blocks

    def __len__(self) -> int:
        return len(self._order)

    def fits(self, remaining: int, blocks: int, limit: float, count: int = 1) -> bool:
        """Whether the peak would be within `limit` blocks if `count` more of that kind ran."""
        if self.peak > limit:
            return False
        if self.peak + count * (blocks - (-remaining // self._block_size)) <= limit:
            return True  # no total can grow by more: each grows by the smaller of two growths, at the most
        return self.peak_with(remaining, blocks, count) <= limit

    def peak_with(self, remaining: int, blocks: int, count: int = 1) -> int:
        """Blocks at the peak if `count` more of that kind ran."""
        at = bisect(self._order, -remaining)
        before = max(self._totals[:at], default=0)
        growths = self._growths[at:] if count == 1 else [count * growth for growth in self._growths[at:]]
        after = max(map(add, self._totals[at:], growths), default=0)
        return max(before, self._own(at, remaining, blocks, count), after + count * blocks)

    def add(self, remaining: int, blocks: int) -> None:
        """One more request runs."""
        at = bisect(self._order, -remaining)
        own = self._own(at, remaining, blocks)
        held = self._held[at - 1] if at else 0
        self._totals[at:] = [own, *map(add, map(add, self._totals[at:], self._growths[at:]), repeat(blocks))]
        self._held[at:] = [held + blocks, *map(add, self._held[at:], repeat(blocks))]
        self.peak = max(self._totals)
        self._order.insert(at, -remaining)
        self._growths.insert(at, -(-remaining // self._block_size))

    def _own(self, at: int, remaining: int, blocks: int, count: int = 1) -> int:
        """The total of `count` more at that place."""
        held = self._held[at - 1] if at else 0
        return held + count * blocks + (at + count) * -(-remaining // self._block_size)
