"""A long ledger: exports of it, one and five at a time, and retention that removes a third of it while usage comes in.

rows     exported a second; the first byte of the first export; what the process has grown by in memory
batch    the longest transaction of retention, which is the longest that anybody waits for it
write    the longest that a batch of new usage took to be written meanwhile, 50 rows a second
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING

import django
import psutil

from benchmarks.report import keep, show

if TYPE_CHECKING:
    from tenants.ledger import UsageRow

ROWS = 300_000
AT_ONCE = 5
ARRIVALS = 50  # rows a second that come in meanwhile
EVERY = 0.1  # seconds between two batches of them
NOW = datetime(2026, 8, 15, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Measured:
    rows: int
    first_byte: float  # seconds
    one_export: float  # rows a second
    five_exports: float  # rows a second, of all together
    grown: float  # MiB
    removed: int
    removal: float  # rows a second
    longest_batch: float  # seconds
    longest_write: float  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory(prefix="hb-") as folder:
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "harness_web.settings",
            "HARNESS_DATA_DIR": folder,
            "HARNESS_LOG_LEVEL": "ERROR",
        }
        django.setup()
        found = measure(rows)
    columns = ["rows", "first byte, ms", "one export, rows/s", "five, rows/s", "grown, MiB"]
    columns += ["removed", "rows/s", "longest batch, ms", "longest write, ms"]
    values = [found.rows, found.first_byte * 1e3, found.one_export, found.five_exports, found.grown]
    values += [found.removed, found.removal, found.longest_batch * 1e3, found.longest_write * 1e3]
    show("A long ledger on SQLite", columns, [[f"{value:,.0f}" for value in values]])
    keep("ledger", asdict(found))


def measure(rows: int) -> Measured:
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    fill(rows)
    process = psutil.Process()
    before = process.memory_info().rss
    first_byte, seconds = export()
    began = time.perf_counter()
    at_once([export] * AT_ONCE)
    five = time.perf_counter() - began
    grown = (process.memory_info().rss - before) / 2**20
    removed, removing, longest_batch, longest_write = remove()
    return Measured(
        rows=rows,
        first_byte=first_byte,
        one_export=rows / seconds,
        five_exports=AT_ONCE * rows / five,
        grown=grown,
        removed=removed,
        removal=removed / removing,
        longest_batch=longest_batch,
        longest_write=longest_write,
    )


def fill(rows: int) -> None:
    """Over nine months until NOW, of twenty tenants."""
    from tenants.ledger import FIELDS
    from tenants.models import UsageRecord

    every = timedelta(days=270) / rows
    for start in range(0, rows, 10_000):
        made = (row(number, NOW - timedelta(days=270) + number * every) for number in range(start, start + 10_000))
        UsageRecord.objects.bulk_create(
            [UsageRecord(**{name: getattr(one, name) for name in FIELDS}) for one in made], batch_size=1_000
        )


def row(number: int, at: datetime) -> UsageRow:
    from tenants.ledger import UsageRow

    tenant = number % 20
    return UsageRow(
        request_id=f"req-{number}",
        tenant_id=f"{tenant}",
        tenant_slug=f"tenant-{tenant}",
        key_id=f"{tenant}",
        key_name="prod",
        tier="vip",
        model="demo",
        deployment="demo",
        status="finished",
        finish_reason="stop",
        prompt_tokens=1_000,
        completion_tokens=300,
        arrived_at=at,
        dispatched_at=at,
        ended_at=at,
        wait_time=0.1,
        compute_time=2.0,
        batch_id="demo-1.1-7",
        charge=Decimal("0.00038"),
        currency="USD",
    )


def export() -> tuple[float, float]:
    """One of everything, not kept: seconds to the first byte and to the last."""
    from django.db import connection

    from tenants import exports, reports
    from tenants.models import UsageRecord

    began = time.perf_counter()
    found, count = reports.as_of_now(UsageRecord.objects.all())
    lines = exports.csv_lines(list(reports.RECORD), reports.records(found), count)
    next(lines)
    first = time.perf_counter() - began
    assert sum(1 for _ in lines) == count
    connection.close()
    return first, time.perf_counter() - began


def at_once(work: Iterable[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def remove() -> tuple[int, float, float, float]:
    """Retention beside usage that comes in: rows removed, seconds, the longest batch and the longest write."""
    from tenants import retention
    from tenants.audit import Act

    done = threading.Event()
    writes: list[float] = []
    writer = threading.Thread(target=arrive, args=(done, writes))
    writer.start()
    batches: list[float] = []

    def stand_back(took: float) -> None:
        batches.append(took)
        time.sleep(took)

    began = time.perf_counter()
    removed = retention.remove_old(3, NOW, Act("benchmark"), pause=stand_back)
    seconds = time.perf_counter() - began
    done.set()
    writer.join()
    return removed, seconds, max(batches), max(writes)


def arrive(done: threading.Event, took: list[float]) -> None:
    """New usage, as the ledger takes it, until it is `done`."""
    from django.db import connection

    from tenants.ledger import record_usage

    number, count = 0, int(ARRIVALS * EVERY)
    while not done.wait(EVERY):
        began = time.perf_counter()
        fresh = [replace(row(0, NOW), request_id=f"new-{number + one}") for one in range(count)]
        record_usage(fresh)
        took.append(time.perf_counter() - began)
        number += count
    connection.close()


if __name__ == "__main__":
    main()
