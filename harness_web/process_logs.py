"""The log of `harness up`: the lines of all children, prefixed, on one terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from functools import partial

LOG_BACKLOG = 10_000  # lines that wait for a terminal that does not take them; more are dropped and counted
LINE_LIMIT = 64 * 1024  # bytes of one log line; a longer one is cut into several


class _Source:
    """Cuts what comes out of a pipe into lines."""

    def __init__(self, pipe: int, put: Callable[[bytes], None]) -> None:
        self._pipe = pipe
        self._put = put
        self._rest = b""
        self.more = False  # there may be more to read at once

    def read(self) -> bool:
        """Read once; False at the end of the pipe."""
        try:
            data = os.read(self._pipe, LINE_LIMIT)
        except BlockingIOError:
            self.more = False
            return True
        self.more = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._put(line)
        if not data or len(self._rest) > LINE_LIMIT:
            self.finish()
        return bool(data)

    def finish(self) -> None:
        """Take what came after the last line end for a line."""
        rest, self._rest = self._rest, b""
        if rest:
            self._put(rest)


class LogWriter:
    """Writes prefixed lines to a stream from a thread of its own: a terminal that stands still stops nobody."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._lines: queue.Queue[bytes | None] = queue.Queue(LOG_BACKLOG)
        self._dropped = 0
        self._sources: list[_Source] = []
        self._thread = threading.Thread(target=self._write, name="log-writer", daemon=True)
        self._thread.start()

    def put(self, prefix: str, line: bytes) -> None:
        self.put_plain(b"%-10s | %s" % (prefix.encode(), line))

    def put_plain(self, line: bytes) -> None:
        try:
            self._lines.put_nowait(line + b"\n")
        except queue.Full:
            self._dropped += 1

    def forward(self, name: str, pipe: int) -> None:
        """Print what a child writes, line by line, until it and all who inherited its output are gone.

        Needs a running event loop. `pipe` is duplicated; the caller may close its own whenever it likes.
        """
        own = os.dup(pipe)
        os.set_blocking(own, False)
        source = _Source(own, partial(self.put, name))
        self._sources.append(source)
        loop = asyncio.get_running_loop()

        def readable() -> None:
            if not source.read():
                loop.remove_reader(own)
                self._sources.remove(source)
                os.close(own)

        loop.add_reader(own, readable)

    def close(self) -> None:
        """Take the children's last words and write what is waiting, for at most a second."""
        for source in self._sources:
            while source.read() and source.more:
                pass
            source.finish()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(timeout=1.0)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line = b"%d lines were dropped: the terminal did not take them\n" % dropped + line
            try:
                while line:
                    line = line[os.write(self._stream, line) :]
            except OSError:
                return  # nobody reads any more; the product goes on
