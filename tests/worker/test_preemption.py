"""A running request that gives way to a better one, and goes on: no token repeated or lost, one bill."""

from __future__ import annotations

from dataclasses import replace

import pytest
from asgiref.sync import sync_to_async

from scheduler import config
from scheduler.core.types import Preempt, Reason
from scheduler.engines.simulated import read_record
from scheduler.gateway import Done, Failed, Sampling
from scheduler.models import Deployment
from scheduler.worker.flight import Phase
from scheduler.worker.runs import is_resumable
from scheduler.worker.spool import Spool
from tenants.models import Tier, UsageRecord

from .conftest import STEP

pytestmark = pytest.mark.usefixtures("demo")


def words(count: int) -> str:
    """What the simulated engine answers."""
    return " ".join(f"w{number}" for number in range(count))


def work(product):
    return product.runtime.pools["demo"]._work


def flight(product, answer):
    return work(product).flights.get(answer.request.id)


def evict(product, victim, beneficiary=None):
    """What the policy does as a last resort."""
    request = work(product).planner.books.batcher.get(victim.request.id).request
    work(product)._act([Preempt(request, beneficiary or request)], product.clock.now())


async def running(product, *, tokens: int = 3, **changes):
    """A request that has delivered some tokens."""
    answer = product.submit(**({"max_tokens": 40, "words": 5} | changes))
    await product.until(lambda: (one := flight(product, answer)) is not None and one.tokens >= tokens)
    return answer


async def returned(product, answer):
    """The request has left the engine."""
    traces = product.runtime.services.traces
    await product.until(
        lambda: "returned" in [entry.event for entry in traces.find(answer.request.id).entries], step=0.001
    )


async def test_an_urgent_request_of_the_best_rank_takes_the_place_of_one_that_goes_on_later(start):
    await Tier.objects.filter(name="free").aupdate(preemptible=True, max_tokens=400)
    await Deployment.objects.filter(model="demo").aupdate(options=STEP | {"max_seqs": 2})
    await sync_to_async(config.update)({"policy": {"name": "batching_aware"}})
    async with start() as product:
        await product.ready()
        slow = [await running(product, tier="free", max_tokens=300) for _ in range(2)]
        urgent = product.submit(tier="vip", max_tokens=5)
        await product.until(urgent.done)
        assert isinstance(urgent.last, Done)
        assert urgent.last.batch.wait_time < 0.5
        await product.until(lambda: all(answer.done() for answer in slow))
        assert [answer.text() for answer in slow] == [words(300)] * 2
        await product.settled()
        product.assert_nothing_is_held()
        metrics = await product.gateway.ask("metrics")
    assert 'harness_preemptions_total{tier="free"} 1.0' in metrics


async def test_the_stream_goes_on_where_it_stopped_and_is_billed_once(start):
    async with start() as product:
        await product.ready()
        answer = await running(product, simulate={"usage": {"cached_tokens": 2}})
        batch = flight(product, answer).dispatch.batch_id
        evict(product, answer)
        await returned(product, answer)
        await product.until(answer.done)
        assert isinstance(answer.last, Done)
        assert answer.text() == words(40)
        tokens = [event.tokens for event in answer.events if type(event).__name__ == "Delta"]
        assert tokens == sorted(set(tokens))
        assert (answer.last.prompt_tokens, answer.last.completion_tokens, answer.last.cached_tokens) == (5, 40, 2)
        assert answer.last.batch.batch_id == batch
        await product.settled()
        product.assert_nothing_is_held()
        row = await UsageRecord.objects.aget()
        record = read_record(product.options.data_dir, answer.request.id)
    assert (row.status, row.prompt_tokens, row.completion_tokens, row.cached_tokens) == ("finished", 5, 40, 2)
    assert row.batch_id == batch
    assert row.wait_time + row.compute_time == pytest.approx((row.ended_at - row.arrived_at).total_seconds(), abs=1e-3)
    assert row.engine_seconds == pytest.approx(0.01 * 42, abs=0.03)  # 40 steps, and the prompt twice
    assert (record["tokens"], record["outcome"]) == (40, "length")


async def test_a_request_is_evicted_before_its_first_token_as_well(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(max_tokens=10)
        await product.until(lambda: (one := flight(product, answer)) is not None and one.phase is Phase.RUNNING, step=0)
        evict(product, answer)
        await product.until(answer.done)
        assert answer.text() == words(10)


async def test_a_text_that_holds_something_back_is_not_cut_there(start):
    async with start() as product:
        await product.ready()
        texts = ["a", "", "", "b", "c", "d"]
        answer = await running(product, tokens=2, max_tokens=20, simulate={"text": texts})
        assert flight(product, answer).whole is False
        evict(product, answer)
        await returned(product, answer)
        assert flight(product, answer).tokens >= 4
        await product.until(answer.done)
        assert answer.text() == "abcd"


async def test_who_leaves_while_the_request_waits_again_is_billed_for_what_was_delivered(start):
    async with start() as product:
        await product.ready()
        answer = await running(product)
        work(product).suspend()
        evict(product, answer)
        await returned(product, answer)
        delivered = flight(product, answer).tokens
        await answer.hang_up()
        await product.settled()
        product.assert_nothing_is_held()
        row = await UsageRecord.objects.aget()
    assert (row.status, row.reason, row.completion_tokens) == ("aborted", "client_gone", delivered)


async def test_who_leaves_in_the_moment_of_the_eviction_ends_once(start):
    async with start() as product:
        await product.ready()
        answer = await running(product)
        evict(product, answer)
        flight(product, answer).pool.cancel(flight(product, answer))
        await answer.hang_up()
        await product.settled()
        product.assert_nothing_is_held()
        row = await UsageRecord.objects.aget()
    assert (row.status, row.reason) == ("aborted", "client_gone")


async def test_an_engine_that_dies_in_the_moment_of_the_eviction_loses_nothing(start):
    async with start() as product:
        await product.ready()
        answer = await running(product)
        evict(product, answer)
        product.runtime.pools["demo"].engine._die("it fell over")
        await product.until(answer.done)
        assert answer.text() == words(40)
        await product.settled()
        assert await UsageRecord.objects.acount() == 1


async def test_what_finishes_in_the_moment_of_the_eviction_has_finished(start, monkeypatch):
    async with start() as product:
        await product.ready()
        answer = await running(product, max_tokens=8)
        engine = product.runtime.pools["demo"].engine
        listener = engine._on_step

        def evict_with_the_last_token(report):
            if not report.running:  # the end is on its way to the run, which has not seen it
                evict(product, answer)
            listener(report)

        monkeypatch.setattr(engine, "_on_step", evict_with_the_last_token)
        await product.until(answer.done)
        assert isinstance(answer.last, Done)
        assert answer.text() == words(8)
        await product.settled()
        product.assert_nothing_is_held()


async def test_a_request_that_waits_again_ends_with_the_process(start):
    async with start() as product:
        await product.ready()
        answer = await running(product)
        work(product).suspend()
        evict(product, answer)
        await returned(product, answer)
        delivered = flight(product, answer).tokens
        stopping = product.stop()
        await product.until(stopping.done)
        assert isinstance(answer.last, Failed)
        assert answer.last.reason == "shutdown"
        row = await UsageRecord.objects.aget()
    assert (row.status, row.reason, row.completion_tokens) == ("aborted", "shutdown", delivered)


async def test_a_request_that_leaves_the_engine_while_that_is_taken_away_still_finishes(start):
    async with start() as product:
        await product.ready()
        answer = await running(product)
        stopping = product.stop()
        evict(product, answer)
        await product.until(stopping.done)
        assert answer.text() == words(40)


async def test_the_books_are_exact_whenever_the_process_is_killed(start):
    async with start() as product:
        await product.ready()
        answer = await running(product)
        work(product).suspend()
        evict(product, answer)
        await returned(product, answer)
        settlement = product.runtime.services.settlement
        (intent,) = Spool(settlement._spool.path).intents().values()
        assert (intent.request_id, intent.prompt_tokens) == (answer.request.id, 5)
        assert settlement.open_intents() == 1
        await answer.hang_up()


@pytest.mark.parametrize(
    ("changes", "resumable"),
    [
        ({}, True),
        ({"sampling": Sampling(max_tokens=4, temperature=0.7, top_p=0.9, logit_bias={5: 1.0})}, True),
        ({"sampling": Sampling(seed=1)}, False),
        ({"sampling": Sampling(presence_penalty=0.1)}, False),
        ({"sampling": Sampling(frequency_penalty=0.1)}, False),
        ({"sampling": Sampling(stop=("\n",))}, False),
        ({"simulate": {"tokens": 4}}, True),
        ({"simulate": {"crash_at": 4}}, False),
    ],
)
async def test_only_what_does_not_depend_on_the_place_of_the_cut_may_be_cut(start, changes, resumable):
    async with start() as product:
        await product.ready()
        answer = product.submit(**changes)
        assert is_resumable(answer.request) is resumable
        await answer.hang_up()


async def test_a_degraded_service_gives_the_tokens_that_it_has_decided_to_give(start, monkeypatch):
    async with start() as product:
        await product.ready()
        planner = work(product).planner
        arrive = planner.arrive
        monkeypatch.setattr(planner, "arrive", lambda request, now: arrive(replace(request, max_tokens=6), now))
        answer = product.submit(max_tokens=50)
        await product.until(answer.done)
        assert (answer.last.completion_tokens, answer.last.finish_reason) == (6, "length")


async def test_what_a_policy_refuses_is_our_overload_with_advice(start):
    await Tier.objects.filter(name="free").aupdate(on_infeasible="reject", slo_ttft=0.5)
    await sync_to_async(config.update)({"policy": {"name": "batching_aware"}})
    async with start() as product:
        await product.ready()
        await running(product, tier="vip", max_tokens=200)
        many = [product.submit(tier="free", words=400, max_tokens=50) for _ in range(30)]
        await product.until(
            lambda: any(getattr(answer.last, "reason", "") == Reason.DEADLINE_INFEASIBLE for answer in many)
        )
        refused = next(answer for answer in many if getattr(answer.last, "reason", "") == Reason.DEADLINE_INFEASIBLE)
        assert refused.last.retry_after is not None
        tier = product.runtime._telemetry.snapshot().tiers["free"]
        assert tier.judged > tier.attained


async def test_what_even_an_idle_engine_could_not_serve_in_time_is_refused_without_advice_to_try_again(start):
    await Tier.objects.filter(name="free").aupdate(on_infeasible="reject", slo_ttft=0.001)
    await sync_to_async(config.update)({"policy": {"name": "batching_aware"}})
    async with start() as product:
        await product.ready()
        answer = product.submit(tier="free", words=400, max_tokens=5)
        await product.until(answer.done)
        assert (answer.last.reason, answer.last.retry_after) == (Reason.DEADLINE_UNREACHABLE, None)
        assert "for this request alone" in answer.last.message
