"""The log of `harness up`: the lines of all children, prefixed, on one terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading

LOG_BACKLOG = 10_000  # lines that wait for a terminal that does not take them; more are dropped and counted
LINE_LIMIT = 64 * 1024  # bytes of one log line; a longer one is cut into several


class LogWriter:
    """Writes prefixed lines to a stream from a thread of its own: a terminal that stands still stops nobody."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._lines: queue.Queue[bytes | None] = queue.Queue(LOG_BACKLOG)
        self._dropped = 0
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
        loop = asyncio.get_running_loop()
        rest = b""

        def readable() -> None:
            nonlocal rest
            try:
                data = os.read(own, LINE_LIMIT)
            except BlockingIOError:
                return
            *lines, rest = (rest + data).split(b"\n")
            if rest and (not data or len(rest) > LINE_LIMIT):
                lines, rest = [*lines, rest], b""
            for line in lines:
                self.put(name, line)
            if not data:
                loop.remove_reader(own)
                os.close(own)

        loop.add_reader(own, readable)

    def close(self) -> None:
        """Write what is waiting, for at most a second."""
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
