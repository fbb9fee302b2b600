"""The live overview of one web process: schedulers' snapshots in, one numbered frame a second out.

    gateway.snapshots() -> Board -> channel layer group of this process -> its websockets

Every frame carries the whole current view (about 2 kB) and one point for the charts. The last 300 points are kept, so
that a page starts with history and a socket that was away asks for what it missed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
import structlog
from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from django.db import DatabaseError

from harness_web.console import reports
from tenants.models import Tier

POINTS = 300
INTERVAL = 1.0  # seconds between frames
META_LEASE = 30.0  # seconds until tier names and targets are read again, should no snapshot announce a change

log = structlog.get_logger(__name__)


class Board:
    """What this process knows of all schedulers, and the numbered frames made of it.

    Not thread-safe: belongs to the event loop. `clock` is monotonic seconds, `wall` is Unix seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall = wall
        self.stream = secrets.token_hex(8)  # a client that meets another process, or this one restarted, notices
        self.group = f"console.overview.{self.stream}"
        self.seq = 0
        self.meta: dict[str, reports.TierMeta] = {}
        self._latest: dict[str, tuple[float, reports.SchedulerReport]] = {}
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS)

    def receive(self, snapshot: Mapping[str, Any]) -> None:
        """Take one scheduler's snapshot. Raises msgspec.ValidationError for one that makes no sense."""
        report = reports.parse(snapshot)
        self._latest[report.scheduler] = (self._clock(), report)

    def view(self) -> reports.View:
        """The present, merged over the schedulers that report; the last known state when none does."""
        now = self._clock()
        ages = {name: now - at for name, (at, _) in self._latest.items()}
        fresh = [name for name, age in ages.items() if age <= reports.FRESH_FOR]
        shown = fresh or [name for name, age in ages.items() if age <= min(ages.values()) + reports.FRESH_FOR]
        view = reports.merge((self._latest[name][1] for name in shown), self.meta)
        view.connected = bool(fresh)
        view.age = min(ages.values(), default=None)
        view.reporting = len(fresh)
        view.schedulers = len(ages)
        view.silent = sorted(set(ages) - set(fresh))
        return view

    def tick(self) -> dict[str, Any]:
        """Make the next frame and remember its point. A silent second is a gap in the charts, never a zero."""
        view = self.view()
        self.seq += 1
        point = {"seq": self.seq, "at": self._wall(), **_point(view)}
        self._points.append(point)
        return self._frame("delta", view, point=point)

    def snapshot(self, stream: str | None = None, after: int | None = None) -> dict[str, Any]:
        """The present with all history, or only the points after frame `after` if the asker followed this stream."""
        resumed = stream == self.stream and after is not None and after <= self.seq
        points = [point for point in self._points if not resumed or point["seq"] > (after or 0)]
        return self._frame("snapshot", self.view(), points=points, resumed=resumed)

    def points(self) -> list[dict[str, Any]]:
        return list(self._points)

    def meta_is_missing(self) -> bool:
        """Whether a reported tier is not described yet."""
        return any(name not in self.meta for _, report in self._latest.values() for name in report.tiers)

    def policy_version(self) -> int:
        return max((report.policy_version for _, report in self._latest.values()), default=0)

    def forget_silent(self, older_than: float) -> None:
        """Drop schedulers that left long ago, but never the last one known: its state is what a page can still show."""
        now = self._clock()
        newest = max(self._latest, key=lambda name: self._latest[name][0], default=None)
        for name, (at, _) in list(self._latest.items()):
            if now - at > older_than and name != newest:
                del self._latest[name]

    def _frame(self, kind: str, view: reports.View, **rest: Any) -> dict[str, Any]:
        return {
            "type": kind,
            "topic": "overview",
            "stream": self.stream,
            "seq": self.seq,
            "at": self._wall(),
            "view": msgspec.to_builtins(view),
            **rest,
        }


TRACKED = ("waiting", "running", "tokens_per_s", "oldest_wait", "attainment", "kv", "busy", "gpu")


def _point(view: reports.View) -> dict[str, Any]:
    """What the charts remember of a second: nothing, when no scheduler reported."""
    if not view.connected:
        return {"tiers": {}, "totals": {}}
    return {
        "tiers": {
            tier.name: {"waiting": tier.waiting, "running": tier.running, "attainment": tier.attainment}
            for tier in view.tiers
        },
        "totals": {name: getattr(view.totals, name) for name in TRACKED},
    }


BOARD = Board()  # one per web process: sockets and pages of the process read it, `fan_out` writes it


def history() -> list[dict[str, Any]]:
    """The points of the last five minutes, oldest first."""
    return BOARD.points()


async def fan_out(snapshots: AsyncIterator[dict[str, Any]], board: Board = BOARD) -> None:
    """Feed `board` and send a frame a second to the sockets of this process. Runs until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_read(snapshots, board))
        tasks.create_task(_publish(board))


async def _read(snapshots: AsyncIterator[dict[str, Any]], board: Board) -> None:
    async for snapshot in snapshots:
        try:
            board.receive(snapshot)
        except msgspec.ValidationError as error:
            log.warning("telemetry_refused", error=str(error))


async def _publish(board: Board) -> None:
    layer = get_channel_layer()
    described = Described(board)
    while True:
        await described.refresh()
        board.forget_silent(older_than=600.0)
        await layer.group_send(board.group, {"type": "overview.frame", "frame": board.tick()})
        await asyncio.sleep(INTERVAL)


class Described:
    """Keeps the tiers' order and targets on the board up to date with the configuration."""

    def __init__(self, board: Board, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._read: tuple[int, float] | None = None  # policy version and instant of the last reading

    async def refresh(self) -> None:
        now, version = self._clock(), self._board.policy_version()
        if self._read and not self._due(now, version):
            return
        self._read = (version, now)
        try:
            self._board.meta = await database_sync_to_async(read_meta)()
        except DatabaseError as error:  # the page goes on with what it knows
            log.warning("tier_targets_not_read", error=str(error))

    def _due(self, now: float, version: int) -> bool:
        assert self._read is not None
        read_version, at = self._read
        age = now - at
        return version != read_version or age > META_LEASE or (self._board.meta_is_missing() and age > INTERVAL)


def read_meta() -> dict[str, reports.TierMeta]:
    """Rank and targets of all tiers, from the database."""
    rows = Tier.objects.values_list("name", "rank", "objective", "slo_ttft")
    return {name: reports.TierMeta(rank=rank, objective=goal, ttft=ttft) for name, rank, goal, ttft in rows}
