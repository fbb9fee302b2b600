"""The progress journal: how far each running request has come, so that a killed process can still be billed exactly.

An append-only binary file of fixed-size records; the last whole record of a request wins. All progress of one flush
goes out in a single `write`. A torn tail (the process died inside the write) is ignored; a record whose checksum is
wrong ends the file, and if it is the first, the file is not one of this version. When the file has grown past its bound
it is replaced by one that holds only the running requests.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_BODY = struct.Struct("<QIIddd")  # serial, tokens, cached tokens, first token, last token, engine time
_RECORD = struct.Struct("<QIIdddI")  # the body and its CRC-32
MAX_BYTES = 16 * 1024 * 1024


class JournalError(Exception):
    """The journal cannot be written (disk full, file gone), or was written by another version."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens delivered to this process so far; first and last token in seconds after dispatch.

    `engine_seconds`: the engine time that the request has been charged up to here. `cached_tokens`: those of the prompt
    that the engine had not to compute.
    """

    tokens: int
    first_token: float
    last_token: float
    engine_seconds: float = 0.0
    cached_tokens: int = 0


Entry = tuple[int, Progress]  # the intent's serial and its progress


class Journal:
    """The one writer of a journal file. Serials start at 1; 0 is nobody's.

    `power_loss`: an append also survives a power cut. It then waits for the disk.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, power_loss: bool = False) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._power_loss = power_loss
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        if power_loss:
            _sync_folder(path.parent)

    @property
    def is_long(self) -> bool:
        return self._size > self._max_bytes

    def append(self, entries: Iterable[Entry]) -> None:
        """Write all entries at once. Raises JournalError; a part that got through is taken back."""
        data = _encode(entries)
        try:
            written = os.write(self._fd, data)
            if written != len(data):
                os.ftruncate(self._fd, self._size)
                raise JournalError(f"{self.path.name}: the disk took {written} of {len(data)} bytes")
            if self._power_loss:
                os.fdatasync(self._fd)
        except OSError as error:
            raise JournalError(f"{self.path.name}: {error.strerror}") from error
        self._size += len(data)

    def probe(self) -> None:
        """Write a record of nobody, to see whether the disk takes it. Raises JournalError."""
        self.append([(0, Progress(0, 0.0, 0.0))])

    def compact(self, running: Iterable[Entry]) -> None:
        """Replace the file by one that holds only `running`; the old one stays valid until the new one is complete."""
        scratch = self.path.with_suffix(".new")
        try:
            fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{scratch.name}: {error.strerror}") from error
        data = _encode(running)
        try:
            if os.write(fd, data) != len(data):
                raise JournalError(f"{scratch.name}: the disk is full")
            if self._power_loss:
                os.fsync(fd)
            scratch.replace(self.path)
            if self._power_loss:
                _sync_folder(self.path.parent)
        except (OSError, JournalError) as error:
            os.close(fd)
            raise JournalError(str(error)) from error
        os.close(self._fd)
        self._fd, self._size = fd, len(data)

    def close(self) -> None:
        os.close(self._fd)


def _sync_folder(folder: Path) -> None:
    """Make the names in it survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _encode(entries: Iterable[Entry]) -> bytes:
    out = bytearray()
    for serial, progress in entries:
        counts = (progress.tokens, progress.cached_tokens)
        body = _BODY.pack(serial, *counts, progress.first_token, progress.last_token, progress.engine_seconds)
        out += body
        out += zlib.crc32(body).to_bytes(4, "little")
    return bytes(out)


def read(path: Path) -> dict[int, Progress]:
    """The last progress of each serial in a journal that nobody writes to. A missing file is an empty one.

    Raises JournalError if not even its first record is one of this version: taken for empty, it would bill nothing.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    latest: dict[int, Progress] = {}
    whole = len(data) - len(data) % _RECORD.size
    for serial, tokens, cached, first, last, seconds, checksum in _RECORD.iter_unpack(data[:whole]):
        if checksum != zlib.crc32(_BODY.pack(serial, tokens, cached, first, last, seconds)):
            if not latest:
                raise JournalError(f"{path.name}: not in the format of this version")
            break
        latest[serial] = Progress(tokens, first, last, seconds, cached)
    return latest
