"""The log of an engine that runs in processes of its own: one bounded file, for the engine and what it links.

Engine processes inherit the scheduler's stderr and write there what no operator should have to read: banners of
native libraries, stack traces of a start that failed. They are told, by the logging configuration they load first, to
write to a file instead; the scheduler reads the cause of a failed start from it.
"""

from __future__ import annotations

import json
import os
import re
from logging.handlers import RotatingFileHandler
from pathlib import Path

MAX_BYTES = 2 * 1024 * 1024  # twice that on disk, with the file before it


class EngineLog:
    """The log file of one model's engine and the logging configuration that leads to it, under `run_dir`."""

    def __init__(self, run_dir: Path, model: str) -> None:
        name = re.sub(r"[^\w.-]", "_", model)
        self.path = run_dir / f"engine-{name}.log"
        self.configuration = run_dir / f"engine-{name}.logging.json"

    def open(self, logger: str) -> None:
        """Start an empty log, and write the configuration that sends `logger` (WARNING and above) to it.

        Raises OSError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.write_text("")
        handler = {
            "()": f"{EngineLogHandler.__module__}.{EngineLogHandler.__qualname__}",
            "path": str(self.path),
            "owner": os.getpid(),
            "formatter": "line",
        }
        configuration = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"format": "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"}},
            "handlers": {"file": handler},
            "loggers": {logger: {"handlers": ["file"], "level": "WARNING", "propagate": False}},
        }
        self.configuration.write_text(json.dumps(configuration))

    def text(self) -> str:
        """What the engine has written since `open`; empty if it cannot be read."""
        try:
            return self.path.read_text(errors="replace")
        except OSError:
            return ""


class EngineLogHandler(RotatingFileHandler):
    """Writes to the engine's log; in any process but `owner`, stdout and stderr go there too."""

    def __init__(self, path: str, owner: int) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8")
        if os.getpid() != owner:
            assert self.stream is not None  # opened by the base class
            for descriptor in (1, 2):
                os.dup2(self.stream.fileno(), descriptor)
