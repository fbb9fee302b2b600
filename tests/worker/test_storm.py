"""Random evictions, deaths and departures: every request ends once, its text has no gap and its bill is exact."""

from __future__ import annotations

import random

import pytest

from scheduler.core.types import Preempt
from scheduler.gateway import Delta, Done, Failed, Refused
from scheduler.worker.flight import Phase
from tenants.models import UsageRecord

pytestmark = pytest.mark.usefixtures("demo")

REQUESTS = 60


def words(count: int) -> str:
    return " ".join(f"w{number}" for number in range(count))


async def trouble(product, dice: random.Random, answers: list) -> None:
    """One random thing that may befall a scheduler."""
    pool = product.runtime.pools["demo"]
    running = [one for one in pool.flights.values() if one.phase is Phase.RUNNING]
    fate = dice.random()
    if fate < 0.45 and running and pool.engine is not None:
        victim = dice.choice(running)
        request = pool.planner.books.batcher.get(victim.id).request
        pool._work._act([Preempt(request, request)], product.clock.now())
    elif fate < 0.55:
        await dice.choice(answers).hang_up()
    elif fate < 0.60 and pool.engine is not None:
        pool.engine._die("it fell over")
    await product.clock.advance(dice.choice([0.0, 0.003, 0.01, 0.04]))


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_lost_repeated_or_billed_twice_in_a_storm(start, seed):
    dice = random.Random(seed)
    async with start() as product:
        await product.ready()
        answers = []
        while len(answers) < REQUESTS:
            if product.gateway.models().get("demo") != "ready":
                await product.clock.advance(0.05)
                continue
            answers.append(product.submit(max_tokens=dice.randint(1, 40), tier=dice.choice(["vip", "free"])))
            await trouble(product, dice, answers)
        await product.until(lambda: all(answer.done() for answer in answers), step=0.05)
        await product.until(lambda: not product.runtime.pools["demo"].flights)
        await product.settled()
        product.assert_nothing_is_held()
        billed = [row async for row in UsageRecord.objects.all()]
    rows = {row.request_id: row for row in billed}
    assert len(rows) == len(billed)
    assert any(isinstance(answer.last, Done) for answer in answers)
    for answer in answers:
        row = rows.get(answer.request.id)
        counts = [event.tokens for event in answer.events if isinstance(event, Delta)]
        assert counts == sorted(set(counts))
        assert words(40).startswith(answer.text())
        if isinstance(answer.last, Done):
            asked = answer.request.sampling.max_tokens
            assert (answer.text(), row.status, row.completion_tokens) == (words(asked), "finished", asked)
        elif isinstance(answer.last, Failed):
            assert row.completion_tokens == answer.last.completion_tokens == len(answer.text().split())
        elif row is not None:  # its caller had left, or was refused after it had run
            assert not isinstance(answer.last, Refused)
            assert row.completion_tokens >= len(answer.text().split())
