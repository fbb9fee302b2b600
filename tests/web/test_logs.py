from __future__ import annotations

import json
import logging
import sys

import pytest
import structlog

from harness_web.logs import REDACTED, formatter, redact
from tenants.keys import mint


def line(record: logging.LogRecord) -> str:
    return formatter(process="web-1", human=False).format(record)


def test_a_line_of_anybodys_logger_is_json_with_the_process() -> None:
    record = logging.LogRecord("uvicorn.error", logging.WARNING, __file__, 1, "said %s", ("so",), None)
    written = json.loads(line(record))
    assert (written["event"], written["level"], written["logger"]) == ("said so", "warning", "uvicorn.error")
    assert written["process"] == "web-1"
    assert written["timestamp"].endswith("Z")


def test_keys_leave_by_no_way_not_even_in_a_traceback() -> None:
    """FR-004."""
    token = mint().token
    try:
        raise ValueError(f"bad header: Bearer {token}")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "key %s", (token,), sys.exc_info())
    for human in (False, True):
        written = formatter(process="web-1", human=human).format(record)
        assert token[3:] not in written
        assert written.count(REDACTED) == 2
        assert human or json.loads(written)["event"] == f"key {REDACTED}"
    assert redact("authorization: Bearer abc.def") == f"authorization: Bearer {REDACTED}"
    assert redact("Forbidden: /setup/0123456789abcdefghij/") == f"Forbidden: /setup/{REDACTED}/"
    assert redact("the task-scheduler asks sk-short") == "the task-scheduler asks sk-short"


def test_structured_events_go_through_the_standard_loggers(caplog: pytest.LogCaptureFixture) -> None:
    structlog.get_logger("harness.x").warning("dispatched", request_id="req_1")
    (record,) = caplog.records
    assert record.name == "harness.x"
    assert json.loads(line(record))["request_id"] == "req_1"
