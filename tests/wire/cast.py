"""The cast of the wire's tests: a scheduler's side, a web's side, and a raw peer that keeps no rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from scheduler.clock import ManualClock
from scheduler.wire.codec import FrameDecoder, encode_into
from scheduler.wire.connection import OUTBOX, Connection
from scheduler.wire.memory import MemoryTransport
from scheduler.wire.messages import (
    AnyMessage,
    Caller,
    Hello,
    Sampling,
    Submit,
    Welcome,
)
from scheduler.wire.session import REQUESTS, Server, dial, serve
from scheduler.wire.transport import Address, SocketTransport, Transport

PATIENCE = 10.0  # seconds a condition may take before the test fails
HELLO = Hello(peer="web-1", role=REQUESTS)


def frame(*messages: AnyMessage) -> bytes:
    buffer = bytearray()
    for message in messages:
        encode_into(message, buffer)
    return bytes(buffer)


def submit(request_id: str = "r1", model: str = "demo", text: str = "hello") -> Submit:
    caller = Caller(tenant="1", tenant_slug="acme", key="7", tier="vip")
    return Submit(
        request_id, 1, 0.0, caller, model, ({"role": "user", "content": text},), Sampling(max_tokens=8), stream=True
    )


T = TypeVar("T")


async def until(condition: Callable[[], T]) -> T:
    """Let the loop run until `condition` holds; its value. Bounded."""
    async with asyncio.timeout(PATIENCE):
        while not (value := condition()):
            await asyncio.sleep(0.001)
    return value


class Recorder:
    """A handler that keeps what it is told."""

    def __init__(self, connection: Connection | None = None, hello: Hello | None = None) -> None:
        self.connection = cast(Connection, connection)
        self.hello = hello
        self.welcome: Welcome | None = None
        self.messages: list[AnyMessage] = []
        self.closed: list[str] = []

    def on_welcome(self, connection: Connection, welcome: Welcome) -> None:
        self.connection, self.welcome = connection, welcome

    def on_message(self, message: AnyMessage) -> None:
        self.messages.append(message)

    def on_closed(self, reason: str) -> None:
        self.closed.append(reason)

    async def received(self, count: int) -> list[AnyMessage]:
        await until(lambda: len(self.messages) >= count)
        return self.messages


class RawPeer(asyncio.Protocol):
    """Says whatever bytes a test wants and answers nothing."""

    def __init__(self) -> None:
        self.transport = cast(asyncio.Transport, None)
        self.messages: list[AnyMessage] = []
        self.lost = False
        self._decoder = FrameDecoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.messages += self._decoder.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True

    def said(self, kind: type[T]) -> list[T]:
        """What of that kind this peer has been told."""
        return [message for message in self.messages if isinstance(message, kind)]


class Wire:
    """One carrier with a manual clock; remembers what to close."""

    def __init__(self, transport: Transport, address: Address) -> None:
        self.transport = transport
        self.address = address
        self.clock = ManualClock(100.0)
        self.models = {"demo": "ready"}
        self.epoch = 1
        self.sessions: list[Recorder] = []  # the scheduler's ends, in order of arrival
        self._servers: list[Server] = []
        self._raw: list[RawPeer] = []
        self._dialled: list[Recorder] = []

    async def serve(self, outbox: int = OUTBOX, factory: Any = None) -> Server:
        server = await serve(
            self.address,
            factory or self._session,
            welcome=lambda: Welcome("scheduler-1", self.epoch, dict(self.models)),
            transport=self.transport,
            clock=self.clock,
            outbox=outbox,
        )
        self._servers.append(server)
        self.address = server.address
        return server

    async def dial(self, role: str = REQUESTS) -> Recorder:
        recorder = Recorder()
        recorder.connection = await dial(
            self.address, recorder, transport=self.transport, clock=self.clock, name="web-1", role=role
        )
        self._dialled.append(recorder)
        return recorder

    async def pair(self, outbox: int = OUTBOX) -> tuple[Recorder, Recorder]:
        """A web's end and the scheduler's end of one conversation."""
        await self.serve(outbox)
        web = await self.dial()
        await until(lambda: web.welcome)
        return web, self.sessions[-1]

    async def standing_pair(self) -> tuple[Recorder, Recorder]:
        """The same pair at every call, for the examples of a property."""
        return (self._dialled[0], self.sessions[0]) if self._dialled else await self.pair()

    async def raw(self, data: bytes = b"") -> RawPeer:
        peer = RawPeer()
        await self.transport.connect(self.address, lambda: peer)
        self._raw.append(peer)
        peer.transport.write(data)
        return peer

    async def beat(self, seconds: float) -> None:
        """Let time pass in small steps, so that real sockets carry what is said meanwhile."""
        for _ in range(round(seconds / 0.25)):
            await self.clock.advance(0.25)

    async def aclose(self) -> None:
        for recorder in self._dialled:
            recorder.connection.abort("the test is over")
        for peer in self._raw:
            peer.transport.abort()
        for server in self._servers:
            await server.aclose("the test is over", within=0.1)
        await until(lambda: all(peer.lost for peer in self._raw))

    def _session(self, connection: Connection, hello: Hello) -> Recorder:
        self.sessions.append(Recorder(connection, hello))
        return self.sessions[-1]


def make_wire(carrier: str, folder: Path) -> Wire:
    if carrier == "memory":
        return Wire(MemoryTransport(), "scheduler")
    return Wire(SocketTransport(), folder / "run" / "scheduler.sock" if carrier == "unix" else "127.0.0.1:0")
