"""Links: connections to scheduler processes that are kept, whatever becomes of the processes.

Roster     one link for each address that is listed, read again every second
Link       one address: connected, or trying to be
Epochs     of two processes that claim the same name, the older one is not listened to
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import structlog

from scheduler.clock import Clock
from scheduler.wire.codec import WireError
from scheduler.wire.connection import Connection
from scheduler.wire.messages import AnyMessage, Welcome
from scheduler.wire.session import dial
from scheduler.wire.transport import Address, Transport

RELIST = 1.0  # seconds between readings of the address list
RETRY_FIRST = 0.05  # seconds
RETRY_CAP = 1.0  # seconds

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Wiring:
    """What links are made with. `name` is this process's, for the peer's logs; `jitter` spreads retries."""

    transport: Transport
    clock: Clock
    name: str
    epochs: Epochs
    jitter: random.Random


class Epochs:
    """The highest epoch seen of each scheduler name, and the links that follow it."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}
        self._links: set[Link] = set()

    def admit(self, link: Link, welcome: Welcome) -> bool:
        """Whether `link` may go on; one that carries a lower epoch of the same name is closed now."""
        if welcome.epoch < self._highest.get(welcome.scheduler, 0):
            return False
        self._highest[welcome.scheduler] = welcome.epoch
        for other in list(self._links):
            if other.scheduler == welcome.scheduler and other.epoch < welcome.epoch:
                other.cut("superseded by a higher epoch")
        self._links.add(link)
        return True

    def leave(self, link: Link) -> None:
        self._links.discard(link)


class Link(ABC):
    """One address. Subclasses say what to do with messages (`on_message`) and when they end (`on_lost`)."""

    def __init__(self, address: Address, role: str, wiring: Wiring) -> None:
        self.address = address
        self.scheduler = ""  # as the peer named itself in its last Welcome
        self.epoch = 0
        self.models: dict[str, str] = {}  # model -> state; empty while there is no connection
        self.connection: Connection | None = None  # a welcomed one
        self._role = role
        self._wiring = wiring
        self._over = asyncio.Event()
        self._said = ""

    async def keep(self) -> None:
        """Connect again and again until cancelled: at once after one that lasted, else with back-off."""
        clock, delay = self._wiring.clock, 0.0
        while True:
            began = clock.now()
            reason = await self._attempt()
            lasted = clock.now() - began >= RETRY_CAP  # retrying at once cannot become a storm
            delay = 0.0 if lasted else min(RETRY_CAP, max(RETRY_FIRST, 2 * delay))
            self._say_why_down(reason)
            if delay:
                await clock.sleep(delay * self._wiring.jitter.uniform(0.5, 1.0))

    def _say_why_down(self, reason: str) -> None:
        """Once for each reason in a row: a process that is away for an hour is one line."""
        if reason != self._said:
            self._said = reason
            log.info("wire_link_down", address=str(self.address), scheduler=self.scheduler, reason=reason)

    async def _attempt(self) -> str:
        """One connection from its beginning to its end; the reason of the end."""
        wiring = self._wiring
        self._over.clear()
        try:
            connection = await dial(
                self.address, self, transport=wiring.transport, clock=wiring.clock, name=wiring.name, role=self._role
            )
        except (OSError, WireError) as error:
            return str(error)
        try:
            await self._over.wait()
        finally:
            connection.abort("this process is leaving")
            await self._over.wait()
        return connection.closed_because or ""

    def cut(self, reason: str) -> None:
        """End the present connection; nothing that it still carries is listened to."""
        if self.connection is not None:
            self.connection.abort(reason)

    # --- WelcomedHandler ---

    def on_welcome(self, connection: Connection, welcome: Welcome) -> None:
        if not self._wiring.epochs.admit(self, welcome):
            connection.abort(f"epoch {welcome.epoch} of {welcome.scheduler} is superseded")
            return
        self.connection = connection
        self.scheduler, self.epoch, self.models = welcome.scheduler, welcome.epoch, welcome.models
        self._said = ""
        log.info("wire_link_up", address=str(self.address), scheduler=self.scheduler, epoch=self.epoch)

    @abstractmethod
    def on_message(self, message: AnyMessage) -> None: ...

    def on_closed(self, reason: str) -> None:
        self.connection = None
        self.models = {}
        self._wiring.epochs.leave(self)
        self._over.set()
        self.on_lost(reason)

    @abstractmethod
    def on_lost(self, reason: str) -> None: ...


L = TypeVar("L", bound=Link)


class Roster(Generic[L]):
    """The links to all listed addresses. `addresses` is cheap and does not raise."""

    def __init__(
        self, addresses: Callable[[], Iterable[Address]], make_link: Callable[[Address], L], clock: Clock
    ) -> None:
        self.links: dict[Address, L] = {}
        self._addresses = addresses
        self._make_link = make_link
        self._clock = clock
        self._keepers: dict[Address, asyncio.Task[None]] = {}

    async def keep(self) -> None:
        """Follow the list until cancelled; then every link is closed."""
        try:
            while True:
                listed = set(self._addresses())
                for address in listed - self.links.keys():
                    self._add(address)
                await self._drop(self.links.keys() - listed)
                await self._clock.sleep(RELIST)
        finally:
            await self._drop(set(self.links))

    def _add(self, address: Address) -> None:
        link = self._make_link(address)
        self.links[address] = link
        keeper = asyncio.create_task(link.keep(), name=f"wire-link-{address}")
        keeper.add_done_callback(report_death)
        self._keepers[address] = keeper

    async def _drop(self, addresses: Iterable[Address]) -> None:
        keepers = []
        for address in list(addresses):
            del self.links[address]
            keeper = self._keepers.pop(address)
            keeper.cancel()
            keepers.append(keeper)
        if keepers:
            await asyncio.wait(keepers)


def report_death(task: asyncio.Task[None]) -> None:
    """A task that must run until it is cancelled has ended by an error: that is a defect, and is said aloud."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("wire_task_died", task=task.get_name(), exc_info=error)
