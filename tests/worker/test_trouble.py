"""Trouble inside the process: full disks, an absent database, a lost lease, engines with bugs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pynvml
import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError

from scheduler import ownership
from scheduler.engines.base import PromptError
from scheduler.gateway import Done
from scheduler.worker import ledger
from scheduler.worker.gpus import Gpus
from scheduler.worker.spool import SpoolError
from tenants.models import Tier, UsageRecord

from .conftest import limit

pytestmark = pytest.mark.usefixtures("demo")


async def end_of(product, **changes):
    """The end of a request sent now."""
    answer = product.submit(**changes)
    await product.until(answer.done)
    return answer.last


async def test_while_usage_cannot_be_recorded_nothing_new_runs(start, monkeypatch):
    async with start() as product:
        await product.ready()
        spool = product.runtime.services.settlement._spool

        def full(*arguments):
            raise SpoolError("database or disk is full")

        monkeypatch.setattr(spool, "open_intents", full)
        monkeypatch.setattr(spool, "probe", full)
        first = product.submit()  # found out at its dispatch
        await product.until(first.done)
        assert first.kinds() == ["Accepted", "Refused"]
        assert first.last.reason == "spool_unavailable"
        second = product.submit()  # known before
        await product.until(second.done)
        assert second.kinds() == ["Refused"]
        assert second.last.retry_after > 0
        product.assert_nothing_is_held()
        monkeypatch.undo()
        await product.until(lambda: product.runtime.services.settlement.available)
        assert isinstance(await end_of(product), Done)


async def test_a_database_that_is_away_delays_the_ledger_and_nothing_else(start, monkeypatch):
    record_usage = ledger.record_usage

    def away(rows, **changes):
        raise OperationalError("no such host")

    async with start() as product:
        await product.ready()
        monkeypatch.setattr(ledger, "record_usage", away)
        assert isinstance(await end_of(product), Done)
        await product.until(lambda: product.runtime.services.settlement.backlog == 1)
        monkeypatch.setattr(ledger, "record_usage", record_usage)
        await product.settled()
        assert await UsageRecord.objects.acount() == 1


async def test_an_owner_whose_lease_is_running_out_takes_nothing_new(start, monkeypatch):
    def away(name, epoch):
        raise OperationalError("no such host")

    async with start() as product:
        await product.ready()
        monkeypatch.setattr(ownership, "renew", away)
        await product.until(lambda: not product.runtime._lease.admits(), step=1.0)
        assert product.clock.now() < ownership.LEASE_SECONDS + 5
        answer = await end_of(product)
        assert (answer.reason, answer.retry_after) == ("draining", 5.0)
        monkeypatch.undo()
        await product.until(product.runtime._lease.admits, step=0.5)
        assert isinstance(await end_of(product), Done)


async def test_a_full_queue_refuses_before_rendering(start, monkeypatch):
    tier = await Tier.objects.aget(name="free")
    tier.queue_max_length = 1
    await sync_to_async(tier.save)()
    async with start() as product:
        await product.ready()
        running = [product.submit(max_tokens=400) for _ in range(4)]
        await product.until(lambda: all(len(answer.events) > 1 for answer in running))
        waiting = product.submit(tier="free")
        await product.until(lambda: waiting.kinds() == ["Accepted"])
        monkeypatch.setattr(product.runtime.pools["demo"].engine, "render", None)
        answer = await end_of(product, tier="free")
        assert answer.reason == "queue_full"
        assert answer.retry_after > 0


async def test_what_is_being_rendered_when_the_process_stops_is_answered(start, monkeypatch):
    async with start() as product:
        await product.ready()
        rendering = asyncio.Event()

        async def endless(prompt, sampling):
            rendering.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(product.runtime.pools["demo"].engine, "render", endless)
        answer = product.submit()
        await product.until(rendering.is_set)
        product.stop()
        await product.until(answer.done)
        assert answer.last.reason == "draining"


async def test_a_request_that_only_the_running_engine_can_reject_is_answered_like_a_refusal(start, monkeypatch):
    async with start() as product:
        await product.ready()

        async def picky(request):
            raise PromptError("no", param="logit_bias")
            yield

        monkeypatch.setattr(product.runtime.pools["demo"].engine, "generate", picky)
        answer = await end_of(product)
        assert (answer.reason, answer.param) == ("invalid_prompt", "logit_bias")
        await product.settled()
        product.assert_nothing_is_held()


@pytest.mark.parametrize("bug", ["raises", "stops"])
async def test_a_bug_in_an_engine_fails_the_request_and_not_the_process(start, monkeypatch, bug):
    async with start() as product:
        await product.ready()

        async def broken(request):
            if bug == "raises":
                raise ZeroDivisionError
            return
            yield

        with monkeypatch.context() as patch:
            patch.setattr(product.runtime.pools["demo"].engine, "generate", broken)
            assert (await end_of(product)).reason == "request_failed"
        assert isinstance(await end_of(product), Done)
        product.assert_nothing_is_held()


def test_gpus_are_read_where_there_is_a_driver(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert Gpus().read() == []
    for name, answer in {
        "nvmlInit": None,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": object(),
        "nvmlDeviceGetName": b"NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5, total=10),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=50),
    }.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    (row,) = Gpus().read()
    assert (row.name, row.utilisation, row.memory_used, row.memory_total) == ("NVIDIA H200", 0.5, 5, 10)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
async def test_a_wall_clock_that_steps_changes_no_decision_and_reorders_nothing(start, monkeypatch, step):
    """Deadlines, waits and rates are on a monotonic clock; what is written down is relative to the arrival."""
    async with start() as product:
        await product.ready()
        running = [product.submit(max_tokens=100) for _ in range(4)]
        await product.until(lambda: all(len(answer.events) > 1 for answer in running))
        waiting = product.submit(max_tokens=4, limits=(limit("rpm", 1),))
        await product.until(lambda: waiting.kinds() == ["Accepted"])
        wall = product.runtime.services.wall
        monkeypatch.setattr(product.runtime.services, "wall", lambda: wall() + step)
        refused = product.submit(limits=(limit("rpm", 1),))
        await product.until(lambda: waiting.done() and refused.done() and all(answer.done() for answer in running))
        assert [type(answer.last) for answer in (waiting, *running)] == [Done] * 5
        assert 50.0 < refused.last.retry_after < 62.0
        await product.settled()
        async for row in UsageRecord.objects.all():
            assert row.arrived_at <= row.dispatched_at <= row.first_token_at <= row.ended_at
            assert (row.ended_at - row.arrived_at).total_seconds() < 60.0
        product.assert_nothing_is_held()
