"""Old rows of the ledger go, in whole months, in batches that nobody waits for.

A month is **closed** when MONTHS whole months have passed since it ended: late usage has come in, and what was wrong
has been found. Only rows of closed months are removed. Adjustments and the audit log stay for good.

Months end at different instants on different clocks, so that the border lies where the first kept month begins on the
earliest of them: what is kept is whole in every time zone.

A run moves the border (`begin`), which is on record before the first row goes, and then removes in transactions of its
own what lies before it (`remove_batch`). A run that is killed leaves a border and rows before it; the next one goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from django.db import connection, transaction

from .audit import Act, record
from .models import Retention, UsageRecord
from .models.change import lock
from .models.retention import ONLY_ROW, kept_since

MONTHS = 3  # at least kept, besides the one that runs
EARLIEST_CLOCK = timedelta(hours=14)  # before UTC: where a month begins first
LATEST_CLOCK = timedelta(hours=12)  # after UTC: where it ends last
BATCH = 1_000  # rows of one transaction
ALL_ITS_TIME = float("inf")


def border(months: int, now: datetime) -> datetime:
    """The instant before which rows go if `months` whole months are kept besides the one that runs at `now`.

    Raises ValueError for fewer than MONTHS.
    """
    if months < MONTHS:
        raise ValueError(f"At least {MONTHS} whole months are kept.")
    runs = (now - LATEST_CLOCK).astimezone(UTC)
    first = runs.year * 12 + runs.month - 1 - months  # of the kept months, counted from the year 0
    return datetime(first // 12, first % 12 + 1, 1, tzinfo=UTC) - EARLIEST_CLOCK


def remove_old(
    months: int,
    now: datetime,
    act: Act,
    *,
    most_seconds: float = ALL_ITS_TIME,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Remove what is older than `months` whole months; how many rows that were. What is left when it has worked for
    `most_seconds` is the next run's.

    Between two batches it stands back as long as one took: on a database with one writer, others get their turn.
    Raises ValueError for fewer months than MONTHS.
    """
    begin(border(months, now), act)
    began, removed = clock(), 0
    while clock() - began < most_seconds:
        started = clock()
        gone = remove_batch()
        removed += gone
        if gone < BATCH:
            break
        pause(clock() - started)
    return removed


def begin(before: datetime, act: Act) -> None:
    """Move the border on to `before`. It never moves back: what was removed stays removed."""
    if (held := kept_since()) is not None and held >= before:
        return
    with transaction.atomic():
        lock()
        held = kept_since()
        if held is not None and held >= before:
            return
        Retention.objects.update_or_create(pk=ONLY_ROW, defaults={"kept_since": before})
        record(
            act.actor,
            "retention.begin",
            "usage",
            before={"kept_since": None if held is None else held.isoformat()},
            after={"kept_since": before.isoformat()},
            reason=act.reason,
            source_ip=act.source_ip,
        )


def remove_batch() -> int:
    """Remove the oldest rows before the border, at most BATCH of them, in one transaction; how many that were."""
    old = f"SELECT id FROM {_LEDGER} WHERE arrived_at < %s ORDER BY arrived_at LIMIT %s"  # noqa: S608 - our table
    with transaction.atomic():
        if not (row := Retention.objects.select_for_update().filter(pk=ONLY_ROW).first()):
            return 0
        _release(True)
        with connection.cursor() as cursor:
            before = connection.ops.adapt_datetimefield_value(row.kept_since)
            cursor.execute(f"DELETE FROM {_LEDGER} WHERE id IN ({old})", [before, BATCH])  # noqa: S608
            removed = cursor.rowcount
        _release(False)
    return int(removed)


def _release(removing: bool) -> None:
    """Tell the guard of the ledger. Until the transaction ends nobody else sees it, and then it is taken back."""
    Retention.objects.filter(pk=ONLY_ROW).update(removing=removing)


_LEDGER = UsageRecord._meta.db_table
