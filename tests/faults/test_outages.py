"""What the books need goes away for a while: the database, and the disk of the spool. Real processes, real faults."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.faults import books, postgres
from tests.faults.books import Audit
from tests.faults.load import Fate, Load
from tests.faults.patient import Patient, installed, wait_for

pytestmark = pytest.mark.journey

CALLERS = 8
AWAY = 6.0  # seconds
SPOOL_BYTES = "16m"


def served(load: Load) -> int:
    return load.fates()[Fate.ANSWERED]


def compared(patient: Patient, load: Load) -> Audit:
    """The books, after everything has settled. Rows come from the API: the database may be any."""
    rows = patient.get("/api/v1/usage/records.json")
    columns = ("request_id", "status", "input_tokens", "output_tokens")
    ledger = [books.Row(*(row[name] for name in columns), charge=None, engine_seconds=0.0) for row in rows]
    return books.audit(ledger, books.record(patient.data_dir), load.receipts)


def refusals(load: Load) -> set[int]:
    """What callers were refused with, beside those who had asked for a failure."""
    return {one.status for one in load.receipts if one.fate is Fate.REFUSED and one.code != "generation_failed"}


class TestDatabaseAway:
    """FR-073 f: requests go on, usage waits, and afterwards nothing is lost and nothing is there twice."""

    def ride_out(self, patient: Patient, outage: Callable[[Patient], AbstractContextManager[None]]) -> None:
        patient.start()
        patient.be_whole()
        with Load(patient.url, patient.keys["prod"], CALLERS, seed=1) as load:
            wait_for(lambda: served(load) > 5)
            with outage(patient):
                before = served(load)
                time.sleep(AWAY)
                assert served(load) > before + 10
                assert books.unsettled(patient.data_dir) > 10  # it waits on disk
        assert refusals(load) == set()
        patient.idle()
        found = compared(patient, load)
        assert found.wrong == []
        assert found.statuses["finished"] >= served(load)
        assert patient.stop() == 0

    def test_embedded_database_that_takes_no_write(self) -> None:
        @contextlib.contextmanager
        def locked(patient: Patient) -> Iterator[None]:
            with contextlib.closing(sqlite3.connect(patient.data_dir / "harness.sqlite3", isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                yield

        with installed() as patient:
            self.ride_out(patient, locked)

    def test_postgresql_that_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if reason := postgres.missing():
            pytest.skip(reason)

        with postgres.running() as server, monkeypatch.context() as environment:
            environment.setenv("HARNESS_DATABASE_URL", server.url)

            @contextlib.contextmanager
            def gone(patient: Patient) -> Iterator[None]:
                server.go_away()
                yield
                server.start()

            with installed() as patient:
                self.ride_out(patient, gone)


@contextlib.contextmanager
def small_disk(patient: Patient) -> Iterator[None]:
    """The spool on a disk of its own."""
    spool = patient.data_dir / "spool"
    spool.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SPOOL_BYTES}", "spool", spool], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", spool], check=True)


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None, reason="only root can mount a disk"
)
def test_a_full_disk_refuses_what_is_new_and_bills_what_runs() -> None:
    """FR-073 f."""
    with installed() as patient, small_disk(patient):
        patient.start()
        patient.be_whole()
        ballast = patient.data_dir / "spool" / "ballast"
        with Load(patient.url, patient.keys["prod"], CALLERS, seed=2) as load:
            wait_for(lambda: served(load) > 5)
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(1024)):
                    pass
            wait_for(lambda: refusals(load))
            assert refusals(load) == {503}
            ballast.unlink()
            before = served(load)
            wait_for(lambda: served(load) > before + 5)
        patient.idle()
        found = compared(patient, load)
        assert found.wrong == []
        assert found.statuses["finished"] >= served(load)
        assert patient.stop() == 0
