"""Structured logs of every process: one line per event, JSON unless a person is looking.

    log = structlog.get_logger(__name__)
    log.info("dispatched", request_id=…)

Standard-library loggers (Django, uvicorn, Celery, engines) go through the same formatter. Prompts and keys are not
logged anywhere; that nothing of the shape of a key ever leaves is made sure of here, on the finished line.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

# The characters that a token may have, and no others: the line must stay the JSON it is.
_SECRETS = re.compile(
    r"(?<![0-9A-Za-z])sk-[0-9A-Za-z_-]{8,}"  # keys
    r"|(?<=[Bb]earer )[0-9A-Za-z._~+/=-]+"
    r"|(?<=/setup/)[0-9A-Za-z_-]{20,}"  # the first operator's link
)
REDACTED = "[redacted]"
# Servers and task runners that bring handlers of their own; their records come here instead.
FOREIGN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "celery", "celery.task", "django")
# Loggers whose everyday lines (each connection, each beat) would bury the rest.
CHATTY = ("uvicorn.access", "asyncio", "httpx", "celery.beat", "celery.worker.strategy", "celery.app.trace")
QUIET = dict.fromkeys(CHATTY, logging.WARNING)

EventDict = MutableMapping[str, Any]

_SHARED: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


class RedactingFormatter(structlog.stdlib.ProcessorFormatter):
    """The last guard: tracebacks and other people's messages pass here too."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def redact(text: str) -> str:
    return _SECRETS.sub(REDACTED, text)


def configure(options: dict[str, Any]) -> None:
    """Django's LOGGING_CONFIG. `options`: `level`, `format`, and `process`, the name in every JSON line."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    human = options["format"] == "console" or (options["format"] == "auto" and sys.stderr.isatty())
    handler.setFormatter(formatter(process=options["process"], human=human))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(options["level"])
    for name in FOREIGN:
        foreign = logging.getLogger(name)
        foreign.handlers = []
        foreign.propagate = True
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)


def formatter(*, process: str, human: bool) -> RedactingFormatter:
    """JSON lines for machines, coloured ones for a terminal. Tracebacks never show local variables."""

    def add_process(_logger: Any, _method: str, event: EventDict) -> EventDict:
        event["process"] = process
        return event

    tail: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if human:
        tail.append(structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback))
    else:
        tail += [add_process, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return RedactingFormatter(
        foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()],
        processors=tail,
    )
