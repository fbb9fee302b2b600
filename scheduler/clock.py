"""The clock seam: real time for the product, manual time for tests and replays.

The scheduling core takes instants as arguments. What sleeps (the simulated engine, ticks) takes a `Clock`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """One monotonic clock in seconds."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    """CLOCK_MONOTONIC; never steps when the wall clock does."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class ManualClock:
    """Time that moves only in `advance`: sleepers wake in order of their instants, ties in order of arrival."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(seconds, 0.0), next(self._order), future))
        await future

    async def advance(self, seconds: float) -> None:
        """Move time on by `seconds`, letting each sleeper run before the next one wakes."""
        until = self._now + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= until:
            at, _, future = heapq.heappop(self._sleepers)
            self._now = max(self._now, at)
            if not future.done():
                future.set_result(None)
            await self.settle()
        self._now = until

    async def settle(self, rounds: int = 50) -> None:
        """Let everything that is ready on the loop run, without moving time."""
        for _ in range(rounds):
            await asyncio.sleep(0)
