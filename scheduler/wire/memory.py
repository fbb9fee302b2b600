"""Connections inside one event loop, for tests: the same interface and the same contract as stream sockets."""

from __future__ import annotations

import asyncio
from typing import Any

from scheduler.wire.transport import Address, AddressError, Listener, ProtocolFactory


class MemoryTransport:
    """Connections inside one event loop, with the faults that a network has: `freeze`, `cut`.

    Bytes arrive in the next turn of the loop. `freeze` keeps them from arriving, as a half-open connection does; what
    is written meanwhile piles up. `cut` ends all connections at once.
    """

    def __init__(self) -> None:
        self._factories: dict[Address, ProtocolFactory] = {}
        self._pipes: list[_Pipe] = []

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        if address in self._factories:
            raise AddressError(f"{address} is in use by another listener.")
        self._factories[address] = factory
        return _MemoryListener(self._factories, address)

    async def connect(self, address: Address, factory: ProtocolFactory) -> None:
        if address not in self._factories:
            raise ConnectionRefusedError(f"nobody listens on {address}")
        near, far = _Pipe(factory()), _Pipe(self._factories[address]())
        near.peer, far.peer = far, near
        self._pipes = [pipe for pipe in self._pipes if not pipe.is_closing()] + [near, far]
        far.protocol.connection_made(far)
        near.protocol.connection_made(near)

    def freeze(self) -> None:
        for pipe in self._pipes:
            pipe.frozen = True

    def thaw(self) -> None:
        for pipe in self._pipes:
            pipe.frozen = False
            pipe.schedule()

    def cut(self) -> None:
        for pipe in self._pipes:
            pipe.abort()


class _MemoryListener:
    def __init__(self, factories: dict[Address, ProtocolFactory], address: Address) -> None:
        self._factories = factories
        self.address: Address = address

    async def aclose(self) -> None:
        self._factories.pop(self.address, None)


class _Pipe(asyncio.Transport):
    """One end: what is written here is received by `peer`'s protocol."""

    peer: _Pipe

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.protocol = protocol
        self.frozen = False
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._high = 64 * 1024
        self._paused = False
        self._closing = False
        self._lost = False
        self._scheduled = False
        self._reading = True

    def write(self, data: Any) -> None:
        if self._closing:
            return
        self._buffer += data
        if len(self._buffer) > self._high and not self._paused:
            self._paused = True
            self.protocol.pause_writing()
        self.schedule()

    def schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        if self.frozen or self._lost or not self.peer._reading:
            return
        data, self._buffer = bytes(self._buffer), bytearray()
        if data and not self.peer.is_closing():
            self.peer.protocol.data_received(data)
        if self._paused:
            self._paused = False
            self.protocol.resume_writing()
        if self._closing:
            self.abort()

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self.peer.schedule()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = self._high if high is None else high

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True
        self.schedule()

    def abort(self) -> None:
        """Both ends are lost; the far one hears of it unless the link is frozen."""
        self._closing = True
        self._lose()
        if not self.frozen:
            self.peer._closing = True
            self.peer._lose()

    def _lose(self) -> None:
        if not self._lost:
            self._lost = True
            self._loop.call_soon(self.protocol.connection_lost, None)
