"""Several answers to one prompt: field case FR-024, from Submit to the ledger."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.gateway import Delta, Done, Refused, Sampling
from tenants.models import UsageRecord

from .conftest import Answer, Product, budget, limit

pytestmark = pytest.mark.usefixtures("demo")


def ask(product: Product, n: int, max_tokens: int | None = 8, **changes: Any) -> Answer:
    return product.submit(words=5, sampling=Sampling(max_tokens=max_tokens, n=n), **changes)


def held(product: Product) -> int:
    """Tokens that live requests have reserved."""
    return sum(one.tokens for one in product.runtime.services.admission._reservations.values())


async def test_the_prompt_counts_once_and_every_answer_with_its_tokens(start):
    async with start() as product:
        await product.ready()
        answer = ask(product, 3, budgets=[budget(1000)])
        await product.until(lambda: held(product) > 0)
        assert held(product) == 5 + 3 * 8
        await product.until(answer.done)
        assert isinstance(answer.last, Done)
        assert (answer.last.prompt_tokens, answer.last.completion_tokens) == (5, 24)
        await product.settled()
        row = await UsageRecord.objects.aget()
        (state,) = (await product.gateway.limits(answer.request.caller)).limits
        product.assert_nothing_is_held()
    assert (row.prompt_tokens, row.completion_tokens, row.finish_reason) == (5, 24, "length")
    assert state.used == 5 + 24


async def test_every_answer_is_whole_and_ends_once_with_a_reason_of_its_own(start):
    async with start() as product:
        await product.ready()
        answer = ask(product, 3)
        await product.until(answer.done)
    texts = dict.fromkeys(range(3), "")
    ends = []
    for event in answer.events:
        if isinstance(event, Delta | Done):
            texts[event.index] += event.text
            ends += [(event.index, event.finish_reason)] if event.finish_reason else []
    assert set(texts.values()) == {" ".join(f"w{number}" for number in range(8))}
    assert sorted(ends) == [(index, "length") for index in range(3)]


async def test_what_all_answers_may_have_together_is_bounded_by_the_tier(start):
    async with start() as product:
        await product.ready()
        many, long = ask(product, 3, 30, tier="free"), ask(product, 2, 65, tier="free")
        most = ask(product, 3, None, tier="free")
        await product.until(lambda: all(one.done() for one in (many, long, most)))
    assert isinstance(many.last, Refused)
    assert (many.last.reason, many.last.param) == ("limit_too_large", "n")
    assert (long.last.reason, long.last.param) == ("limit_too_large", "max_tokens")
    assert most.last.completion_tokens == 3 * (64 // 3)


async def test_more_answers_than_the_model_makes_at_a_time_are_refused_before_rendering(start):
    async with start() as product:
        await product.ready()
        answer = ask(product, 5)
        await product.until(answer.done)
        assert (answer.last.reason, answer.last.param) == ("never_fits", "n")
        product.assert_nothing_is_held()


async def test_a_rate_must_cover_all_answers(start):
    async with start() as product:
        await product.ready()
        enough, short = (ask(product, 3, key=key, limits=[limit("tpm", value, owner=key)]) for key, value in _RATES)
        await product.until(lambda: enough.done() and short.done())
    assert isinstance(enough.last, Done)
    assert (short.last.reason, short.last.param) == ("limit_too_large", "max_tokens")


_RATES = (("enough", 5 + 3 * 8), ("short", 5 + 3 * 8 - 1))


async def test_answers_take_a_slot_each(start):
    """Four slots: three answers and two do not run at a time."""
    async with start() as product:
        await product.ready()
        first = ask(product, 3, 40)
        await product.until(lambda: "Delta" in first.kinds())
        second = ask(product, 2, 4)
        await product.until(lambda: "Accepted" in second.kinds())
        snapshot = product.runtime.pools["demo"].planner.snapshot(product.clock.now())
        assert (snapshot.in_flight, snapshot.tiers["vip"].running, snapshot.tiers["vip"].waiting) == (3, 3, 1)
        await product.until(second.done)
        assert first.done()


async def test_a_caller_who_leaves_takes_all_answers_along(start):
    """FR-034, v."""
    async with start() as product:
        await product.ready()
        answer = ask(product, 3, 400)
        await product.until(lambda: "Delta" in answer.kinds())
        await answer.hang_up()
        await product.settled()
        product.assert_nothing_is_held()
        row = await UsageRecord.objects.aget()
        told = sum(event.tokens for event in answer.events[-1:])
        engine = product.runtime.pools["demo"].engine
        assert engine is not None
        assert len(engine._machine.running) == 0  # type: ignore[attr-defined]
    assert row.status == "aborted"
    assert told <= row.completion_tokens <= told + 3


async def test_several_answers_never_give_way(start):
    async with start() as product:
        await product.ready()
        one, several = product.submit(max_tokens=40), ask(product, 2, 40)
        await product.until(lambda: "Delta" in one.kinds() and "Delta" in several.kinds())
        flights = product.runtime.pools["demo"].flights
        assert {flight.sequences: flight.resumable for flight in flights.values()} == {1: True, 2: False}
