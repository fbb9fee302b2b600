"""Engines that fail, die, change and go, while the process lives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from asgiref.sync import sync_to_async

from scheduler import config
from scheduler.core.types import StepReport
from scheduler.engines import create_engine
from scheduler.engines.base import Terms
from scheduler.gateway import Done, Sampling
from scheduler.models import Deployment, DeploymentStatus
from tenants.models import Tier, UsageRecord

from .conftest import STEP

pytestmark = pytest.mark.usefixtures("demo")


async def status(model: str) -> DeploymentStatus | None:
    return await DeploymentStatus.objects.filter(deployment__model=model).afirst()


async def test_what_ran_in_an_engine_that_dies_goes_on_in_the_next_one(start):
    async with start() as product:
        await product.ready()
        bystander = product.submit(max_tokens=400)
        seeded = product.submit(max_tokens=400, sampling=Sampling(max_tokens=400, seed=1))
        await product.until(lambda: len(bystander.events) > 1 and len(seeded.events) > 1)
        crash = product.submit(max_tokens=50, simulate={"crash_at": 3})
        await product.until(lambda: crash.done() and seeded.done())
        assert crash.last.reason == seeded.last.reason == "engine_failed"
        await product.until(bystander.done)
        assert isinstance(bystander.last, Done)
        assert bystander.text() == " ".join(f"w{number}" for number in range(400))
        await product.settled()
        product.assert_nothing_is_held()
        row = await UsageRecord.objects.aget(request_id=bystander.request.id)
        assert (row.status, row.completion_tokens) == ("finished", 400)
        row = await UsageRecord.objects.aget(request_id=seeded.request.id)
        delivered = seeded.last.completion_tokens
        assert (row.status, row.reason, row.completion_tokens) == ("failed", "engine_failed", delivered)


async def test_what_waits_for_an_engine_that_dies_is_served_by_the_next_one(start):
    async with start() as product:
        await product.ready()
        running = [product.submit(max_tokens=100) for _ in range(3)]
        running.append(product.submit(max_tokens=50, simulate={"crash_at": 20}))
        await product.until(lambda: all(answer.events for answer in running))
        waiting = product.submit()
        await product.until(lambda: waiting.done() and all(answer.done() for answer in running))
        assert isinstance(waiting.last, Done)


async def test_waiting_for_an_engine_still_ends_in_time(start):
    await Deployment.objects.filter(model="demo").aupdate(options=STEP | {"start_seconds": 30.0})
    async with start() as product:
        await product.until(lambda: product.gateway.models().get("demo") == "ready", step=0.2)
        running = [product.submit(max_tokens=400) for _ in range(3)]
        running.append(product.submit(max_tokens=50, simulate={"crash_at": 20}))
        await product.until(lambda: all(answer.events for answer in running))
        waiting = product.submit(queue_timeout=2.0)
        await product.until(waiting.done)
        assert waiting.last.reason == "queue_timeout"
        assert product.clock.now() < 40.0
        for answer in running[:3]:
            await answer.hang_up()


async def test_an_engine_that_does_not_come_back_ends_what_waits_for_it(start):
    built = []

    def last_of_its_kind(name, model, options, *, clock, on_step, data_dir):
        built.append(model)
        options = options if len(built) == 1 else {"nonsense": 1}
        return create_engine(name, model, options, clock=clock, on_step=on_step, data_dir=data_dir)

    async with start(engine_factory=last_of_its_kind) as product:
        await product.ready()
        running = [product.submit(max_tokens=400) for _ in range(3)]
        running.append(product.submit(max_tokens=50, simulate={"crash_at": 20}))
        await product.until(lambda: all(answer.events for answer in running))
        waiting = product.submit()
        await product.until(lambda: waiting.done() and all(answer.done() for answer in running))
        assert (waiting.last.reason, waiting.last.retry_after) == ("engine_not_ready", 5.0)
        assert {answer.last.reason for answer in running} == {"engine_failed"}
        await product.settled()
        product.assert_nothing_is_held()


async def test_an_engine_that_makes_no_step_is_given_up_and_rebuilt(start):
    await sync_to_async(config.update)({"policy": {"name": "batching_aware"}})
    async with start() as product:
        await product.ready()
        hung = product.submit(max_tokens=50, simulate={"hang_at": 2})
        await product.until(lambda: len(hung.events) > 1)
        begun = product.clock.now()
        await product.until(hung.done, step=0.1)
        assert hung.last.reason == "engine_failed"
        assert 10.0 <= product.clock.now() - begun < 20.0
        await product.ready()
        after = product.submit()
        await product.until(after.done)
        assert isinstance(after.last, Done)
        assert "made no step" in str(product.runtime._telemetry.snapshot().events[0].text)
        assert product.runtime._telemetry.snapshot().degradation_level == 4
        assert after.events[0].degradation == 4, "callers are told"


async def test_an_engine_that_rests_is_not_given_up(start):
    async with start() as product:
        await product.ready()
        slow = product.submit(max_tokens=2, simulate={"pace": 25.0})
        await product.until(slow.done, step=0.2)
        assert isinstance(slow.last, Done)


async def test_after_a_death_less_of_the_engine_is_used_for_a_while(start):
    async with start() as product:
        await product.ready()
        crash = product.submit(simulate={"crash_at": 1})
        await product.until(crash.done)
        await product.ready()
        pool = product.runtime.pools["demo"]
        capacity = pool.planner.books.capacity
        assert (capacity.max_seqs, capacity.step_tokens, capacity.kv_tokens) == (2, 32, 3686)
        await product.clock.advance(1501.0)
        capacity = pool.planner.books.capacity
        assert (capacity.max_seqs, capacity.step_tokens, capacity.kv_tokens) == (4, 32, 4096)
        again = product.submit(simulate={"crash_at": 1})
        await product.until(again.done)
        await product.ready()
        assert pool.planner.books.capacity.step_tokens == 32, "half of what is configured, not of the half"


async def test_an_engine_that_dies_three_times_stays_restricted_until_its_deployment_changes(start):
    async with start() as product:
        await product.ready()
        for _ in range(3):
            crash = product.submit(simulate={"crash_at": 1})
            await product.until(crash.done)
            await product.ready()
        pool = product.runtime.pools["demo"]
        assert "again and again" in pool.message
        assert [event.kind for event in product.runtime.services.statistics.events].count("engine") == 1
        await product.clock.advance(4000.0)
        assert pool.planner.books.capacity.max_seqs == 1
        await Deployment.objects.filter(model="demo").aupdate(options=STEP | {"max_seqs": 6})
        await product.runtime.refresh()
        await product.until(lambda: pool.planner is not None and pool.planner.books.capacity.max_seqs == 6)
        assert (pool.planner.books.capacity.step_tokens, pool.message) == (64, "")


async def test_nothing_is_dispatched_while_the_engines_own_queue_does_not_empty(start):
    await Deployment.objects.filter(model="demo").aupdate(options=STEP | {"max_seqs": 8, "step_tokens": 8})
    async with start() as product:
        await product.ready()
        many = [product.submit(words=60, max_tokens=4) for _ in range(8)]
        await product.until(lambda: product.runtime.pools["demo"]._work.watch.crowded)
        late = product.submit(words=2)
        await product.until(lambda: late.kinds() == ["Accepted"])
        assert product.runtime.pools["demo"].flights[late.request.id].runs == 0
        metrics = await product.gateway.ask("metrics")
        assert 'harness_engine_queue_alarms_total{model="demo"} 1.0' in metrics
        assert 'harness_engine_waiting{model="demo"} 0.0' not in metrics
        await product.until(lambda: late.done() and all(answer.done() for answer in many))
        assert isinstance(late.last, Done)


async def test_the_engine_hears_deadline_rank_and_pace_of_a_request(start):
    heard = []

    def listening(name, model, options, *, clock, on_step, data_dir):
        engine = create_engine(name, model, options, clock=clock, on_step=on_step, data_dir=data_dir)
        generate = engine.generate

        def listen(request):
            heard.append(request)
            return generate(request)

        engine.generate = listen
        return engine

    async with start(engine_factory=listening) as product:
        await product.ready()
        answers = [product.submit(tier="vip"), product.submit(tier="free", stream=False)]
        await product.until(lambda: all(answer.done() for answer in answers))
    streamed, whole = sorted(heard, key=lambda request: request.terms.rank)
    vip, free = [await Tier.objects.aget(name=name) for name in ("vip", "free")]
    assert streamed.terms == Terms(vip.rank, vip.slo_tpot, whole=False)
    assert whole.terms == Terms(free.rank, free.slo_tpot, whole=True)
    assert streamed.priority == pytest.approx((streamed.arrival + vip.slo_ttft) * 1e6)
    assert whole.priority == pytest.approx((whole.arrival + free.slo_e2e + 3 * free.slo_tpot) * 1e6)


async def test_a_step_shaper_that_has_failed_is_counted(start):
    async with start() as product:
        await product.ready()
        answer = product.submit()
        await product.until(answer.done)
        report = StepReport(1.0, 0.01, 0, 1, running=1, waiting=0, kv_usage=0.0, shaper_failure="TypeError: no")
        product.runtime.pools["demo"]._work.stepped(report)
        assert 'harness_step_shaper_failures_total{model="demo"} 1.0' in await product.gateway.ask("metrics")


async def test_the_size_of_a_step_is_the_policys_where_the_deployment_names_none(start):
    plain = {name: value for name, value in STEP.items() if name != "step_tokens"}
    await Deployment.objects.filter(model="demo").aupdate(options=plain)
    await sync_to_async(config.update)({"policy": {"step_tokens": 48}})
    async with start() as product:
        await product.ready()
        assert product.runtime.pools["demo"].limits.capacity.step_tokens == 48


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
