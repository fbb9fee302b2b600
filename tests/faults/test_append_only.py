"""What is written once stays as it is on either database, and retention is gone on with after a SIGKILL."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.faults import postgres
from tests.journey.product import ROOT

OLD, NEW = 15_000, 50
FILL = f"""
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from tenants.models import UsageRecord
from tenants.audit import record
from tests.tenants.test_ledger import ROW
from tenants.ledger import FIELDS
made = {{name: getattr(ROW, name) for name in FIELDS}}
def rows(count, arrived_at, name):
    for number in range(count):
        changes = {{"request_id": f"{{name}}-{{number}}", "arrived_at": arrived_at + timedelta(seconds=number)}}
        yield UsageRecord(**(made | changes))
UsageRecord.objects.bulk_create(rows({OLD}, datetime(2020, 1, 1, tzinfo=UTC), "old"), batch_size=5000)
UsageRecord.objects.bulk_create(rows({NEW}, datetime.now(UTC), "new"))
"""
CREDIT = ("--amount=-1", "--currency=USD", "--from=2026-08-01T00:00:00Z", "--until=2026-09-01T00:00:00Z")
TENANT = """
from tenants.models import Tenant, Tier
Tenant.objects.create(slug="acme", name="Acme", tier=Tier.objects.create(name="vip"))
"""
PATIENCE = 120.0  # seconds, on a busy machine
TABLES = ("tenants_usagerecord", "tenants_adjustment", "tenants_auditevent")
Refused = (sqlite3.IntegrityError, psycopg.errors.RestrictViolation)


class Database:
    """A migrated one with a ledger that has rows of six years ago and of today, an adjustment, and its audit event."""

    def __init__(self, data_dir: Path, url: str) -> None:
        self._data_dir = data_dir
        self.url = url
        for arguments in (("migrate", "--skip-checks", "-v0"), ("shell", "-v0", "-c", TENANT + FILL)):
            self.manage(*arguments)
        self.manage("adjust", "--tenant=acme", "--reason=an outage", *CREDIT)

    def manage(self, *arguments: str) -> str:
        done = subprocess.run(**self._command(arguments), check=False, timeout=PATIENCE, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(**self._command(arguments), stdout=subprocess.DEVNULL)

    def execute(self, statement: str) -> Any:
        """In a transaction of its own; the first row of what it answers, if it answers any."""
        with closing(self._connect()) as connection, connection:
            cursor = connection.execute(statement)
            return cursor.fetchone() if cursor.description else None

    def count(self, table: str = TABLES[0]) -> int:
        return int(self.execute(f"SELECT COUNT(*) FROM {table}")[0])

    def _connect(self) -> Any:
        if self.url:
            return psycopg.connect(self.url)
        return sqlite3.connect(self._data_dir / "harness.sqlite3", timeout=30)

    def _command(self, arguments: tuple[str, ...]) -> dict[str, Any]:
        environment = {**os.environ, "HARNESS_DATA_DIR": str(self._data_dir)}
        if self.url:
            environment["HARNESS_DATABASE_URL"] = self.url
        return {"args": [sys.executable, str(ROOT / "manage.py"), *arguments], "env": environment, "text": True}


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Iterator[Database]:
    with ExitStack() as open_now:
        url = ""
        if request.param == "postgresql":
            if reason := postgres.missing():
                pytest.skip(reason)
            url = open_now.enter_context(postgres.running()).url
        folder = open_now.enter_context(tempfile.TemporaryDirectory(prefix="hl-", dir="/tmp"))
        yield Database(Path(folder), url)


def test_no_statement_changes_or_removes_a_row(database: Database) -> None:
    for table in TABLES:
        before = database.count(table)
        assert before > 0
        statements = [f"UPDATE {table} SET id = id", f"DELETE FROM {table}"]
        for statement in (*statements, *([f"TRUNCATE {table}"] if database.url else [])):
            with pytest.raises(Refused):
                database.execute(statement)
        assert database.count(table) == before


def test_retention_that_is_killed_leaves_the_guard_shut_and_is_gone_on_with(database: Database) -> None:
    """FR-071."""
    process = database.start("retention", "--months=24")
    deadline = time.monotonic() + PATIENCE
    while database.count() == OLD + NEW:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    assert NEW < database.count() < OLD + NEW
    with pytest.raises(Refused):
        database.execute("DELETE FROM tenants_usagerecord WHERE arrived_at < '2021-01-01'")
    left = database.count()
    assert database.manage("retention", "--months=24").startswith(f"{left - NEW} rows are removed")
    assert database.execute("SELECT COUNT(*), MIN(request_id) FROM tenants_usagerecord") == (NEW, "new-0")
    assert database.count("tenants_adjustment") == 1
