"""A caller that goes away: in every phase, at once, and exactly once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from scheduler.engines.simulated import read_record
from tenants.models import Price, UsageRecord

pytestmark = pytest.mark.usefixtures("demo")


async def test_a_running_request_is_freed_within_one_engine_step_and_billed_for_what_it_delivered(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(words=3, max_tokens=400)
        await product.until(lambda: answer.last is not None and getattr(answer.last, "tokens", 0) >= 5)
        await answer.hang_up()
        await product.until(lambda: not product.runtime.pools["demo"].flights)
        await product.settled()
        product.assert_nothing_is_held()
        record = read_record(product.options.data_dir, "req-1")
        row = await UsageRecord.objects.aget()
    assert record is not None
    assert record["ended_step"] - record["aborted_step"] <= 1
    assert (row.status, row.reason) == ("aborted", "client_gone")
    assert 5 <= row.completion_tokens <= record["tokens"]
    assert row.attained is True  # what it had been given was in time


async def test_a_request_that_is_cut_off_pays_for_its_prompt_what_a_whole_one_would(start):
    rates = {"input_per_mtok": "2", "cached_input_per_mtok": "0.5", "output_per_mtok": "4"}
    await Price.objects.acreate(model="demo", currency="USD", effective_from=datetime(2026, 1, 1, tzinfo=UTC), **rates)
    async with start() as product:
        await product.ready()
        answer = product.submit(words=3, max_tokens=400, simulate={"usage": {"cached_tokens": 2}})
        await product.until(lambda: answer.last is not None and getattr(answer.last, "tokens", 0) >= 5)
        await answer.hang_up()
        failing = product.submit(words=3, max_tokens=9, simulate={"usage": {"cached_tokens": 2}, "fail_at": 4})
        await product.until(failing.done)
        await product.settled()
        product.assert_nothing_is_held()
        rows = {row.status: row async for row in UsageRecord.objects.all()}
    for status in ("aborted", "failed"):
        row = rows[status]
        assert (row.prompt_tokens, row.cached_tokens) == (3, 2)
        assert row.charge == (Decimal(2) + 2 * Decimal("0.5") + row.completion_tokens * 4) / 10**6


async def test_a_waiting_request_leaves_the_queue_and_is_not_billed(start):
    async with start() as product:
        await product.ready()
        running = [product.submit(max_tokens=400) for _ in range(4)]
        await product.until(lambda: all(len(answer.events) > 1 for answer in running))
        waiting = product.submit()
        await product.until(lambda: waiting.kinds() == ["Accepted"])
        await waiting.hang_up()
        await product.until(lambda: len(product.runtime.pools["demo"].flights) == 4)
        assert product.runtime.services.admission.reserved() == 4
        for answer in running:
            await answer.hang_up()
        await product.settled()
        ids = {row.request_id async for row in UsageRecord.objects.all()}
    assert ids == {answer.request.id for answer in running}


async def test_a_request_that_is_being_rendered_is_dropped_and_holds_nothing(start, monkeypatch):
    async with start() as product:
        await product.ready()
        engine = product.runtime.pools["demo"].engine
        rendering, released = asyncio.Event(), asyncio.Event()
        render = engine.render

        async def slow_render(prompt, sampling):
            rendering.set()
            await released.wait()
            return await render(prompt, sampling)

        monkeypatch.setattr(engine, "render", slow_render)
        answer = product.submit()
        await product.until(rendering.is_set)
        await answer.hang_up()
        await product.clock.advance(0.01)
        released.set()
        await product.clock.advance(1.0)
        product.assert_nothing_is_held()
        assert await UsageRecord.objects.acount() == 0


async def test_a_lost_connection_cancels_all_its_requests(start):
    async with start() as product:
        await product.ready()
        answers = [product.submit(max_tokens=400) for _ in range(6)]
        await product.until(lambda: all(answer.events for answer in answers))
        product.transport.cut()
        await product.until(lambda: not product.runtime.pools["demo"].flights)
        await product.settled()
        product.assert_nothing_is_held()
        assert {row.status async for row in UsageRecord.objects.all()} == {"aborted"}
