"""Engines that fail, die, change and go, while the process lives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from asgiref.sync import sync_to_async

from scheduler import config
from scheduler.engines import create_engine
from scheduler.gateway import Done
from scheduler.models import Deployment, DeploymentStatus
from tenants.models import Tier, UsageRecord

from .conftest import STEP

pytestmark = pytest.mark.usefixtures("demo")


async def status(model: str) -> DeploymentStatus | None:
    return await DeploymentStatus.objects.filter(deployment__model=model).afirst()


async def test_an_engine_that_dies_ends_its_requests_and_is_rebuilt(start):
    async with start() as product:
        await product.ready()
        bystander = product.submit(max_tokens=400)
        await product.until(lambda: len(bystander.events) > 1)
        crash = product.submit(max_tokens=50, simulate={"crash_at": 3})
        await product.until(lambda: crash.done() and bystander.done())
        assert crash.last.reason == bystander.last.reason == "engine_failed"
        delivered = bystander.last.completion_tokens
        await product.ready()
        after = product.submit()
        await product.until(after.done)
        assert isinstance(after.last, Done)
        await product.settled()
        product.assert_nothing_is_held()
        row = await UsageRecord.objects.aget(request_id=bystander.request.id)
        assert (row.status, row.reason, row.completion_tokens) == ("failed", "engine_failed", delivered)


async def test_what_waits_for_an_engine_that_dies_is_told_to_come_back(start):
    async with start() as product:
        await product.ready()
        running = [product.submit(max_tokens=400) for _ in range(3)]
        running.append(product.submit(max_tokens=50, simulate={"crash_at": 20}))
        await product.until(lambda: all(answer.events for answer in running))
        waiting = product.submit()
        await product.until(waiting.done)
        assert waiting.last.reason == "engine_not_ready"
        assert waiting.last.retry_after > 0


async def test_an_engine_that_keeps_dying_is_rebuilt_with_longer_and_longer_pauses(start):
    pauses = []
    async with start() as product:
        for _ in range(4):
            died = product.clock.now()
            await product.ready()
            pauses.append(product.clock.now() - died)
            crash = product.submit(simulate={"crash_at": 1})
            await product.until(crash.done)
    assert pauses[1] < 0.5
    assert pauses[2] == pytest.approx(2.0, abs=0.5)
    assert pauses[3] == pytest.approx(4.0, abs=0.5)


async def test_an_engine_that_cannot_start_says_why_and_starts_when_its_options_are_mended(start):
    await Deployment.objects.filter(model="demo").aupdate(options={"max_seq": 4})
    async with start() as product:
        await product.state("demo", "failed")
        await product.until(lambda: settled_status("failed"))
        row = await status("demo")
        assert row is not None
        assert "max_seq" in row.message
        assert "Known options" in row.hint
        answer = product.submit()
        await product.until(answer.done)
        assert answer.last.reason == "engine_not_ready"
        deployment = await Deployment.objects.aget(model="demo")
        deployment.options = STEP
        await sync_to_async(deployment.save)()
        await product.ready()


async def settled_status(state: str) -> bool:
    row = await status("demo")
    return row is not None and row.state == state


async def test_a_failed_start_is_tried_again_with_back_off(start):
    tries = []

    def flaky(name, model, options, *, clock, on_step, data_dir):
        tries.append(clock.now())
        return create_engine(
            name, model, options if len(tries) > 3 else {"nonsense": 1}, clock=clock, on_step=on_step, data_dir=data_dir
        )

    async with start(engine_factory=flaky) as product:
        await product.ready()
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps == pytest.approx([1.0, 2.0, 4.0], abs=0.3)


async def test_a_new_deployment_shows_as_starting_and_gets_ready_beside_the_others(start):
    async with start() as product:
        await product.ready()
        options = STEP | {"start_seconds": 20.0}
        await sync_to_async(Deployment.objects.create)(model="second", engine="simulated", options=options)
        saved = product.clock.now()
        await product.state("second", "starting")
        assert product.clock.now() - saved <= 2.0
        answer = product.submit(model="second")
        await product.until(answer.done)
        assert answer.last.reason == "engine_not_ready"
        await product.until(lambda: product.gateway.models().get("second") == "ready", step=0.2)
        answer = product.submit(model="second")
        await product.until(answer.done)
        assert isinstance(answer.last, Done)


async def test_a_disabled_deployment_finishes_what_runs_takes_nothing_new_and_is_gone(start):
    async with start() as product:
        await product.ready()
        running = product.submit(max_tokens=300)
        await product.until(lambda: len(running.events) > 1)
        deployment = await Deployment.objects.aget(model="demo")
        deployment.enabled = False
        await sync_to_async(deployment.save)()
        await product.state("demo", "draining")
        refused = product.submit()
        await product.until(refused.done)
        assert refused.last.reason == "draining"
        await product.until(running.done)
        assert isinstance(running.last, Done)
        await product.state("demo", None)
        await product.until(lambda: settled_status("stopped"))


async def test_changed_options_give_the_deployment_a_new_engine(start):
    async with start() as product:
        await product.ready()
        before = product.runtime.pools["demo"].engine
        deployment = await Deployment.objects.aget(model="demo")
        deployment.options = STEP | {"max_model_len": 64}
        await sync_to_async(deployment.save)()
        await product.until(
            lambda: (
                product.runtime.pools["demo"].engine not in (None, before)
                and product.gateway.models()["demo"] == "ready"
            )
        )
        answer = product.submit(words=100)
        await product.until(answer.done)
        assert answer.last.reason == "context_length_exceeded"


async def test_a_changed_tier_and_policy_take_effect_on_the_running_process(start):
    async with start() as product:
        await product.ready()
        tier = await Tier.objects.aget(name="free")
        tier.max_tokens = 8
        await sync_to_async(tier.save)()
        document = await sync_to_async(config.update)({"policy": "priority"})
        saved = product.clock.now()
        await product.until(lambda: product.runtime.services.configuration.policy.version == document.version)
        assert product.clock.now() - saved <= 2.0
        answer = product.submit(tier="free", max_tokens=9)
        await product.until(answer.done)
        assert answer.last.reason == "limit_too_large"
        assert (await product.gateway.ask("queue_status"))["policy"] == "priority"


async def test_a_tier_made_a_moment_ago_is_served(start):
    async with start() as product:
        await product.ready()
        await sync_to_async(Tier.objects.create)(name="gold", rank=2)
        answer = product.submit(tier="gold")
        await product.until(answer.done)
        assert isinstance(answer.last, Done)


async def test_a_planner_that_raises_takes_only_its_pool_down_and_comes_back(start, monkeypatch):
    async with start() as product:
        await product.ready()
        running = product.submit(max_tokens=400)
        await product.until(lambda: len(running.events) > 1)
        planner = product.runtime.pools["demo"].planner

        def broken(now):
            raise ZeroDivisionError

        monkeypatch.setattr(planner, "decide", broken)
        waiting = product.submit()
        await product.until(lambda: running.done() and waiting.done())
        assert waiting.last.reason == "engine_not_ready"
        await product.ready()
        after = product.submit()
        await product.until(after.done)
        assert isinstance(after.last, Done)
        product.assert_nothing_is_held()
