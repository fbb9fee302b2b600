"""Spool, journal and settlement: what is billed survives, in the right order, and says when it cannot."""

from __future__ import annotations

import os
import sqlite3

import pytest

from scheduler.clock import ManualClock
from scheduler.core.types import TierSpec
from scheduler.engines.base import Rendered
from scheduler.gateway import Caller, Sampling, Submit
from scheduler.worker import journal
from scheduler.worker.flight import Flight
from scheduler.worker.journal import Journal, JournalError, Progress
from scheduler.worker.outbox import Outbox, Session
from scheduler.worker.settlement import Settlement, StoreError
from scheduler.worker.spool import Ending, Intent, Spool, SpoolError

WALL = 1_800_000_000.0


def intent(number: int = 1, **changes) -> Intent:
    fields = {
        "request_id": f"req-{number}",
        "attempt": 1,
        "tenant_id": "1",
        "tenant_slug": "acme",
        "key_id": "7",
        "key_name": "prod",
        "tier": "vip",
        "model": "demo",
        "deployment": "demo",
        "stream": True,
        "prompt_tokens": 3,
        "max_tokens": 8,
        "arrived_at": WALL,
        "dispatched_at": WALL + 0.5,
        "batch_id": "b-1",
        "policy_version": 2,
        "price": None,
        "limits": (),
        "epoch": 1,
    }
    return Intent(**(fields | changes))


def ending(number: int = 1, **changes) -> Ending:
    fields = {
        "intent": intent(number),
        "status": "finished",
        "finish_reason": "stop",
        "reason": "",
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "completion_tokens": 5,
        "first_token_at": WALL + 0.6,
        "ended_at": WALL + 1.0,
        "batch_size": 1.0,
        "attained": True,
        "miss_reason": "",
    }
    return Ending(**(fields | changes))


def flight(number: int = 1) -> Flight:
    submit = Submit(f"req-{number}", 1, 0.0, Caller("1", "acme", "7", "vip"), "demo", (), Sampling(), True)
    made = Flight(submit, Session(Line()), 0.0, WALL, ())
    made.tier, made.rendered = TierSpec("vip", 1), Rendered(3, 100, None)
    return made


class Line:
    """A connection that remembers what was sent."""

    def __init__(self) -> None:
        self.sent = []

    def send(self, message) -> bool:
        self.sent.append(message)
        return True


class Database:
    """A ledger that can be away, or refuse a row for ever."""

    def __init__(self) -> None:
        self.rows: list[Ending] = []
        self.released: list[int] = []  # epochs
        self.away = False
        self.refuses: set[str] = set()

    async def store(self, endings) -> list[int]:
        if self.away:
            raise StoreError("away")
        refused = [place for place, one in enumerate(endings) if one.intent.request_id in self.refuses]
        self.rows += [one for place, one in enumerate(endings) if place not in refused]
        return refused

    async def release(self, epoch: int) -> None:
        if self.away:
            raise StoreError("away")
        self.released.append(epoch)


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def spool(tmp_path):
    made = Spool(tmp_path / "spool-s-1.sqlite3")
    yield made
    made.close()


@pytest.fixture
def settlement(tmp_path, spool, database):
    clock = ManualClock()
    log = Journal(tmp_path / "journal-s-1.bin")
    yield Settlement(spool, log, database.store, clock, lambda: WALL + clock.now())
    log.close()


# --- journal ---------------------------------------------------------------------------------------------------------


def test_the_last_progress_of_each_request_is_read_back(tmp_path):
    log = Journal(tmp_path / "j.bin")
    log.append([(1, Progress(1, 0.1, 0.1)), (2, Progress(4, 0.2, 0.3))])
    log.append([(1, Progress(2, 0.1, 0.2, 0.05, 7))])
    log.close()
    assert journal.read(tmp_path / "j.bin") == {1: Progress(2, 0.1, 0.2, 0.05, 7), 2: Progress(4, 0.2, 0.3)}


@pytest.mark.parametrize("cut", range(1, 44))
def test_a_torn_tail_never_changes_what_was_whole(tmp_path, cut):
    path = tmp_path / "j.bin"
    log = Journal(path)
    log.append([(1, Progress(1, 0.1, 0.1))])
    log.append([(1, Progress(2, 0.1, 0.2))])
    log.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert journal.read(path) == {1: Progress(1, 0.1, 0.1)}


def test_a_damaged_record_ends_the_journal(tmp_path):
    path = tmp_path / "j.bin"
    log = Journal(path)
    log.append([(1, Progress(1, 0.1, 0.1))])
    log.append([(1, Progress(2, 0.1, 0.2))])
    log.close()
    data = bytearray(path.read_bytes())
    data[44] ^= 1
    path.write_bytes(data)
    assert journal.read(path) == {1: Progress(1, 0.1, 0.1)}


def test_a_journal_of_another_version_is_not_taken_for_an_empty_one(tmp_path):
    path = tmp_path / "j.bin"
    path.write_bytes(bytes(range(200)))
    with pytest.raises(JournalError, match="format"):
        journal.read(path)


def test_a_journal_that_is_not_there_is_empty(tmp_path):
    assert journal.read(tmp_path / "none.bin") == {}


def test_a_long_journal_is_replaced_by_one_with_the_running_requests(tmp_path):
    path = tmp_path / "j.bin"
    log = Journal(path, max_bytes=100)
    for tokens in range(1, 10):
        log.append([(1, Progress(tokens, 0.1, 0.2))])
    assert log.is_long
    log.compact([(1, Progress(9, 0.1, 0.2))])
    assert not log.is_long
    log.append([(1, Progress(10, 0.1, 0.3))])
    log.close()
    assert journal.read(path) == {1: Progress(10, 0.1, 0.3)}
    assert path.stat().st_size == 88


def test_a_write_that_got_through_in_part_is_taken_back(tmp_path, monkeypatch):
    log = Journal(tmp_path / "j.bin")
    log.append([(1, Progress(1, 0.1, 0.1))])
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    with pytest.raises(JournalError, match="10 of 44 bytes"):
        log.append([(1, Progress(2, 0.1, 0.2))])
    monkeypatch.undo()
    log.append([(1, Progress(3, 0.1, 0.3))])
    log.close()
    assert journal.read(tmp_path / "j.bin") == {1: Progress(3, 0.1, 0.3)}


# --- spool -----------------------------------------------------------------------------------------------------------


def test_an_end_moves_an_intent_to_usage_in_one_step(spool):
    serials = spool.open_intents([intent(1), intent(2)])
    spool.end([(serials[0], ending(1))])
    assert list(spool.intents().values()) == [intent(2)]
    assert [one for _, one in spool.to_store(10)] == [ending(1)]
    assert not spool.is_done()


def test_what_is_stored_stays_until_no_rate_window_needs_it(spool):
    (serial,) = spool.open_intents([intent(1)])
    spool.end([(serial, ending(1))])
    spool.mark_stored([seq for seq, _ in spool.to_store(10)])
    assert spool.to_store(10) == []
    assert spool.is_done()
    spool.prune(WALL)
    assert spool.recent(WALL - 60) == [ending(1)]
    spool.prune(WALL + 1)
    assert spool.recent(WALL - 60) == []


def test_serials_are_never_used_twice(spool):
    (first,) = spool.open_intents([intent(1)])
    spool.end([(first, ending(1))])
    (second,) = spool.open_intents([intent(2)])
    assert second > first


def test_a_file_that_is_no_spool_is_refused_with_its_name(tmp_path):
    path = tmp_path / "spool-s-1.sqlite3"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(SpoolError, match="spool-s-1"):
        Spool(path)


# --- settlement ------------------------------------------------------------------------------------------------------


async def test_everything_is_durable_before_anybody_is_told(settlement, spool, tmp_path):
    order = []
    one = flight()
    settlement.begin([(one, intent())])
    line = one.session.connection

    def make_durable() -> None:
        settlement.commit()
        order.append(("journal", journal.read(tmp_path / "journal-s-1.bin")))
        order.append(("ended", len(spool.to_store(10))))
        order.append(("told", len(line.sent)))

    outbox = Outbox(make_durable)
    one.advance(0, 2, 1.0)
    settlement.moved(one)
    outbox.put(one.session, "delta")
    outbox.flush()
    settlement.ended(one, ending())
    outbox.put(one.session, "done")
    outbox.flush()
    assert order[0] == ("journal", {1: Progress(2, 1.0, 1.0)})
    assert order[1:3] == [("ended", 0), ("told", 0)]
    assert order[4:] == [("ended", 1), ("told", 1)]
    assert [message.events for message in line.sent] == [("delta",), ("done",)]


async def test_the_events_of_one_turn_travel_in_one_frame(settlement):
    one, other = flight(1), flight(2)
    other.session = one.session
    outbox = Outbox(settlement.commit)
    for name in ("a", "b", "c"):
        outbox.put(one.session, name)
    assert one.session.connection.sent == []
    clock = ManualClock()
    await clock.settle(3)
    assert [message.events for message in one.session.connection.sent] == [("a", "b", "c")]


async def test_while_the_database_is_away_usage_waits_and_then_arrives_once(settlement, database):
    one = flight()
    settlement.begin([(one, intent())])
    settlement.ended(one, ending())
    settlement.commit()
    database.away = True
    assert not await settlement.drain()
    assert settlement.backlog == 1
    database.away = False
    assert await settlement.drain()
    assert await settlement.drain()
    assert database.rows == [ending()]
    assert settlement.backlog == 0


async def test_a_row_that_the_ledger_refuses_does_not_stop_the_others_and_is_kept(settlement, spool, database):
    database.refuses = {"req-1"}
    for number in (1, 2):
        one = flight(number)
        settlement.begin([(one, intent(number))])
        settlement.ended(one, ending(number))
    settlement.commit()
    assert await settlement.drain()
    assert database.rows == [ending(2)]
    assert not spool.is_done()
    assert len(spool.recent(0.0)) == 2


async def test_when_the_spool_is_full_ends_wait_in_memory_and_nothing_new_begins(settlement, spool, database):
    one, other = flight(1), flight(2)
    settlement.begin([(one, intent(1))])
    limit_pages(spool, full=True)
    with pytest.raises(SpoolError, match="full"):
        for number in range(1000):
            settlement.begin([(other, intent(number, tenant_slug="x" * 4000))])
    assert not settlement.available
    settlement.ended(one, ending(1))
    settlement.commit()
    assert not await settlement.drain()
    limit_pages(spool, full=False)
    assert await settlement.drain()
    assert settlement.available
    assert ending(1) in database.rows


def limit_pages(spool: Spool, *, full: bool) -> None:
    """Let SQLite report a full disk, as it does when the file system has no page left."""
    db: sqlite3.Connection = spool._db
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages if full else 1_000_000}")


async def test_a_journal_that_cannot_be_written_is_made_up_for_by_the_next_append(settlement, tmp_path, monkeypatch):
    one = flight()
    settlement.begin([(one, intent())])
    write = os.write

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    one.advance(0, 2, 1.0)
    settlement.moved(one)
    settlement.commit()
    assert not settlement.available
    monkeypatch.setattr(os, "write", write)
    assert await settlement.drain()
    assert settlement.available
    assert journal.read(tmp_path / "journal-s-1.bin")[1] == Progress(2, 1.0, 1.0)
