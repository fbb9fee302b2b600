"""The loop of one pool: wait, read the clock once, decide, act.

Nothing here waits for a socket, a disk or an engine: dispatching starts a task, answering puts an event in the outbox.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from scheduler.clock import Clock
from scheduler.core.planner import Planner
from scheduler.core.types import Decision


class Bell:
    """Wakes the pump: at once, or at an instant. One timer at a time; a call too many only costs one decision."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rung = asyncio.Event()
        self._due: float | None = None
        self._timer: asyncio.Task[None] | None = None

    def ring(self) -> None:
        self._rung.set()

    def ring_at(self, instant: float | None) -> None:
        if instant is None or (self._due is not None and self._due <= instant):
            return
        self.silence()
        self._due = instant
        self._timer = asyncio.create_task(self._sleep(instant), name="pump-timer")

    def silence(self) -> None:
        """Forget the instant."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._due = None

    async def wait(self) -> None:
        await self._rung.wait()
        self._rung.clear()

    async def _sleep(self, instant: float) -> None:
        await self._clock.sleep(instant - self._clock.now())
        self._due = self._timer = None
        self.ring()


class Pump:
    """See the module text. `act` carries decisions out; `on_decision` gets the seconds that each one took."""

    def __init__(
        self,
        planner: Planner,
        clock: Clock,
        act: Callable[[Sequence[Decision], float], None],
        on_decision: Callable[[float], None],
    ) -> None:
        self.bell = Bell(clock)
        self._planner = planner
        self._clock = clock
        self._act = act
        self._on_decision = on_decision

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self.bell.wait()
                now = self._clock.now()
                decisions = self._decide(now)
                self._act(decisions, now)
                self.bell.ring_at(self._planner.next_wakeup(now))
        finally:
            self.bell.silence()

    def _decide(self, now: float) -> Sequence[Decision]:
        started = time.perf_counter()
        decisions = self._planner.decide(now)
        self._on_decision(time.perf_counter() - started)
        return decisions
