"""Usage reports: whatever is asked for, it sums to the ledger."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import sync_to_async
from django.http import StreamingHttpResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenants import reports
from tenants.api.base import attachment
from tenants.exports import csv_lines
from tenants.ledger import UsageRow, record_usage
from tenants.models import UsageRecord
from tenants.periods import period_of
from tenants.reports import GROUPS, SUMS, WIDTHS, Span, Totals, buckets, totals

from .test_ledger import ROW

ZONES = [
    "UTC",
    "Asia/Kolkata",
    "Asia/Kathmandu",
    "America/Los_Angeles",
    "America/St_Johns",
    "America/Havana",  # the clock goes back over midnight
    "Asia/Beirut",  # and forward over it
    "Africa/Casablanca",
    "Europe/Berlin",
    "Australia/Lord_Howe",  # by half an hour
    "Pacific/Chatham",
]
FIRST, LAST = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)
ROWS = 1_000

pytestmark = pytest.mark.django_db


def unix(at: datetime) -> int:
    return int(at.timestamp())


def day(zone: str, year: int, month: int, date: int) -> tuple[int, int]:
    local = datetime(year, month, date, tzinfo=ZoneInfo(zone))
    return unix(local), unix(local + timedelta(days=1))


def use(*rows: UsageRow) -> None:
    record_usage([replace(row, request_id=f"r{number}") for number, row in enumerate(rows)])


def used(at: str, tokens: int, **changes: Any) -> UsageRow:
    instant = datetime.fromisoformat(at)
    charge = Decimal(tokens).scaleb(-3)
    return replace(ROW, arrived_at=instant, prompt_tokens=tokens, completion_tokens=0, charge=charge, **changes)


def tokens(start: int, end: int, zone: str = "UTC", width: str = "1d") -> list[int]:
    """Of each bucket in which there are any."""
    found = buckets(UsageRecord.objects.all(), Span(start, end, width, zone))
    return [sum(one.input_tokens for one in bucket.groups.values()) for bucket in found]


@pytest.fixture
def year(db: None) -> list[UsageRow]:
    """A year of random usage, thick where clocks change, at the last microsecond of a second as well."""
    dice = random.Random(7)
    changes = [period_of("day", zone, at).starts for zone in ZONES for at in _changes(zone)]
    made = []
    for number in range(ROWS):
        at = FIRST + (LAST - FIRST) * dice.random()
        if number % 3 == 0:
            at = datetime.fromtimestamp(dice.choice(changes) + 900 * dice.randint(-8, 104), UTC)
        if number % 5 == 0:
            at = at.replace(microsecond=999_999)
        tenant, key = dice.randint(1, 3), dice.randint(1, 2)
        priced = dice.random() < 0.8
        made.append(
            replace(
                ROW,
                request_id=f"r{number}",
                tenant_id=str(tenant),
                tenant_slug=f"t{tenant}",
                key_id=f"{tenant}{key}",
                key_name=f"k{key}",
                project=dice.choice(["", "search"]),
                tier=dice.choice(["vip", "free"]),
                model=dice.choice(["a", "b"]),
                prompt_tokens=dice.randint(0, 1000),
                cached_tokens=dice.randint(0, 10),
                completion_tokens=dice.randint(0, 1000),
                engine_seconds=dice.random(),
                arrived_at=at,
                charge=Decimal(dice.randint(0, 10**9)).scaleb(-10) if priced else None,
                currency=dice.choice(["USD", "EUR"]) if priced else "",
            )
        )
    record_usage(made)
    return made


def _changes(zone: str) -> list[float]:
    """Noons of the days of 2026 that are not 24 hours long."""
    noons = [(FIRST + timedelta(days=number, hours=12)).timestamp() for number in range(365)]
    periods = [(noon, period_of("day", zone, noon)) for noon in noons]
    return [noon for noon, (start, end) in periods if end is not None and end - start != 86_400]


def expected(rows: list[UsageRow], span: Span) -> dict[tuple[str, ...], Totals]:
    """The same sums, one row at a time."""
    sums: dict[tuple[str, ...], Totals] = {}
    for row in rows:
        if span.start <= row.arrived_at.timestamp() < span.end:
            group = tuple(str(getattr(row, column)) for column in span.columns.values())
            sums.setdefault(group, Totals()).add(
                {
                    "input_tokens": row.prompt_tokens,
                    "cached_tokens": row.cached_tokens,
                    "output_tokens": row.completion_tokens,
                    "reasoning_tokens": 0,
                    "num_requests": 1,
                    "engine_seconds": row.engine_seconds,
                    "cost": row.charge,
                }
            )
    return sums


def assert_same(mine: dict[tuple[str, ...], Totals], theirs: dict[tuple[str, ...], Totals]) -> None:
    assert mine.keys() == theirs.keys()
    for group, one in mine.items():
        for name in SUMS:
            value, other = getattr(one, name), getattr(theirs[group], name)
            assert value == pytest.approx(other, rel=1e-9) if name == "engine_seconds" else value == other


seconds_of_the_year = st.integers(unix(FIRST) - 100_000, unix(LAST) + 100_000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    zone=st.sampled_from(ZONES),
    width=st.sampled_from(list(WIDTHS)),
    group_by=st.lists(st.sampled_from(list(GROUPS)), unique=True).map(tuple),
    ends=st.tuples(seconds_of_the_year, seconds_of_the_year).map(sorted),
)
def test_every_grouping_and_width_sums_to_the_ledger(
    year: list[UsageRow], zone: str, width: str, group_by: tuple[str, ...], ends: list[int]
) -> None:
    """FR-067. Buckets are in order, apart, on the clock's borders, and each holds exactly the rows of its time."""
    span = Span(ends[0], ends[1], width, zone, group_by)
    found = list(buckets(UsageRecord.objects.all(), span))
    assert_same(totals(UsageRecord.objects.all(), span), expected(year, span))
    before = span.start
    for bucket in found:
        assert before <= bucket.start < bucket.end <= span.end
        whole = period_of(WIDTHS[width][0], zone, bucket.start)
        assert bucket.start == max(whole.starts, span.start)
        assert whole.ends is not None and bucket.end == min(whole.ends, span.end)
        assert_same(bucket.groups, expected(year, replace(span, start=bucket.start, end=bucket.end)))
        before = bucket.end


@pytest.mark.usefixtures("year")
def test_a_report_that_is_read_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    span = Span(unix(FIRST), unix(LAST), "1d", "Europe/Berlin", ("model",))
    at_once = list(buckets(UsageRecord.objects.all(), span))
    monkeypatch.setattr(reports, "MOST_BUCKETS", 2)
    assert list(buckets(UsageRecord.objects.all(), span)) == at_once
    second = at_once[1]
    assert next(buckets(UsageRecord.objects.all(), replace(span, start=second.start))) == second


class TestLocalDays:
    """FR-067."""

    def test_kolkata(self) -> None:
        use(used("2026-05-11T18:00:00+00:00", 10), used("2026-05-11T19:00:00+00:00", 10))
        zone = "Asia/Kolkata"  # 23:30 of the 11th and 00:30 of the 12th
        assert tokens(*day(zone, 2026, 5, 11), zone) == [10]
        assert tokens(*day(zone, 2026, 5, 12), zone) == [10]
        both = day(zone, 2026, 5, 11)[0], day(zone, 2026, 5, 12)[1]
        assert tokens(*both, zone) == [10, 10]

    def test_los_angeles(self) -> None:
        use(
            used("2026-05-11T18:00:00+00:00", 10),
            used("2026-05-11T19:00:00+00:00", 10),
            used("2026-08-06T03:00:00+00:00", 5),
        )
        zone = "America/Los_Angeles"
        assert tokens(*day(zone, 2026, 5, 11), zone) == [20]
        now = datetime(2026, 8, 6, 4, 30, tzinfo=UTC).timestamp()
        assert reports.today(zone, now) == day(zone, 2026, 8, 5)
        assert tokens(*reports.today(zone, now), zone) == [5]

    @pytest.mark.parametrize(("zone", "parts"), [("Asia/Kathmandu", [10, 10]), ("UTC", [20])])
    def test_quarter_hours(self, zone: str, parts: list[int]) -> None:
        use(used("2026-05-11T18:00:00+00:00", 10), used("2026-05-11T19:00:00+00:00", 10))  # 23:45, 00:45
        assert tokens(day(zone, 2026, 5, 11)[0], day(zone, 2026, 5, 12)[1], zone) == parts

    def test_an_hour_that_comes_twice_is_two_buckets(self) -> None:
        use(used("2026-10-25T00:30:00+00:00", 1), used("2026-10-25T01:30:00+00:00", 2))  # 02:30 and 02:30 in Berlin
        assert tokens(*day("Europe/Berlin", 2026, 10, 25), "Europe/Berlin", "1h") == [1, 2]


class TestHistory:
    """FR-069."""

    @staticmethod
    def august() -> dict[tuple[str, ...], Totals]:
        span = Span(unix(datetime(2026, 8, 1, tzinfo=UTC)), unix(datetime(2026, 9, 1, tzinfo=UTC)), "1d", "UTC")
        return totals(UsageRecord.objects.all(), replace(span, group_by=("model",)))

    def test_names_that_change_keep_their_old_label_and_cost(self) -> None:
        use(used("2026-08-20T23:59:59+00:00", 1000, model="old"), used("2026-08-21T00:00:00+00:00", 800, model="new"))
        assert {group: one.cost for group, one in self.august().items()} == {
            ("old", "USD"): Decimal("1"),
            ("new", "USD"): Decimal("0.8"),
        }

    def test_currencies_are_never_added_and_no_price_is_no_cost(self) -> None:
        use(
            used("2026-08-20T12:00:00+00:00", 1000),
            used("2026-08-20T12:00:01+00:00", 2000, currency="EUR"),
            replace(used("2026-08-20T12:00:02+00:00", 3000, currency=""), charge=None),
        )
        assert [(group[-1], one.cost) for group, one in sorted(self.august().items())] == [
            ("", None),
            ("EUR", Decimal(2)),
            ("USD", Decimal(1)),
        ]


@pytest.mark.usefixtures("year")
def test_records_are_all_rows_in_order_whatever_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = reports.between(UsageRecord.objects.all(), unix(FIRST), unix(LAST))
    whole = list(reports.records(rows))
    assert [row[0] for row in whole] == sorted(row[0] for row in whole)
    assert len(whole) == len({row[1] for row in whole}) == UsageRecord.objects.filter(arrived_at__lt=LAST).count()
    monkeypatch.setattr(reports, "PAGE", 7)
    assert list(reports.records(rows)) == whole


@pytest.mark.usefixtures("year")
def test_an_export_has_what_was_there_when_it_began() -> None:
    """FR-071."""
    rows, count = reports.as_of_now(UsageRecord.objects.all())
    lines = csv_lines(list(reports.RECORD), reports.records(rows), count)
    next(lines)
    record_usage([replace(ROW, request_id="late", arrived_at=LAST)])
    assert len(list(lines)) == count == ROWS


def test_an_export_needs_no_more_memory_for_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-071."""
    monkeypatch.setattr(reports, "PAGE", 500)
    rows = [
        replace(ROW, request_id=f"r{number}", arrived_at=FIRST + timedelta(seconds=number)) for number in range(9_000)
    ]
    record_usage(rows[:3_000])
    few = peak_of_export()
    record_usage(rows[3_000:])
    assert peak_of_export() < few * 1.3


@pytest.mark.django_db(transaction=True)
async def test_five_exports_at_once_are_whole_and_one_that_is_cut_off_never_looks_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FR-071: and none of them needs memory for more than a few pages."""
    monkeypatch.setattr(reports, "PAGE", 500)
    count = 6_000
    await sync_to_async(record_usage)([replace(ROW, request_id=f"r{number}") for number in range(count)])
    tracemalloc.start()
    *whole, cut = await asyncio.gather(*(download() for _ in range(5)), download(parts=2))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert whole == [(count, "0")] * 5
    assert cut[0] < count and cut[1] != "0"
    assert peak < 20 * 2**20  # the texts together have twice as much


async def download(parts: int | None = None) -> tuple[int, str]:
    """Rows of an export of everything, of which only so many parts are read; and what its last row says is left."""

    def begin() -> StreamingHttpResponse:
        found, count = reports.as_of_now(UsageRecord.objects.all())
        lines = csv_lines(list(reports.RECORD), reports.records(found), count)
        return attachment(lines, count, "text/csv", "usage.csv")

    response = await sync_to_async(begin)()
    lines, last, number = -1, b"", 0  # the header is no row
    async for part in response.streaming_content:  # type: ignore[attr-defined]
        lines, last, number = lines + part.count(b"\r\n"), part, number + 1
        if number == parts:
            break
    return lines, last.decode().rstrip().rpartition(",")[2]


def peak_of_export() -> int:
    """Bytes."""
    tracemalloc.start()
    rows, count = reports.as_of_now(UsageRecord.objects.all())
    lines = csv_lines(list(reports.RECORD), reports.records(rows), count)
    assert sum(len(line) for line in lines) > 100_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak
