"""The staged, bounded end of the process."""

from __future__ import annotations

import pytest

from scheduler.gateway import Done, Failed
from scheduler.models import DeploymentStatus, SchedulerProcess
from scheduler.worker.runtime import Runtime, StartError
from tenants.models import UsageRecord

pytestmark = pytest.mark.usefixtures("demo")


async def test_what_runs_finishes_and_nothing_new_is_taken(start):
    async with start() as product:
        await product.ready()
        running = product.submit(max_tokens=100)
        await product.until(lambda: len(running.events) > 1)
        stopping = product.stop()
        await product.until(lambda: product.gateway.models() == {})
        late = product.submit()
        await product.until(lambda: late.done() and running.done())
        assert late.last.reason in ("draining", "engine_not_ready")
        assert late.last.retry_after > 0
        assert isinstance(running.last, Done)
        await product.until(stopping.done)
        assert (await DeploymentStatus.objects.aget()).state == "stopped"
        assert await UsageRecord.objects.acount() == 1


async def test_what_does_not_finish_in_time_is_ended_told_and_billed(start):
    async with start(drain_seconds=1.0) as product:
        await product.ready()
        running = product.submit(max_tokens=500, simulate={"hang_at": 3})
        await product.until(lambda: len(running.events) > 1)
        begun = product.clock.now()
        stopping = product.stop()
        await product.until(stopping.done)
        assert product.clock.now() - begun < 2.0
        assert isinstance(running.last, Failed)
        assert running.last.reason == "shutdown"
        row = await UsageRecord.objects.aget()
        assert (row.status, row.reason, row.completion_tokens) == ("aborted", "shutdown", 3)


async def test_a_second_signal_stops_at_once(start):
    async with start(drain_seconds=1000.0) as product:
        await product.ready()
        running = product.submit(max_tokens=500, simulate={"hang_at": 3})
        await product.until(lambda: len(running.events) > 1)
        begun = product.clock.now()
        product.runtime.ask_to_stop()
        stopping = product.stop()
        product.runtime.ask_to_stop()
        await product.until(stopping.done)
        assert product.clock.now() - begun < 2.0


async def test_two_processes_of_one_name_do_not_run_at_once(start):
    async with start() as product:
        second = Runtime(product.options, clock=product.clock, transport=product.transport)
        with pytest.raises(StartError, match="running on this data directory already"):
            await second.start()


async def test_an_owner_that_was_superseded_stops_by_itself(start):
    async with start() as product:
        await product.ready()
        await SchedulerProcess.objects.aupdate(epoch=7)
        await product.until(product.runtime._stop_asked.is_set)
        assert product.runtime._failure == "another scheduler has taken over"
