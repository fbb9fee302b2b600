"""What goes to the web processes: everything of one engine step for one connection in one frame.

The first event of a step schedules one flush behind everything that is ready on the loop, so that all requests of the
step have spoken before it runs. A flush first makes the step durable (one journal append, one spool commit), then
hands one frame to each connection. It never waits for a socket: a connection that cannot take the frame is closed by
the transport, which ends its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from scheduler.wire import messages
from scheduler.worker.flight import Flight

Event = messages.Accepted | messages.Refused | messages.Delta | messages.Done | messages.Failed


class Connection(Protocol):
    """What the worker needs from one end of the wire. `send` answers False once the connection is closed."""

    def send(self, message: messages.AnyMessage) -> bool: ...


class Session:
    """One web connection: its requests that are alive, and the events that wait for the next flush."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.flights: dict[str, Flight] = {}
        self.pending: list[Event] = []
        self.open = True


class Outbox:
    """The events of all connections between two flushes."""

    def __init__(self, make_durable: Callable[[], None]) -> None:
        self._make_durable = make_durable
        self._waiting: dict[Session, None] = {}  # an ordered set
        self._scheduled = False

    def put(self, session: Session, event: Event) -> None:
        """Queue an event; to a connection that is gone, nothing."""
        if session.open:
            session.pending.append(event)
            self._waiting[session] = None
        self.touch()

    def touch(self) -> None:
        """There is something to make durable, whether or not anybody is told."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Make durable, then tell."""
        self._scheduled = False
        self._make_durable()
        sessions, self._waiting = self._waiting, {}
        for session in sessions:
            events, session.pending = session.pending, []
            if session.open:
                session.connection.send(messages.Events(tuple(events)))
