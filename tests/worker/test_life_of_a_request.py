"""From Submit to the ledger, through the whole process."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from scheduler.gateway import Accepted, Done, Failed, Refused
from scheduler.worker.flight import Phase
from tenants.models import Price, UsageRecord

from .conftest import WALL, limit

pytestmark = pytest.mark.usefixtures("demo")


async def test_a_request_is_accepted_streamed_ended_and_billed(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(words=3, max_tokens=4)
        await product.until(answer.done)
        assert isinstance(answer.events[0], Accepted)
        assert isinstance(answer.last, Done)
        assert answer.text() == "w0 w1 w2 w3"
        assert (answer.last.prompt_tokens, answer.last.completion_tokens) == (3, 4)
        await product.settled()
        product.assert_nothing_is_held()
        row = await UsageRecord.objects.aget()
    assert (row.request_id, row.attempt, row.status, row.finish_reason) == ("req-1", 1, "finished", "length")
    assert (row.prompt_tokens, row.completion_tokens, row.attained) == (3, 4, True)
    assert (row.tenant_slug, row.key_name, row.tier, row.model) == ("acme", "prod", "vip", "demo")
    assert row.arrived_at <= row.dispatched_at < row.first_token_at < row.ended_at
    assert row.arrived_at.timestamp() == pytest.approx(WALL, abs=60)
    assert row.epoch == 1
    assert row.charge is None  # no price was set


async def test_the_charge_is_that_of_the_price_in_force_at_arrival(start):
    await Price.objects.acreate(
        model="demo",
        input_per_mtok=Decimal("1"),
        cached_input_per_mtok=Decimal("0.5"),
        output_per_mtok=Decimal("3"),
        effective_from=datetime.fromtimestamp(WALL - 1, UTC),
    )
    async with start() as product:
        await product.ready()
        answer = product.submit(words=10, max_tokens=5)
        await product.until(answer.done)
        await product.settled()
        row = await UsageRecord.objects.aget()
    assert row.charge == Decimal("0.000025")
    assert row.currency == "USD"


async def test_requests_that_run_together_say_so_in_batch_info(start):
    async with start() as product:
        await product.ready()
        answers = [product.submit(max_tokens=20) for _ in range(4)]
        await product.until(lambda: all(answer.done() for answer in answers))
        batches = [answer.last.batch for answer in answers]
        assert all(batch.batch_size > 3 for batch in batches)
        assert all(batch.compute_time == pytest.approx(0.2, abs=0.02) for batch in batches)
        assert all(0 <= batch.wait_time < 0.05 for batch in batches)


async def test_without_max_tokens_the_tier_bounds_the_answer(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(tier="free", max_tokens=None)
        await product.until(answer.done)
        assert (answer.last.completion_tokens, answer.last.finish_reason) == (64, "length")


async def test_more_output_than_the_tier_allows_is_refused_by_name(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(tier="free", max_tokens=65)
        await product.until(answer.done)
        assert (answer.last.reason, answer.last.param) == ("limit_too_large", "max_tokens")
        product.assert_nothing_is_held()


@pytest.mark.parametrize(("words", "max_tokens"), [(600, 4), (500, 100)])
async def test_a_prompt_that_does_not_fit_the_model_is_refused(start, words, max_tokens):
    async with start() as product:
        await product.ready()
        answer = product.submit(words=words, max_tokens=max_tokens)
        await product.until(answer.done)
        assert (answer.last.reason, answer.last.param) == ("context_length_exceeded", "messages")


async def test_an_absurdly_long_prompt_is_refused_without_being_rendered(start, monkeypatch):
    async with start() as product:
        await product.ready()
        monkeypatch.setattr(product.runtime.pools["demo"].engine, "render", None)
        content = [{"type": "text", "text": "x" * 70_000}]
        answer = product.submit(messages=({"role": "user", "content": content},))
        await product.until(answer.done)
        assert answer.last.reason == "context_length_exceeded"


async def test_what_the_engine_cannot_render_is_refused_with_its_field(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(simulate={"tokens": "many"})
        await product.until(answer.done)
        assert (answer.last.reason, answer.last.param) == ("invalid_prompt", "simulate")


async def test_a_request_over_its_rate_is_refused_with_the_time_to_wait(start):
    async with start() as product:
        await product.ready()
        first = product.submit(limits=[limit("rpm", 1)])
        await product.until(first.done)
        assert first.events[0].limits["remaining-requests"] == 0
        second = product.submit(limits=[limit("rpm", 1)])
        await product.until(second.done)
        assert second.last.reason == "limit_rpm"
        assert 55 < second.last.retry_after < 62


async def test_token_limits_settle_to_what_was_used(start):
    limits = [limit("tpm", 100)]
    async with start() as product:
        await product.ready()
        first = product.submit(words=10, max_tokens=80, limits=limits, simulate={"tokens": 5})
        await product.until(first.done)
        assert first.events[0].limits["remaining-tokens"] == 10
        second = product.submit(words=10, max_tokens=60, limits=limits)
        await product.until(second.done)
        assert isinstance(second.last, Done)


async def test_a_requests_own_deadline_is_as_tight_as_its_tier_allows(start):
    async with start() as product:
        await product.ready()
        asked = [product.submit(slo_threshold=seconds, simulate={"hang_at": 1}) for seconds in (0.1, 9.0)]
        flights = product.runtime.pools["demo"].flights
        await product.until(lambda: all(answer.request.id in flights for answer in asked))
        tight, loose = (flights[answer.request.id] for answer in asked)
        assert (tight.slo, loose.slo) == (0.5, 9.0)
        assert loose.deadline - loose.arrival == pytest.approx(9.0)


async def test_priority_lowers_the_tier_it_runs_as_and_not_the_one_that_is_billed(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(tier="vip", priority="low")
        await product.until(answer.done)
        assert answer.events[0].tier == "free"
        await product.settled()
        assert (await UsageRecord.objects.aget()).tier == "vip"


async def test_a_request_that_waits_too_long_is_answered_and_holds_nothing(start):
    async with start() as product:
        await product.ready()
        running = [product.submit(max_tokens=400) for _ in range(4)]
        await product.until(lambda: all(len(answer.events) > 1 for answer in running))
        waiting = product.submit(queue_timeout=1.0)
        await product.until(waiting.done)
        assert waiting.kinds() == ["Accepted", "Refused"]
        assert waiting.last.reason == "queue_timeout"
        assert product.runtime.services.admission.reserved() == 4


async def test_a_request_that_fails_in_the_engine_is_billed_for_what_it_delivered(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(max_tokens=10, simulate={"fail_at": 3})
        await product.until(answer.done)
        assert isinstance(answer.last, Failed)
        assert (answer.last.reason, answer.last.completion_tokens) == ("request_failed", 3)
        await product.settled()
        row = await UsageRecord.objects.aget()
        assert (row.status, row.reason, row.completion_tokens, row.attained) == ("failed", "request_failed", 3, False)


async def test_an_engine_that_misreports_usage_is_held_to_what_is_possible(start):
    async with start() as product:
        await product.ready()
        lie = {"prompt_tokens": 9999, "completion_tokens": 9999, "cached_tokens": 9999}
        answer = product.submit(words=3, max_tokens=4, simulate={"usage": lie})
        await product.until(answer.done)
        done = answer.last
        assert (done.prompt_tokens, done.completion_tokens, done.cached_tokens) == (3, 4, 3)


async def test_an_unknown_tier_is_looked_for_before_it_is_refused(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(tier="gold")
        await product.until(answer.done)
        assert isinstance(answer.last, Refused)
        assert (answer.last.reason, answer.last.retry_after) == ("engine_not_ready", 1.0)


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_to_requests_everything_is_given_back_and_each_ends_once(start, seed):
    """Invariant: after any mixture of ends nothing is held, and each dispatched request has exactly one row."""
    chance = random.Random(seed)
    async with start() as product:
        await product.ready()
        answers = []
        for _ in range(60):
            simulate = chance.choice([None, {"fail_at": 2}, {"tokens": 3}, {"hang_at": 1}])
            answers.append(
                product.submit(
                    max_tokens=chance.randint(1, 30),
                    tier=chance.choice(["vip", "free"]),
                    simulate=simulate,
                    queue_timeout=chance.choice([0.05, 5.0]),
                    limits=[limit("concurrency", 20)],
                )
            )
            if chance.random() < 0.5:
                await product.clock.advance(chance.random() * 0.05)
            if chance.random() < 0.4 or (simulate or {}).get("hang_at"):
                await chance.choice(answers).hang_up()
        for answer in answers:
            if not answer.done() and (answer.request.simulate or {}).get("hang_at"):
                await product.clock.advance(0.02)
                await answer.hang_up()
        await product.until(lambda: all(answer.done() for answer in answers))
        await product.settled()
        product.assert_nothing_is_held()
        rows = [row async for row in UsageRecord.objects.all()]
        assert len({row.request_id for row in rows}) == len(rows)
        finished = {answer.request.id for answer in answers if isinstance(answer.last, Done | Failed)}
        assert finished <= {row.request_id for row in rows}


async def test_requests_of_one_key_share_what_is_known_of_it(start):
    """Thousands may wait: limits and caller are kept once, and the task that took a request in is not kept."""
    async with start() as product:
        await product.ready()
        limits = [limit("rpm", 100), limit("concurrency", 50)]
        answers = [product.submit(max_tokens=300, limits=limits) for _ in range(6)]
        changed = product.submit(max_tokens=300, limits=[limit("rpm", 200)])
        await product.until(lambda: all(one.kinds()[:1] == ["Accepted"] for one in (*answers, changed)))
        flights = product.runtime.pools["demo"].flights
        first, *others = [flights[answer.request.id] for answer in answers]
        assert all(one.limits is first.limits and one.submit.caller is first.submit.caller for one in others)
        assert [one.value for one in flights[changed.request.id].limits] == [200]
        waiting = [one for one in flights.values() if one.phase is Phase.QUEUED]
        assert waiting and all(one.task is None for one in waiting)
