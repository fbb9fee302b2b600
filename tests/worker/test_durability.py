"""What usage survives: by default the death of any process, on request a power cut too."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness_web.env import EnvError, child_environment, read
from scheduler.worker.journal import Journal, Progress
from scheduler.worker.spool import Spool

FULL, NORMAL = 2, 1  # SQLite's PRAGMA synchronous


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """What was made to survive a power cut, and when it was given its name."""
    done: list[str] = []
    for name in ("fdatasync", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, name=name, real=real: (done.append(name), real(fd)))
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), rename(*paths)))
    return done


def test_an_append_waits_for_the_disk_only_where_a_power_cut_counts(tmp_path, synced):
    log = Journal(tmp_path / "j.bin")
    log.append([(1, Progress(1, 0.1, 0.1))])
    log.compact([(1, Progress(1, 0.1, 0.1))])
    log.close()
    assert synced in ([], ["replace"])
    synced.clear()
    log = Journal(tmp_path / "k.bin", power_loss=True)
    assert synced == ["fsync"]  # the folder: the name is there
    log.append([(1, Progress(1, 0.1, 0.1))])
    assert synced == ["fsync", "fdatasync"]
    log.close()


def test_a_journal_that_is_replaced_is_on_disk_before_it_has_its_name(tmp_path, synced):
    log = Journal(tmp_path / "j.bin", power_loss=True)
    synced.clear()
    log.compact([(1, Progress(1, 0.1, 0.1))])
    log.close()
    assert [step for step in synced if step != "replace"] == ["fsync", "fsync"]  # the file, then the folder


def test_a_commit_of_the_spool_is_full_where_a_power_cut_counts(tmp_path):
    for power_loss, wanted in ((True, FULL), (False, NORMAL)):
        spool = Spool(tmp_path / f"spool-{power_loss}-1.sqlite3", power_loss=power_loss)
        assert spool._db.execute("PRAGMA synchronous").fetchone() == (wanted,)
        spool.close()


@pytest.mark.parametrize(("durability", "wanted"), [("process", NORMAL), ("power-loss", FULL)])
def test_the_ledger_survives_what_the_spool_survives(tmp_path, durability, wanted):
    """Else a row that the spool holds for stored would be lost."""
    program = (
        "import django; django.setup(); from django.db import connection; from django.conf import settings;"
        "print(connection.cursor().execute('PRAGMA synchronous').fetchone()[0], settings.HARNESS_POWER_LOSS)"
    )
    environment = child_environment(HARNESS_DATA_DIR=str(tmp_path), HARNESS_DURABILITY=durability)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(wanted), str(wanted == FULL)]


def test_a_durability_that_there_is_not_is_refused_by_name():
    with pytest.raises(EnvError, match="HARNESS_DURABILITY='forever' is not one of process, power-loss"):
        read({"HARNESS_DURABILITY": "forever"})
