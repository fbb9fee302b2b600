"""Periods of budgets: the tenant's calendar, whatever its clock does."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.models import Limit
from tenants.periods import Calendar, period_of

KINDS = [kind for kind in Limit.Period.values if kind != "total"]
ZONES = [
    "UTC",
    "Asia/Tokyo",
    "America/Los_Angeles",
    "Europe/Berlin",
    "Australia/Lord_Howe",  # moves by half an hour
    "Asia/Kathmandu",  # 45 minutes off
    "America/Havana",  # goes back over midnight
    "Asia/Beirut",  # skips midnight
    "Pacific/Apia",  # has skipped a day
]
INSTANTS = st.floats(datetime(1990, 1, 1).timestamp(), datetime(2037, 1, 1).timestamp())


def unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def shown(kind: str, zone: str, at: str) -> tuple[str, str]:
    """Both borders as UTC."""
    period = period_of(kind, zone, unix(at))
    assert period.ends is not None
    first, after = (datetime.fromtimestamp(border, UTC) for border in (period.starts, period.ends))
    return f"{first:%Y-%m-%dT%H:%MZ}", f"{after:%Y-%m-%dT%H:%MZ}"


@pytest.mark.parametrize(
    ("kind", "zone", "at", "first", "after"),
    [
        ("month", "Asia/Tokyo", "2026-07-31T14:59:59Z", "2026-06-30T15:00Z", "2026-07-31T15:00Z"),
        ("month", "Asia/Tokyo", "2026-07-31T15:00:00Z", "2026-07-31T15:00Z", "2026-08-31T15:00Z"),
        ("month", "America/Los_Angeles", "2026-08-01T06:59:59Z", "2026-07-01T07:00Z", "2026-08-01T07:00Z"),
        ("month", "UTC", "2026-12-31T23:59:59Z", "2026-12-01T00:00Z", "2027-01-01T00:00Z"),
        ("week", "UTC", "2026-11-29T12:00:00Z", "2026-11-23T00:00Z", "2026-11-30T00:00Z"),
        ("day", "Europe/Berlin", "2026-03-29T12:00:00Z", "2026-03-28T23:00Z", "2026-03-29T22:00Z"),  # 23 hours
        ("day", "Europe/Berlin", "2026-10-25T12:00:00Z", "2026-10-24T22:00Z", "2026-10-25T23:00Z"),  # 25 hours
        ("hour", "Asia/Kathmandu", "2026-07-01T12:00:00Z", "2026-07-01T11:15Z", "2026-07-01T12:15Z"),
        ("hour", "Australia/Lord_Howe", "2026-04-04T15:10:00Z", "2026-04-04T14:00Z", "2026-04-04T15:30Z"),
        ("minute", "Asia/Kathmandu", "2026-07-01T12:00:59Z", "2026-07-01T12:00Z", "2026-07-01T12:01Z"),
    ],
)
def test_a_period_is_the_one_of_the_tenants_calendar(kind: str, zone: str, at: str, first: str, after: str) -> None:
    assert shown(kind, zone, at) == (first, after)


def test_the_whole_time_is_one_period_without_an_end() -> None:
    assert period_of("total", "Asia/Tokyo", unix("2026-07-31T14:59:59Z")) == (0, None)


@given(st.sampled_from(KINDS), st.sampled_from(ZONES), INSTANTS)
def test_every_instant_is_in_exactly_one_period(kind: str, zone: str, at: float) -> None:
    """The period holds the instant, both its ends are in the period and the next one begins where it ends."""
    period = period_of(kind, zone, at)
    assert period.ends is not None
    assert period.starts <= at < period.ends
    assert period_of(kind, zone, period.starts) == period == period_of(kind, zone, period.ends - 1)
    assert period_of(kind, zone, period.ends).starts == period.ends
    assert period_of(kind, zone, period.starts - 1).ends == period.starts


@given(st.sampled_from(["hour", "day", "week", "month"]), st.sampled_from(ZONES), INSTANTS)
def test_a_period_begins_where_the_tenants_clock_shows_its_border(kind: str, zone: str, at: float) -> None:
    """No earlier instant of the same local day, hour, week or month is left out."""
    first = datetime.fromtimestamp(period_of(kind, zone, at).starts, ZoneInfo(zone))
    before = datetime.fromtimestamp(period_of(kind, zone, at).starts - 1, ZoneInfo(zone))
    assert before.date() != first.date() or (kind == "hour" and first.minute == first.second == 0)


def test_a_calendar_answers_like_the_rule_itself() -> None:
    calendar = Calendar()
    for at in (0.0, 59.9, 60.0, 3_599.0, 90_000.0, 3_600.0, 10.0):
        for kind in Limit.Period.values:
            assert calendar.find(kind, "Asia/Kathmandu", at) == period_of(kind, "Asia/Kathmandu", at)


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="'year' is not a period"):
        period_of("year", "UTC", 0.0)
