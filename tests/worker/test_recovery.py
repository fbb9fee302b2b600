"""After a crash: interrupted requests are billed for what was delivered, once, and the files go when all is stored."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.clock import ManualClock
from scheduler.core.admission import Admission
from scheduler.core.types import Limit
from scheduler.gateway import Done
from scheduler.worker.files import EpochFiles, epochs_of
from scheduler.worker.journal import Journal, Progress
from scheduler.worker.recovery import carry_and_delete, close_books, restore_windows
from scheduler.worker.spool import LimitCharge, Spool
from tenants.models import UsageRecord

from .conftest import WALL, limit
from .test_books import Database, ending, intent


def crashed(folder, epoch=1, process="scheduler", **changes) -> EpochFiles:
    """Books of a process that was killed with one request ended and two running, one of them with five tokens."""
    files = EpochFiles(folder, process, epoch)
    spool = Spool(files.spool)
    first, second, _ = spool.open_intents([intent(number, **changes) for number in (1, 2, 3)])
    spool.end([(first, ending(1))])
    spool.close()
    log = Journal(files.journal)
    log.append([(first, Progress(5, 0.1, 0.5)), (second, Progress(4, 0.1, 0.6))])
    log.append([(second, Progress(5, 0.1, 0.7, 0.02, 1))])
    log.close()
    return files


def test_open_intents_end_as_interrupted_with_what_the_journal_says(tmp_path):
    crashed(tmp_path)
    closed, endings = close_books(tmp_path, "scheduler", epoch=2)
    assert [files.epoch for files in closed] == [1]
    by_id = {one.intent.request_id: one for one in endings}
    assert by_id["req-1"].status == "finished"
    assert (by_id["req-2"].status, by_id["req-2"].completion_tokens) == ("interrupted", 5)
    assert by_id["req-2"].first_token_at == pytest.approx(WALL + 0.6)
    assert by_id["req-2"].ended_at == pytest.approx(WALL + 1.2)
    assert by_id["req-2"].engine_seconds == 0.02
    assert (by_id["req-2"].cached_tokens, by_id["req-3"].cached_tokens) == (1, 0)
    assert (by_id["req-3"].status, by_id["req-3"].completion_tokens) == ("interrupted", 0)
    assert by_id["req-3"].first_token_at is None
    assert by_id["req-3"].engine_seconds == 0.0


def test_closing_twice_changes_nothing(tmp_path):
    crashed(tmp_path)
    _, once = close_books(tmp_path, "scheduler", epoch=2)
    _, twice = close_books(tmp_path, "scheduler", epoch=3)
    assert once == twice


def test_only_earlier_epochs_of_the_own_name_are_touched(tmp_path):
    crashed(tmp_path, epoch=2)
    crashed(tmp_path, epoch=1, process="scheduler-b")
    assert close_books(tmp_path, "scheduler", epoch=2) == ([], [])
    assert [files.epoch for files in epochs_of(tmp_path, "scheduler-b")] == [1]


def test_a_spool_that_cannot_be_read_is_kept_and_does_not_stop_the_others(tmp_path):
    crashed(tmp_path, epoch=2)
    damaged = EpochFiles(tmp_path, "scheduler", 1)
    damaged.spool.write_bytes(b"no database" * 1000)
    closed, _ = close_books(tmp_path, "scheduler", epoch=3)
    assert [files.epoch for files in closed] == [2]
    assert damaged.spool.exists()


def test_a_journal_of_another_version_keeps_its_books_unbilled(tmp_path):
    files = crashed(tmp_path)
    whole = files.journal.read_bytes()
    files.journal.write_bytes(bytes(range(200)))
    assert close_books(tmp_path, "scheduler", epoch=2) == ([], [])
    files.journal.write_bytes(whole)
    closed, endings = close_books(tmp_path, "scheduler", epoch=2)
    assert len(closed) == 1 and any(ending.completion_tokens for ending in endings)


async def test_files_are_deleted_only_when_everything_is_in_the_database(tmp_path):
    files, database, clock = crashed(tmp_path), Database(), ManualClock()
    database.away = True
    closed, _ = close_books(tmp_path, "scheduler", epoch=2)
    carrying = asyncio.create_task(carry_and_delete(closed, database.store, database.release, clock))
    for _ in range(3):
        await asyncio.sleep(0.01)
        await clock.advance(10.0)
    assert files.spool.exists() and files.journal.exists() and database.released == []
    database.away = False
    async with asyncio.timeout(10):
        while not carrying.done():
            await clock.advance(10.0)
            await asyncio.sleep(0.001)
    assert list(tmp_path.iterdir()) == [] and database.released == [1]
    assert sorted(one.intent.request_id for one in database.rows) == ["req-1", "req-2", "req-3"]


async def test_a_spool_with_a_row_that_the_ledger_refuses_is_kept(tmp_path):
    files, database = crashed(tmp_path), Database()
    database.refuses = {"req-2"}
    closed, _ = close_books(tmp_path, "scheduler", epoch=2)
    await carry_and_delete(closed, database.store, database.release, ManualClock())
    assert files.spool.exists() and database.released == []
    assert sorted(one.intent.request_id for one in database.rows) == ["req-1", "req-3"]


def test_a_restart_gives_nobody_a_second_allowance(tmp_path):
    charge = LimitCharge("key", "7", "", "rpm", 3)
    crashed(tmp_path, limits=(charge,))
    _, endings = close_books(tmp_path, "scheduler", epoch=2)
    limits = [Limit("key", "7", "", "rpm", 3)]
    soon, later = Admission(), Admission()
    restore_windows(soon, endings, WALL + 10, 5.0)
    assert soon.headers(limits, "demo", 5.0)["remaining-requests"] == 1  # two of them carry the limit
    restore_windows(later, endings, WALL + 61, 5.0)
    assert later.headers(limits, "demo", 5.0)["remaining-requests"] == 3


@pytest.mark.usefixtures("demo")
async def test_a_process_that_starts_after_a_kill_settles_what_it_finds(start, tmp_path):
    (tmp_path / "spool").mkdir()
    files = crashed(tmp_path / "spool", epoch=0)
    async with start() as product:
        await product.ready()
        await product.until(lambda: not files.spool.exists())
        rows = {row.request_id: row async for row in UsageRecord.objects.all()}
    assert {name: (row.status, row.completion_tokens) for name, row in rows.items()} == {
        "req-1": ("finished", 5),
        "req-2": ("interrupted", 5),
        "req-3": ("interrupted", 0),
    }


@pytest.mark.usefixtures("demo")
async def test_rate_windows_survive_an_orderly_restart(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(limits=[limit("rpm", 1)])
        await product.until(answer.done)
        assert isinstance(answer.last, Done)
    async with start() as product:
        await product.ready()
        answer = product.submit(limits=[limit("rpm", 1)], id="req-again")
        await product.until(answer.done)
        assert answer.last.reason == "limit_rpm"
        assert product.runtime.services.epoch == 2
