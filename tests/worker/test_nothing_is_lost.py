"""FR-073: usage survives a stop, a cancelled flush, a failed commit and restarts. SIGKILL is `tests/faults/`'s."""

from __future__ import annotations

import asyncio

import pytest
from django.db import OperationalError
from django.db.models import Sum

from scheduler.clock import ManualClock
from scheduler.gateway import Done
from scheduler.worker import ledger
from scheduler.worker.journal import Journal
from scheduler.worker.ledger import Ledger
from scheduler.worker.settlement import Settlement
from scheduler.worker.spool import Spool
from tenants.models import UsageRecord

from .conftest import WALL
from .test_books import ending, flight, intent

CHATS, TOKENS = 100, 10

pytestmark = pytest.mark.usefixtures("demo")


async def chat(product, count: int) -> None:
    answers = [product.submit(max_tokens=TOKENS) for _ in range(count)]
    await product.until(lambda: all(answer.done() for answer in answers), step=0.05)
    assert all(isinstance(answer.last, Done) for answer in answers)


async def assert_recorded(chats: int, tokens: int) -> None:
    rows = UsageRecord.objects.all()
    assert await rows.acount() == await rows.values("request_id").distinct().acount() == chats
    assert (await rows.aaggregate(sum=Sum("completion_tokens")))["sum"] == tokens


async def test_a_stop_right_after_the_last_answer(start):
    """FR-073 a."""
    async with start() as product:
        await product.ready()
        await chat(product, CHATS)
        product.stop()
    await assert_recorded(CHATS, CHATS * TOKENS)


async def test_a_flush_that_is_cancelled_after_it_has_written_and_before_it_has_noted_so(tmp_path):
    """FR-073 b."""
    written = asyncio.Event()
    store = Ledger("scheduler", lambda charged: None)

    async def slow(endings):
        refused = await store.store(endings)
        written.set()
        await asyncio.Event().wait()
        return refused

    spool, log = Spool(tmp_path / "spool-s-1.sqlite3"), Journal(tmp_path / "journal-s-1.bin")
    clock = ManualClock()
    first = Settlement(spool, log, slow, clock, lambda: WALL)
    for number in range(3):
        one = flight(number)
        first.begin([(one, intent(number))])
        first.ended(one, ending(number))
    first.commit()
    flushing = asyncio.create_task(first.drain())
    await written.wait()
    flushing.cancel()
    await asyncio.gather(flushing, return_exceptions=True)
    assert len(spool.to_store(10)) == 3
    assert await Settlement(spool, log, store.store, clock, lambda: WALL).drain()
    assert spool.is_done()
    await assert_recorded(3, 15)
    await store.aclose()
    log.close()
    spool.close()


async def test_a_commit_that_fails_once(start, monkeypatch):
    """FR-073 c."""
    record_usage, tries = ledger.record_usage, []

    def once_away(rows, **options):
        tries.append(len(rows))
        if len(tries) == 1:
            raise OperationalError("server closed the connection unexpectedly")
        return record_usage(rows, **options)

    monkeypatch.setattr(ledger, "record_usage", once_away)
    async with start() as product:
        await product.ready()
        await chat(product, CHATS)
        await product.settled()
        assert len(tries) > 1
        await assert_recorded(CHATS, CHATS * TOKENS)


async def test_processes_that_are_recycled(start):
    """FR-073 e."""
    for life in range(4):
        async with start() as product:
            product._ids = 1_000 * life
            await product.ready()
            await chat(product, 30)
    await assert_recorded(120, 120 * TOKENS)
