"""The two ends of a conversation: `serve` for the scheduler, `dial` for the web.

Web says Hello, the scheduler says Welcome; then each side hands its messages to a handler, synchronously, in the order
they came. A handler must not block: it is called from the read path of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from scheduler.clock import Clock
from scheduler.wire.connection import OUTBOX, REQUEST_OUTBOX, Connection
from scheduler.wire.messages import AnyMessage, Goodbye, Hello, Welcome
from scheduler.wire.transport import Address, Listener, Transport

REQUESTS = "requests"
TELEMETRY = "telemetry"
ROLES = (REQUESTS, TELEMETRY)
MAX_CONNECTIONS = 256  # web processes times roles, with room
LAST_WORDS = 1.0  # seconds in which a peer must take what is queued when the server closes


class Handler(Protocol):
    """What a conversation does on this side. `on_closed` comes once, after the last message."""

    def on_message(self, message: AnyMessage) -> None: ...

    def on_closed(self, reason: str) -> None: ...


class WelcomedHandler(Handler, Protocol):
    """The dialling side's: `on_welcome` comes before any message, and not at all if the peer refuses."""

    def on_welcome(self, connection: Connection, welcome: Welcome) -> None: ...


HandlerFactory = Callable[[Connection, Hello], Handler]


async def dial(
    address: Address, handler: WelcomedHandler, *, transport: Transport, clock: Clock, name: str, role: str
) -> Connection:
    """Connect as `name` and say Hello; what follows goes to `handler`, whose `on_closed` then always comes.

    Raises OSError or WireError when there is no connection; `handler` is then not called.
    """
    caller = _Caller(handler, Hello(peer=name, role=role))
    await transport.connect(
        address,
        lambda: Connection(
            clock,
            on_open=caller.open,
            on_message=caller.greeted,
            on_closed=handler.on_closed,
            outbox=REQUEST_OUTBOX,
        ),
    )
    return caller.connection


class _Caller:
    """The dialling side until it is welcomed."""

    connection: Connection  # from `open` on

    def __init__(self, handler: WelcomedHandler, hello: Hello) -> None:
        self._handler = handler
        self._hello = hello

    def open(self, connection: Connection) -> None:
        self.connection = connection
        connection.send(self._hello)

    def greeted(self, message: AnyMessage) -> None:
        if isinstance(message, Welcome):
            self.connection.on_message = self._handler.on_message
            self._handler.on_welcome(self.connection, message)
        else:
            said = message.reason if isinstance(message, Goodbye) else f"it said {type(message).__name__}"
            self.connection.close(f"not welcome: {said}")


async def serve(
    address: Address,
    handler_factory: HandlerFactory,
    *,
    welcome: Callable[[], Welcome],
    transport: Transport,
    clock: Clock,
    outbox: int = OUTBOX,
) -> Server:
    """Listen; each peer that says Hello is welcomed, then `handler_factory(connection, hello)` takes its messages.

    `welcome` is asked at each Hello, so that it speaks of the models as they are then. Raises AddressError.
    """
    server = Server(handler_factory, welcome, clock, outbox)
    server.listener = await transport.listen(address, server.accept)
    return server


class Server:
    """The listening side: who is connected now, and how to stop."""

    listener: Listener

    def __init__(
        self, handler_factory: HandlerFactory, welcome: Callable[[], Welcome], clock: Clock, outbox: int
    ) -> None:
        self.connections: dict[Connection, Hello] = {}  # those that were welcomed
        self._handler_factory = handler_factory
        self._welcome = welcome
        self._clock = clock
        self._outbox = outbox
        self._callers: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def address(self) -> Address:
        """Where it really listens."""
        return self.listener.address

    def accept(self) -> Connection:
        """A connection for a caller who has not said Hello yet."""
        guest = _Guest(self)
        return Connection(
            self._clock, on_open=guest.open, on_message=guest.greet, on_closed=guest.gone, outbox=self._outbox
        )

    def broadcast(self, message: AnyMessage, role: str = REQUESTS) -> None:
        """Send to every welcomed peer of that role."""
        for connection, hello in list(self.connections.items()):
            if hello.role == role:
                connection.send(message)

    async def aclose(self, reason: str = "shutting down", within: float = LAST_WORDS) -> None:
        """Stop listening, hand over what is queued, close every connection; returns when all are. Idempotent."""
        await self.listener.aclose()
        for connection in list(self._callers):
            connection.close(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._empty.wait()
        for connection in list(self._callers):
            connection.abort(reason)
        await self._empty.wait()

    # --- the door, used by _Guest ---

    def enter(self, connection: Connection) -> None:
        self._callers.add(connection)
        self._empty.clear()
        if len(self._callers) > MAX_CONNECTIONS:
            self.refuse(connection, f"there are {MAX_CONNECTIONS} connections already")

    def admit(self, connection: Connection, hello: Hello) -> None:
        if hello.role not in ROLES:
            self.refuse(connection, f"the role {hello.role!r} is unknown")
            return
        self.connections[connection] = hello
        connection.send(self._welcome())
        handler = self._handler_factory(connection, hello)
        connection.on_message = handler.on_message
        connection.on_closed = lambda reason: self._leave(connection, handler, reason)

    def refuse(self, connection: Connection, reason: str) -> None:
        connection.send(Goodbye(reason))
        connection.close(reason)

    def forget(self, connection: Connection) -> None:
        self._callers.discard(connection)
        self.connections.pop(connection, None)
        if not self._callers:
            self._empty.set()

    def _leave(self, connection: Connection, handler: Handler, reason: str) -> None:
        self.forget(connection)
        handler.on_closed(reason)


class _Guest:
    """A caller before its Hello."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def open(self, connection: Connection) -> None:
        self._connection = connection
        self._server.enter(connection)

    def greet(self, message: AnyMessage) -> None:
        if isinstance(message, Hello):
            self._server.admit(self._connection, message)
        else:
            self._server.refuse(self._connection, f"say Hello first, not {type(message).__name__}")

    def gone(self, reason: str) -> None:
        self._server.forget(self._connection)
