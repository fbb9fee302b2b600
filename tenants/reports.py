"""What was used: sums of the ledger by time and by who used what. Nothing is computed but sums.

A request belongs to the bucket of its arrival, as it belongs to the budget period and to the price of its arrival. A
bucket is a period of a clock (`tenants/periods.py`): days and hours are the time zone's, 23 or 25 hours long where its
clock is put forward or back. Costs are the charges that the rows were written with; a price that changes later changes
no report. What has no price has no cost, and amounts of different currencies are never added.

The database sums by slots of one length, which is exact while the clock keeps its distance to UTC: each stretch
between two changes of the clock is one query, and slots of one bucket are put together here. A query reads rows of at
most `MOST_SECONDS`, whatever the report spans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

from django.db.models import BigIntegerField, Count, F, Func, Max, Min, QuerySet, Sum

from .exports import Cell
from .models import Adjustment, UsageRecord
from .periods import HOUR, Calendar

DAY = 24 * HOUR
MOST_SECONDS = 31 * DAY
MOST_BUCKETS = 500  # of one query

WIDTHS = {"1m": ("minute", 60), "1h": ("hour", HOUR), "1d": ("day", DAY)}
# The ledger has names as they were: a tenant, key or model that was renamed or removed keeps its old one here. A key's
# name says nothing without its tenant, so the id comes along.
GROUPS: dict[str, dict[str, str]] = {
    "tenant": {"tenant": "tenant_slug"},
    "key": {"key": "key_name", "key_id": "key_id"},
    "project": {"project": "project"},
    "model": {"model": "model"},
    "tier": {"tier": "tier"},
}
ADJUSTED = {"tenant": "tenant_slug", "model": "model"}  # what of that an adjustment has
SUMS = {
    "input_tokens": Sum("prompt_tokens"),
    "cached_tokens": Sum("cached_tokens"),
    "output_tokens": Sum("completion_tokens"),
    "reasoning_tokens": Sum("reasoning_tokens"),
    "num_requests": Count("pk"),
    "engine_seconds": Sum("engine_seconds"),
    "cost": Sum("charge"),
}

# What an invoice is made of, in order: the field of the ledger by the name it has outside. The arrival is the first.
RECORD = {
    "arrived_at": "arrived_at",
    "request_id": "request_id",
    "attempt": "attempt",
    "tenant": "tenant_slug",
    "key": "key_name",
    "key_id": "key_id",
    "project": "project",
    "tier": "tier",
    "model": "model",
    "status": "status",
    "finish_reason": "finish_reason",
    "reason": "reason",
    "stream": "stream",
    "input_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "output_tokens": "completion_tokens",
    "reasoning_tokens": "reasoning_tokens",
    "dispatched_at": "dispatched_at",
    "first_token_at": "first_token_at",
    "ended_at": "ended_at",
    "attained": "attained",
    "miss_reason": "miss_reason",
    "batch_id": "batch_id",
    "engine_seconds": "engine_seconds",
    "policy_version": "policy_version",
    "price_id": "price_id",
    "cost": "charge",
    "currency": "currency",
}
PAGE = 2_000  # records in memory at a time

Group = tuple[str, ...]  # the values of the report's columns, in their order


@dataclass(frozen=True, slots=True)
class Span:
    """What a report is about: `[start, end)` in Unix seconds, in buckets of a clock, by groups."""

    start: int
    end: int
    width: str = "1d"
    zone: str = "UTC"
    group_by: tuple[str, ...] = ()

    @property
    def columns(self) -> dict[str, str]:
        """The fields of the ledger to group by, by the names that reports give them. Currencies are kept apart."""
        named = {name: column for group in self.group_by for name, column in GROUPS[group].items()}
        return named | {"currency": "currency"}


@dataclass(slots=True)
class Totals:
    """Sums of rows; `cost` is None where nothing had a price. Engine time is in seconds."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    num_requests: int = 0
    engine_seconds: float = 0.0
    cost: Decimal | None = None

    def add(self, sums: dict[str, Any]) -> None:
        for name in SUMS:
            mine, more = getattr(self, name), sums[name]
            if more is not None:
                setattr(self, name, more if mine is None else mine + more)


@dataclass(frozen=True, slots=True)
class Bucket:
    """`[start, end)` in Unix seconds, cut to the report's span, and the sums of each group that has any."""

    start: int
    end: int
    groups: dict[Group, Totals] = field(default_factory=dict)


class Slot(Func):
    """The number of the slot of `width` seconds that an instant falls into, on a clock `offset` seconds before UTC."""

    arity = 1
    output_field = BigIntegerField()
    template = "(FLOOR(EXTRACT(EPOCH FROM %(expressions)s))::bigint + %(offset)s) / %(width)s"

    def as_sqlite(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        # Without the fraction, which strftime would round up.
        seconds = "CAST(strftime('%%%%s', substr(%(expressions)s, 1, 19)) AS INTEGER)"
        return self.as_sql(compiler, connection, template=f"({seconds} + %(offset)s) / %(width)s", **extra)


def buckets(rows: QuerySet[UsageRecord], span: Span) -> Iterator[Bucket]:
    """The buckets of `span` in which anything was used, in order of time. Reads as far as it is asked."""
    calendar = Calendar()
    period, width = WIDTHS[span.width]
    since = span.start
    while (first := _first_arrival(rows, since, span.end)) is not None:
        starts = max(since, calendar.find(period, span.zone, first).starts)
        # The last bucket of a query is a whole one: none is in two queries.
        until = calendar.find(period, span.zone, starts + min(MOST_SECONDS, MOST_BUCKETS * width)).starts
        since = min(until, span.end)
        yield from _sums(rows, span, starts, since, calendar)


def totals(rows: QuerySet[UsageRecord], span: Span) -> dict[Group, Totals]:
    """The sums of the whole span, by group."""
    whole: dict[Group, Totals] = {}
    for bucket in buckets(rows, span):
        for group, sums in bucket.groups.items():
            whole.setdefault(group, Totals()).add({name: getattr(sums, name) for name in SUMS})
    return whole


def today(zone: str, now: float) -> tuple[int, int]:
    """The day that the zone's clock shows, `[start, end)` in Unix seconds."""
    day = Calendar().find("day", zone, now)
    assert day.ends is not None  # only `total` never ends
    return day.starts, day.ends


def as_of_now(rows: QuerySet[UsageRecord]) -> tuple[QuerySet[UsageRecord], int]:
    """The rows that there are, without those that come while they are read, and their number."""
    there = rows.order_by().aggregate(newest=Max("pk"), count=Count("pk"))
    return rows.filter(pk__lte=there["newest"] or 0), there["count"]


def records(rows: QuerySet[UsageRecord]) -> Iterator[tuple[Cell, ...]]:
    """The rows themselves, in order of arrival, as RECORD names them; read PAGE at a time."""
    ordered = rows.order_by("arrived_at", "pk").values_list(*RECORD.values(), "pk")
    page = list(ordered[:PAGE])
    while page:
        yield from (row[:-1] for row in page)
        arrived_at, pk = page[-1][0], page[-1][-1]
        page = list(ordered.filter(arrived_at__gte=arrived_at).exclude(arrived_at=arrived_at, pk__lte=pk)[:PAGE])


def adjustments(
    rows: QuerySet[Adjustment], start: int, end: int, group_by: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Sums of what was entered in `[start, end)`, in Unix seconds: by currency, and by tenant and model as asked.

    An adjustment belongs to the time at which it was made, and not to that of the usage that it is about: no report
    that has been read before changes.
    """
    columns = {name: ADJUSTED[name] for name in group_by if name in ADJUSTED} | {"currency": "currency"}
    entered = rows.filter(at__gte=_instant(start), at__lt=_instant(end)).order_by(*columns.values())
    for sums in entered.values(*columns.values()).annotate(total=Sum("amount"), entries=Count("pk")):
        named = {name: sums[column] for name, column in columns.items()}
        yield named | {"amount": sums["total"], "num_adjustments": sums["entries"]}


def between(rows: QuerySet[UsageRecord], start: int, end: int) -> QuerySet[UsageRecord]:
    """Of `rows` those that arrived in `[start, end)`, in Unix seconds."""
    return rows.filter(arrived_at__gte=_instant(start), arrived_at__lt=_instant(end))


# --- details --------------------------------------------------------------------------------------------------------


def _first_arrival(rows: QuerySet[UsageRecord], start: int, end: int) -> float | None:
    if start >= end:
        return None
    first: datetime | None = between(rows, start, end).order_by().aggregate(first=Min("arrived_at"))["first"]
    return None if first is None else first.timestamp()


def _sums(rows: QuerySet[UsageRecord], span: Span, start: int, end: int, calendar: Calendar) -> Iterator[Bucket]:
    """The buckets of one reading."""
    period, width = WIDTHS[span.width]
    columns = span.columns
    found: dict[int, Bucket] = {}
    for since, until, offset in _stretches(start, end, span.zone):
        slots = (
            between(rows, since, until)
            .order_by()
            .annotate(slot=Slot("arrived_at", offset=offset, width=width))
            .values("slot", **{f"by_{name}": F(column) for name, column in columns.items()})
            .annotate(**{f"sum_{name}": expression for name, expression in SUMS.items()})
        )
        for slot in slots.iterator():
            whole = calendar.find(period, span.zone, max(slot["slot"] * width - offset, since))
            assert whole.ends is not None  # only `total` never ends
            bucket = found.get(whole.starts)
            if bucket is None:
                bucket = found[whole.starts] = Bucket(max(whole.starts, span.start), min(whole.ends, span.end))
            group = tuple(slot[f"by_{name}"] for name in columns)
            bucket.groups.setdefault(group, Totals()).add({name: slot[f"sum_{name}"] for name in SUMS})
    for starts in sorted(found):
        groups = found[starts].groups
        yield Bucket(found[starts].start, found[starts].end, {group: groups[group] for group in sorted(groups)})


def _stretches(start: int, end: int, zone: str) -> Iterator[tuple[int, int, int]]:
    """`[start, end)` cut where the zone's clock changes: start, end, and the seconds it is before UTC."""
    clock = ZoneInfo(zone)
    borders = [start]
    # No zone changes its clock twice in a day.
    for since, until in pairwise([*range(start, end, DAY), end]):
        if (before := _offset(clock, since)) != _offset(clock, until):
            borders.append(_change(clock, since, until, before))
    for since, until in pairwise([*borders, end]):
        if since < until:
            yield since, until, _offset(clock, since)


def _change(clock: ZoneInfo, since: int, until: int, before: int) -> int:
    """The first second in `[since, until]` at which the clock's distance to UTC is not `before` any more."""
    return bisect_left(range(until + 1), True, lo=since, key=lambda at: _offset(clock, at) != before)


def _offset(clock: ZoneInfo, at: int) -> int:
    offset = datetime.fromtimestamp(at, clock).utcoffset()
    assert offset is not None  # the clock has a zone
    return int(offset.total_seconds())


def _instant(unix: int) -> datetime:
    return datetime.fromtimestamp(unix, UTC)
