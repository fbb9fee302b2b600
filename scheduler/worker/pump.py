"""The loop of one pool: wait, read the clock once, decide and act.

Nothing here waits for a socket, a disk or an engine: dispatching starts a task, answering puts an event in the outbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scheduler.clock import Clock

Decide = Callable[[float], float | None]
"""Decides and acts as of an instant; answers the instant at which it must be asked again, if only time passes."""


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
    """See the module text."""

    def __init__(self, clock: Clock, bell: Bell, decide: Decide) -> None:
        self._clock = clock
        self._bell = bell
        self._decide = decide

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._bell.wait()
                self._bell.ring_at(self._decide(self._clock.now()))
        finally:
            self._bell.silence()
