"""One connection, whatever carries its bytes: framing, a bounded outbox, heartbeats, exactly one end.

`send` never waits. Frames sent in one turn of the event loop leave in one write. What the peer has not taken yet is
counted; over the limit the connection is closed, because a peer that does not read must not cost memory or time.

Silence is counted in beats and not in elapsed time: a process that was itself stopped for ten seconds has missed one
beat, not ten, and finds its peers alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from scheduler.clock import Clock
from scheduler.wire.codec import CodecError, FrameDecoder, encode_into
from scheduler.wire.messages import MAX_FRAME, AnyMessage, Goodbye, Ping, Pong

BEAT = 0.5  # seconds between looks at the peer's silence
PING_AFTER = 2  # silent beats: 1 s
DEAD_AFTER = 10  # silent beats: 5 s
OUTBOX = 8 * 1024 * 1024  # bytes a peer may leave unread
# For the side that sends requests: it waits for `room` before each, so that the largest one always fits, and small
# messages may follow it.
REQUEST_OUTBOX = OUTBOX + MAX_FRAME + OUTBOX


class Connection(asyncio.Protocol):
    """A peer. `on_message` gets all but heartbeats; `on_closed` is called once, with the reason, as the last thing."""

    def __init__(
        self,
        clock: Clock,
        *,
        on_open: Callable[[Connection], None],
        on_message: Callable[[AnyMessage], None],
        on_closed: Callable[[str], None],
        outbox: int = OUTBOX,
    ) -> None:
        self.on_message = on_message
        self.on_closed = on_closed
        self.closed_because: str | None = None
        self._on_open = on_open
        self._clock = clock
        self._limit = outbox
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder()
        self._out = bytearray()
        self._flush_due = False
        self._paused = False
        self._room_waiters: list[asyncio.Future[None]] = []
        self._heard = False
        self._ping_seq = 0
        self._transport: asyncio.Transport | None = None
        self._heartbeat: asyncio.Task[None] | None = None

    @property
    def pending(self) -> int:
        """Bytes that were sent here and not yet taken by the operating system."""
        taken = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return len(self._out) + taken

    def send(self, message: AnyMessage) -> bool:
        """Queue a message. False: the connection is closed, or has just been because its outbox is full.

        Raises MessageTooLargeError or TypeError for a message that cannot be sent at all; the connection stays.
        """
        if self.closed_because is not None:
            return False
        encode_into(message, self._out)
        if self.pending > self._limit:
            self.abort("the outbox is full: the peer does not read")
            return False
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)
        return True

    async def room(self) -> bool:
        """Wait until the peer has taken most of what was sent before. False: the connection is closed."""
        while self.closed_because is None:
            self._flush()
            if not self._paused:
                return True
            waiter = self._loop.create_future()
            self._room_waiters.append(waiter)
            await waiter
        return False

    def close(self, reason: str) -> None:
        """Send what is queued, then close. A peer that does not take it is cut off by its silence."""
        if self.closed_because is not None:
            return
        self._flush()
        self._end(reason)
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once; what was not taken yet is lost."""
        self._end(reason)
        self._out = bytearray()
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        self.closed_because = self.closed_because or reason
        self._wake_waiters()

    def _flush(self) -> None:
        self._flush_due = False
        if self._transport is not None and self._transport.is_closing():
            return  # the peer has gone, which `connection_lost` is about to say; uvloop refuses the write
        if self._out and self._transport is not None:
            # The transport may keep the buffer, so it gets this one and the next frames go into a new one.
            out, self._out = self._out, bytearray()
            self._transport.write(out)

    def _wake_waiters(self) -> None:
        waiters, self._room_waiters = self._room_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _watch(self) -> None:
        """Ping a silent peer, give up a dead one."""
        silent = 0  # beats
        while silent < DEAD_AFTER:
            await self._clock.sleep(BEAT)
            silent = 0 if self._heard else silent + 1
            self._heard = False
            if silent and silent % PING_AFTER == 0:
                self._ping_seq += 1
                self.send(Ping(self._ping_seq))
        self.abort(f"silent for {DEAD_AFTER * BEAT:g} s")

    # --- asyncio.Protocol: called by the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=OUTBOX)
        self._heartbeat = self._loop.create_task(self._watch(), name="wire-heartbeat")
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            for message in self._decoder.feed(data):
                if self.closed_because is not None:
                    return
                self._handle(message)
        except CodecError as error:
            self.send(Goodbye(str(error)))
            self.close(str(error))

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, Ping):
            self.send(Pong(message.seq))
        elif not isinstance(message, Pong):
            self.on_message(message)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake_waiters()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        self._end(str(exc) if exc else "closed by the peer")
        self.on_closed(self.closed_because or "")
