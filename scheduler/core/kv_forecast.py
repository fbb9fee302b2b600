"""The most KV memory that what runs will hold at any time to come.

Requests end one by one, the shortest remainder first. Just before the j-th longest ends, the j longest are alive and
each has grown by that remainder:

    Peak = max over j of [ sum of current blocks of the j longest-remaining + j x blocks(remaining_j) ]

Admission against the present use alone lets output growth run into preemption; admission against the sum of all
maxima leaves half of the memory empty.
"""

from __future__ import annotations

from collections.abc import Iterable


def peak(flights: Iterable[tuple[int, int]], block_size: int) -> int:
    """Blocks at the peak, for pairs (remaining tokens, current blocks)."""
    current = highest = 0
    for count, (remaining, blocks) in enumerate(sorted(flights, reverse=True), 1):
        current += blocks
        total = current + count * -(-remaining // block_size)
        if total > highest:  # in the hot path of every admission: no call
            highest = total
    return highest
