"""How a run went over time: sums over equal slices of virtual time, a bounded number however long the run takes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

MOST_SLICES = 4000


@dataclass(slots=True)
class Slice:
    """Sums over the steps that fell into one slice, each with the part of it that did."""

    busy: float = 0.0  # seconds
    running: float = 0.0  # sequence-seconds
    kv_usage: float = 0.0  # share-seconds
    waiting: float = 0.0  # request-seconds in the planner's queue

    def __add__(self, other: Slice) -> Slice:
        return Slice(
            self.busy + other.busy,
            self.running + other.running,
            self.kv_usage + other.kv_usage,
            self.waiting + other.waiting,
        )


class Timeline:
    """Slices from 0 on, each `width` seconds wide. A run that outgrows them makes one out of two, again and again."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.slices: list[Slice] = []

    def add(self, begun: float, ended: float, running: int, kv_usage: float, waiting: int) -> None:
        """A step and what was the case during it."""
        while ended > self.width * MOST_SLICES:
            self._coarsen()
        first, last = int(begun / self.width), int(ended / self.width)
        self.slices.extend(Slice() for _ in range(last + 1 - len(self.slices)))
        for number in range(first, last + 1):
            seconds = min(ended, (number + 1) * self.width) - max(begun, number * self.width)
            part = self.slices[number]
            part.busy += seconds
            part.running += seconds * running
            part.kv_usage += seconds * kv_usage
            part.waiting += seconds * waiting

    def total(self) -> Slice:
        """The whole run as one slice."""
        return sum(self.slices, Slice())

    def _coarsen(self) -> None:
        self.width *= 2
        pairs = zip_longest(self.slices[::2], self.slices[1::2], fillvalue=Slice())
        self.slices = [one + other for one, other in pairs]
