"""What a scheduler process does beside serving: hold its lease, tell how deployments fare, write down its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from scheduler import engine_processes, ownership
from scheduler.clock import Clock
from scheduler.worker.database import Status, write_statuses
from tenants.database import DatabaseAway, DatabaseThread

log = structlog.get_logger(__name__)

RENEW_EVERY = 2.0  # seconds
MARGIN = 1.0  # seconds before the end of its lease at which an owner stops admitting
STATUS_RETRY = 1.0  # seconds
PIDS_EVERY = 1.0  # seconds


class Lease:
    """Keeps the epoch. `lost` is called once, when somebody else has taken over."""

    def __init__(
        self, name: str, epoch: int, taken: float, thread: DatabaseThread, clock: Clock, lost: Callable[[], None]
    ) -> None:
        """`taken`: the clock's time just before the lease was taken."""
        self._name = name
        self._epoch = epoch
        self._until = taken + ownership.LEASE_SECONDS
        self._thread = thread
        self._clock = clock
        self._lost = lost

    def admits(self) -> bool:
        """Whether it is safe to take requests in."""
        return self._clock.now() < self._until - MARGIN

    async def run(self) -> None:
        """Renew until cancelled or superseded."""
        while True:
            await self._clock.sleep(RENEW_EVERY)
            asked = self._clock.now()
            try:
                renewed = await self._thread.run(ownership.renew, self._name, self._epoch)
            except DatabaseAway as error:
                log.warning("lease cannot be renewed", error=type(error).__name__, left=self._until - asked)
                continue
            if not renewed:
                self._until = asked
                log.error("another scheduler has taken over", name=self._name, epoch=self._epoch)
                self._lost()
                return
            self._until = asked + ownership.LEASE_SECONDS


class StatusBoard:
    """Writes the newest status of each deployment to the database; while that is away, keeps it and tries again."""

    def __init__(self, process: str, epoch: int, thread: DatabaseThread, clock: Clock) -> None:
        self._process = process
        self._epoch = epoch
        self._thread = thread
        self._clock = clock
        self._waiting: dict[int, Status] = {}
        self._news = asyncio.Event()

    def put(self, deployment: int, status: Status) -> None:
        self._waiting[deployment] = status
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            if not await self.write():
                await self._clock.sleep(STATUS_RETRY)

    async def write(self) -> bool:
        """Write what waits; False if the database is away."""
        self._news.clear()
        statuses = dict(self._waiting)
        try:
            await self._thread.run(write_statuses, statuses, self._process, self._epoch)
        except DatabaseAway as error:
            log.warning("deployment status cannot be written", error=type(error).__name__)
            self._news.set()
            return False
        # Only now: a write that is cancelled is done again.
        self._waiting = {key: status for key, status in self._waiting.items() if statuses.get(key) is not status}
        return True


async def watch_engine_processes(run_dir: Path, scheduler: str, clock: Clock) -> None:
    """Keep `engine_processes` up to date, from the first second of an engine's start on, until cancelled.

    All children of this process are engines' (an engine may start them long before it is ready and knows them).
    """
    known: list[int] = []
    while True:
        pids = await asyncio.to_thread(engine_processes.children)
        if pids != known:
            await asyncio.to_thread(engine_processes.record, run_dir, scheduler, pids)
            known = pids
        await clock.sleep(PIDS_EVERY)
