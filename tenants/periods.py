"""Where the periods of budgets begin and end, in the time zone of their tenant.

A period is a calendar one: it begins at an instant at which the tenant's clock shows its border. Where a clock is put
forward or back, a day has 23 or 25 hours and no instant belongs to two periods or to none.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

HOUR = 3600
SMALL = {"minute": 60, "hour": HOUR}  # seconds


class Period(NamedTuple):
    """In Unix seconds, the start included and the end not. `ends` None: never (the period `total`)."""

    starts: int
    ends: int | None


TOTAL = Period(0, None)


class Calendar:
    """Answers which period an instant is in; remembers the last one of each kind, which is almost always the answer."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Period] = {}

    def find(self, period: str, zone: str, at: float) -> Period:
        """`period` as in `Limit.Period`; `at` in Unix seconds."""
        found = self._last.get((period, zone))
        if found is None or at < found.starts or (found.ends is not None and at >= found.ends):
            found = self._last[(period, zone)] = period_of(period, zone, at)
        return found


def period_of(period: str, zone: str, at: float) -> Period:
    """The period that holds `at` (Unix seconds). Raises ValueError for a kind of period that does not exist."""
    if period == "total":
        return TOTAL
    clock = _zone(zone)
    if period in SMALL:
        return _small(SMALL[period], clock, int(at // 1))
    today = datetime.fromtimestamp(at, clock).date()
    match period:
        case "day":
            first, after = today, today + timedelta(days=1)
        case "week":
            first = today - timedelta(days=today.weekday())
            after = first + timedelta(days=7)
        case "month":
            first = today.replace(day=1)
            after = (first + timedelta(days=32)).replace(day=1)
        case _:
            raise ValueError(f"{period!r} is not a period")
    return Period(_midnight(first, clock), _midnight(after, clock))


def _midnight(day: date, clock: ZoneInfo) -> int:
    """The first instant of the day; where the clock skips midnight, the instant at which it does so."""
    return int(datetime(day.year, day.month, day.day, tzinfo=clock).timestamp())


def _small(length: int, clock: ZoneInfo, at: int) -> Period:
    """Borders are where the clock shows a whole minute or hour, also if it has been moved by half an hour meanwhile."""
    starts = at - _past(length, clock, at)
    while past := _past(length, clock, starts):
        starts -= past
    ends = starts + length
    while past := _past(length, clock, ends):
        ends += length - past
    return Period(starts, ends)


def _past(length: int, clock: ZoneInfo, at: int) -> int:
    """Seconds that the clock shows past the last border."""
    offset = datetime.fromtimestamp(at, UTC).astimezone(clock).utcoffset()
    assert offset is not None  # the clock has a zone
    return (at + int(offset.total_seconds())) % length


@lru_cache(maxsize=1024)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
