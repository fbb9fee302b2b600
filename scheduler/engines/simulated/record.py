"""What the simulated engine did, in an append-only file that outlives the process.

`<data dir>/simulated/<model>.jsonl` has a line for each change of a request (the request as it is now) and one for
each step that made tokens (the numbers of the requests that made one). What happens between two steps is written at
once, what a step does with one write after its tokens have been handed over. A file of MAX_BYTES is kept as
`<model>.old.jsonl`, and the requests that are still open go on in a new one.

Instants are Unix seconds. Steps count from 1; `received_step` and `aborted_step` are the last step that had ended
then, `started_step` and `ended_step` the step that did it. A request that is aborted while the engine steps is thus
freed within one step if `ended_step - aborted_step` is at most 1.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

MAX_BYTES = 64 * 1024 * 1024

logger = logging.getLogger(__name__)


class Entry(msgspec.Struct, omit_defaults=True):
    """One request. `outcome`: stop, length, fail, aborted, or engine_dead (by its own fault or another's)."""

    number: int
    id: str
    received: float
    received_step: int
    started: float | None = None
    started_step: int | None = None
    tokens: int = 0
    aborted: float | None = None
    aborted_step: int | None = None
    ended: float | None = None
    ended_step: int | None = None
    outcome: str | None = None


class StepLine(msgspec.Struct):
    """One step: the numbers of the requests that made a token in it."""

    step: int
    at: float
    made: list[int]


class RunLine(msgspec.Struct):
    """An engine was started: the numbers after this line are its own."""

    run: str
    at: float


def record_path(data_dir: Path, model: str) -> Path:
    """The file of a model; any model name makes a single file name."""
    return data_dir / "simulated" / f"{quote(model, safe='')}.jsonl"


class Record:
    """The writer. A disk that refuses a write ends the record, with one line in the log, not the engine."""

    def __init__(self, path: Path, model: str, at: float, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._run = RunLine(model, at)
        self._max_bytes = max_bytes
        self._encoder = msgspec.json.Encoder()
        self._pending: list[bytes] = []
        self._open: dict[str, Entry] = {}
        self._count = 0
        self._fd: int | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open_file()

    def received(self, request_id: str, at: float, step: int, tokens: int = 0) -> None:
        """`tokens`: what an earlier run of the request has made."""
        self._count += 1
        entry = self._open[request_id] = Entry(self._count, request_id, at, step, tokens=tokens)
        self._write(entry)
        self.flush()

    def started(self, request_id: str, at: float, step: int) -> None:
        entry = self._open[request_id]
        entry.started, entry.started_step = at, step
        self._write(entry)

    def made(self, request_ids: Iterable[str], at: float, step: int) -> None:
        """One token more for each of these."""
        entries = [self._open[request_id] for request_id in request_ids]
        for entry in entries:
            entry.tokens += 1
        if entries:
            self._write(StepLine(step, at, [entry.number for entry in entries]))

    def aborted(self, request_id: str, at: float, step: int) -> None:
        entry = self._open[request_id]
        entry.aborted, entry.aborted_step = at, step
        self._write(entry)
        self.flush()

    def ended(self, request_id: str, at: float, step: int, outcome: str) -> None:
        entry = self._open.pop(request_id)
        entry.ended, entry.ended_step, entry.outcome = at, step, outcome
        self._write(entry)

    def flush(self) -> None:
        """One write of everything since the last one."""
        lines, self._pending = b"".join(self._pending), []
        if self._fd is None or not lines:
            return
        try:
            os.write(self._fd, lines)
            if os.fstat(self._fd).st_size >= self._max_bytes:
                self._turn_over()
        except OSError as error:
            logger.warning("the record of the simulated engine ends here: %s", error)
            self.close()

    def close(self) -> None:
        """Idempotent. What is pending is written first."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):  # the disk that ended the record may refuse this too
            os.write(fd, b"".join(self._pending))
        os.close(fd)

    def _write(self, line: Entry | StepLine) -> None:
        self._pending.append(self._encoder.encode(line) + b"\n")

    def _open_file(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        # The line before may be torn by a kill; a newline ends it.
        os.write(self._fd, b"\n" + self._encoder.encode(self._run) + b"\n")

    def _turn_over(self) -> None:
        assert self._fd is not None
        os.close(self._fd)
        self._fd = None
        self._path.replace(self._path.with_suffix(".old.jsonl"))
        self._open_file()
        for entry in self._open.values():
            self._write(entry)


def read_record(data_dir: Path, request_id: str) -> dict[str, Any] | None:
    """What the simulated engines of this data directory did with a request; None if they never got it.

    Reads files of up to MAX_BYTES: call it off the event loop.
    """
    files = sorted((data_dir / "simulated").glob("*.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        found = _find(path, request_id)
        if found is not None:
            model, entry = found
            fields = {name: getattr(entry, name) for name in Entry.__struct_fields__ if name != "number"}
            return {"model": model, **fields}
    return None


def _find(path: Path, request_id: str) -> tuple[str, Entry] | None:
    """The last state of the request in one file, with the model's name."""
    needle = b'"id":' + msgspec.json.encode(request_id)
    model, owner, entry = "", "", None
    alive = False  # the engine that wrote `entry` is the one whose lines we read
    for raw in _lines(path):
        if raw.startswith(b'{"run"'):
            model, alive = msgspec.json.decode(raw, type=RunLine).run, False
        elif needle in raw:
            entry, owner, alive = msgspec.json.decode(raw, type=Entry), model, True
        elif entry is not None and alive and entry.ended is None and raw.startswith(b'{"step"'):
            entry.tokens += msgspec.json.decode(raw, type=StepLine).made.count(entry.number)
    return None if entry is None else (owner, entry)


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of the file. One that a kill tore is left out."""
    with path.open("rb") as file:
        for raw in file:
            if raw.endswith(b"}\n") and raw.startswith(b"{"):
                yield raw
