"""How a change reaches every process: a counter in the database, polled, acted upon, acknowledged by heartbeats.

writer                       each web and scheduler process
one_change()  ->  counter  ->  Poller  ->  on_change callbacks  ->  heartbeat with the version acted upon
wait_acknowledged()  <-  heartbeats
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any

from django.utils import timezone

from .database import DatabaseAway, DatabaseThread
from .models.change import ProcessHeartbeat, bump, configuration_changed, current_version, one_change

__all__ = [
    "Poller",
    "beat",
    "bump",
    "configuration_changed",
    "current_version",
    "one_change",
    "wait_acknowledged",
]

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
BEAT_SECONDS = 2.0
SILENT_SECONDS = 3 * BEAT_SECONDS  # a process that is silent for longer is not waited for
FORGET_SECONDS = 3600.0  # and its row goes after this

OnChange = Callable[[int], Awaitable[None]]
Info = Mapping[str, Any]


def beat(name: str, kind: str, seen_version: int, info: Info | None = None) -> None:
    """Say that process `name` lives and acts on every change up to `seen_version`."""
    heartbeat = ProcessHeartbeat(
        name=name, kind=kind, seen_version=seen_version, beat_at=timezone.now(), info=dict(info or {})
    )
    ProcessHeartbeat.objects.bulk_create(
        [heartbeat],
        update_conflicts=True,
        unique_fields=["name"],
        update_fields=["kind", "seen_version", "beat_at", "info"],
    )


def leave(name: str) -> None:
    """Say that process `name` stops: nobody waits for it any more."""
    ProcessHeartbeat.objects.filter(name=name).delete()


def forget_silent() -> None:
    """Remove the rows of processes that ended without saying so long ago."""
    ProcessHeartbeat.objects.filter(beat_at__lt=timezone.now() - timedelta(seconds=FORGET_SECONDS)).delete()


def behind(version: int) -> list[str]:
    """Names of the running processes that do not yet act on `version`.

    Task workers are never behind: they keep nothing in memory, each job reads the database.
    """
    alive_since = timezone.now() - timedelta(seconds=SILENT_SECONDS)
    lagging = ProcessHeartbeat.objects.filter(beat_at__gte=alive_since, seen_version__lt=version)
    lagging = lagging.exclude(kind=ProcessHeartbeat.Kind.TASKS)
    return list(lagging.order_by("name").values_list("name", flat=True))


def wait_acknowledged(
    version: int,
    timeout: float = 5.0,
    on_progress: Callable[[list[str]], None] | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Wait until every running process acts on `version`; the names of those that do not after `timeout` seconds.

    `on_progress` gets the names still waited for, whenever they change.
    """
    until = clock() + timeout
    said: list[str] = []
    while names := behind(version):
        if on_progress and names != said:
            on_progress(names)
        said = names
        if clock() >= until:
            return names
        sleep(0.1)
    return []


class Poller:
    """Watches the counter for one process and keeps its heartbeat.

    `version` is the newest change that every callback has acted upon, `fresh_at` the clock's time at which the
    process was last known to be up to date (-inf before the first poll). A database that is away stops neither: both
    stand still, and polling goes on. A callback that raises is called again at the next poll.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        info: Callable[[], Info] = dict,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.version = -1
        self.fresh_at = float("-inf")
        self._name = name
        self._kind = kind
        self._info = info
        self._clock = clock
        self._sleep = sleep
        self._beat_at = float("-inf")
        self._away = False
        self._callbacks: list[OnChange] = []
        self._thread = DatabaseThread("changes")
        self._task: asyncio.Task[None] | None = None

    def on_change(self, callback: OnChange) -> None:
        """Have `callback(version)` awaited for every change, and once at the first poll. Callbacks run in order."""
        self._callbacks.append(callback)

    async def start(self) -> None:
        """Poll once, then on and on in a task of this poller."""
        await self.poll(first=True)
        self._task = asyncio.create_task(self._run(), name="change-poller")

    async def aclose(self) -> None:
        """Stop polling and take the heartbeat away. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            with contextlib.suppress(*DatabaseAway):
                await self._thread.run(leave, self._name)
        await self._thread.aclose()

    async def _run(self) -> None:
        while True:
            await self._sleep(POLL_SECONDS)
            await self.poll()

    async def poll(self, *, first: bool = False) -> None:
        """Read the counter, act on a change, beat. Never raises for a database that is away."""
        now = self._clock()
        try:
            if first:
                await self._thread.run(forget_silent)
            version = await self._thread.run(current_version)
            changed = version != self.version
            if not changed or await self._act(version):
                self.fresh_at = now
            if changed or now - self._beat_at >= BEAT_SECONDS:
                await self._thread.run(beat, self._name, self._kind, max(self.version, 0), self._info())
                self._beat_at = now
            self._note_away(None)
        except DatabaseAway as error:
            self._note_away(error)

    async def _act(self, version: int) -> bool:
        """Call the callbacks; True when all of them took the change in."""
        for callback in self._callbacks:
            try:
                await callback(version)
            except Exception:  # a listener's fault must not end the polling that every other listener needs
                log.exception("A listener failed on change %d; it is called again.", version)
                return False
        self.version = version
        return True

    def _note_away(self, error: BaseException | None) -> None:
        """Log when the database goes and comes, not at every poll between."""
        if (error is not None) == self._away:
            return
        self._away = error is not None
        if error is not None:
            log.warning("The database is away (%s): configuration stays as it is.", type(error).__name__)
        else:
            log.info("The database is back.")
