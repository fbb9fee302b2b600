from __future__ import annotations

import pytest

from harness_web.openai.errors import TABLE, ApiError, envelope, error_headers
from harness_web.openai.headers import duration, rate_limits
from scheduler.core.types import Reason

# Reasons with which a request is never answered: why a head was held or dispatched, and a client that is gone.
UNANSWERED = {  # why a request runs, waits on or gives way: for traces and metrics, never an answer
    Reason.CLIENT_GONE,
    Reason.PREEMPTED,
    Reason.SLOTS_FULL,
    Reason.SLOTS_RESERVED,
    Reason.KV_FULL,
    Reason.WAIT_WINDOW,
    Reason.BATCH_RUNNING,
    Reason.BATCH_CLOSED,
    Reason.PREFILL_BUDGET,
    Reason.STREAM_PACE,
    Reason.LONG_LANE,
    Reason.RESERVATION,
    Reason.RANKED_BEHIND,
    Reason.ARRIVAL_ORDER,
    Reason.RANK_ORDER,
    Reason.DEADLINE_ORDER,
    Reason.FLOOR_GUARD,
    Reason.URGENT,
    Reason.FAIR_TURN,
    Reason.LATE_TURN,
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.12, "120ms"),
        (0.0001, "1ms"),
        (1, "1s"),
        (7.66, "7.66s"),
        (59.9999, "1m0s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (3605, "1h0m5s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_rate_limit_headers_are_integers_and_durations() -> None:
    limits = {"limit-requests": 600.0, "remaining-requests": 599.9, "reset-requests": 0.1, "remaining-tokens": -3.0}
    assert list(rate_limits(limits)) == [
        (b"x-ratelimit-limit-requests", b"600"),
        (b"x-ratelimit-remaining-requests", b"599"),
        (b"x-ratelimit-reset-requests", b"100ms"),
        (b"x-ratelimit-remaining-tokens", b"0"),
    ]


def test_every_reason_that_answers_a_caller_has_its_row() -> None:
    assert {reason.value for reason in Reason} - set(TABLE) == {reason.value for reason in UNANSWERED}


def test_only_what_can_succeed_by_itself_is_worth_a_retry() -> None:
    """FR-040."""
    for reason, shape in TABLE.items():
        headers = dict(error_headers(ApiError(reason, "x")))
        assert headers[b"x-should-retry"] == (b"true" if shape.retry else b"false")
        assert (b"retry-after" in headers) == shape.retry
        if 400 <= shape.status < 500 and shape.status not in (408, 429):
            assert not shape.retry


def test_retry_after_is_whole_seconds_and_never_too_early() -> None:
    headers = dict(error_headers(ApiError("limit_rpm", "x", retry_after=6.2)))
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (b"7", b"6200")


def test_the_envelope_has_all_four_keys_and_no_numbers() -> None:
    """FR-038."""
    assert envelope(ApiError("queue_full", "Full.")) == (
        b'{"error":{"message":"Full.","type":"service_unavailable_error","param":null,"code":"server_is_overloaded"}}'
    )
