"""Messages to bytes and back.

    frame := length (4 bytes, big-endian, counts what follows) · PROTOCOL (1 byte) · msgpack of one message

Every frame carries the version, so that a peer of another release is recognised by its first five bytes and never by
a puzzling decoding error. The length is checked before anything is buffered.

Errors:

    WireError
    ├── MessageTooLargeError  a message of ours that must not be sent
    ├── CodecError            what was received is not a message; the connection cannot go on
    │   └── VersionError      the peer speaks another PROTOCOL
    └── AddressError          `transport.py`: an address that cannot be listened on or reached as asked
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from scheduler.wire.messages import MAX_FRAME, PROTOCOL, AnyMessage

_HEADER = struct.Struct("!IB")
HEADER_SIZE = _HEADER.size
_VERSION_SIZE = 1  # the version byte is counted by the length


class WireError(Exception):
    """Root of what the wire raises."""


class MessageTooLargeError(WireError):
    def __init__(self, size: int) -> None:
        super().__init__(f"A message of {size} bytes is over the limit of {MAX_FRAME}.")
        self.size = size


class CodecError(WireError):
    """The bytes are not a message of ours."""


class VersionError(CodecError):
    def __init__(self, theirs: int) -> None:
        super().__init__(f"The peer speaks protocol {theirs}, this process protocol {PROTOCOL}.")
        self.theirs = theirs


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_into(message: AnyMessage, buffer: bytearray) -> None:
    """Append the frame of `message` to `buffer`.

    Raises MessageTooLargeError, or TypeError for a value that msgpack has no form for; the buffer is then as it was.
    """
    start = len(buffer)
    try:
        _encoder.encode_into(message, buffer, start + HEADER_SIZE)
        size = len(buffer) - start - HEADER_SIZE + _VERSION_SIZE
        if size > MAX_FRAME:
            raise MessageTooLargeError(size)
    except BaseException:
        del buffer[start:]  # frames before this one are good and must stay readable
        raise
    _HEADER.pack_into(buffer, start, size, PROTOCOL)


class FrameDecoder:
    """Bytes in, in whatever pieces they arrive; messages out, in order."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._wanted = 0  # bytes in `_pending` before it is worth looking again

    def feed(self, data: bytes) -> Iterator[AnyMessage]:
        """The messages that `data` completes; must be iterated to the end, or the decoder be given up.

        Raises CodecError at the first bad frame, after yielding the good ones before it.
        """
        if self._pending:
            self._pending += data
            if len(self._pending) < self._wanted:
                return
            view, self._pending = memoryview(self._pending), bytearray()
        else:
            view = memoryview(data)
        start = 0
        while (end := self._frame_end(view, start)) <= len(view):
            yield _decode(view[start + HEADER_SIZE : end])
            start = end
        self._pending += view[start:]
        self._wanted = end - start

    def _frame_end(self, view: memoryview, start: int) -> int:
        """Where the frame at `start` ends, or its header while that is incomplete."""
        if len(view) - start < HEADER_SIZE:
            return start + HEADER_SIZE
        size, version = _HEADER.unpack_from(view, start)
        if version != PROTOCOL:
            raise VersionError(version)
        if size > MAX_FRAME:
            raise CodecError(f"A frame of {size} bytes is over the limit of {MAX_FRAME}.")
        return start + HEADER_SIZE - _VERSION_SIZE + int(size)


def _decode(payload: memoryview) -> AnyMessage:
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CodecError(f"A frame of {len(payload)} bytes is not a message: {error}") from error
