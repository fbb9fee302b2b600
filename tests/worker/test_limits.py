"""What a caller is told of its limits by scheduler processes: one truth, whoever asks, and nobody else's."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import OperationalError

from scheduler.gateway import Caller, Gateway, GatewayUnavailable, LimitSpec
from scheduler.limits import merged
from scheduler.models import Deployment
from scheduler.wire.messages import Limits
from scheduler.worker import leases
from tenants import budgets as accounts

from .conftest import STEP, WALL, Product, budget, limit
from .test_budgets import EACH, all_done, two_schedulers

pytestmark = pytest.mark.usefixtures("demo")

LIMITS = [limit(kind, 1000, scope="tenant", owner="1") for kind in ("rpm", "tpm", "concurrency")]
MONTH = budget(1000, period="month", zone="Asia/Tokyo")
SOFT = budget(500, period="total", hard=False)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of these tests runs ahead of the database's threads: what is waited for a lease is no matter."""
    monkeypatch.setattr(leases, "PATIENCE", 3600.0)


def caller(**changes: Any) -> Caller:
    fields: dict[str, Any] = {"tenant": "1", "tenant_slug": "acme", "key": "7", "tier": "vip", "version": 1}
    return Caller(**(fields | {"limits": tuple(LIMITS), "budgets": (MONTH, SOFT)} | changes))


async def ask(product: Product, who: Caller, gateway: Gateway | None = None) -> Limits:
    """The answer; time goes on meanwhile."""
    task = asyncio.ensure_future((gateway or product.gateway).limits(who))
    await product.until(task.done)
    return task.result()


def figures(answer: Limits) -> list[tuple[str, int, int, int]]:
    """Kind, used, reserved and remaining."""
    return [(one.kind, one.used, one.reserved, one.remaining) for one in answer.limits]


async def test_two_web_workers_and_two_pools_show_the_same_numbers(start) -> None:
    await Deployment.objects.acreate(model="second", engine="simulated", options=STEP)
    async with start() as product:
        await product.ready()
        await product.ready("second")
        own = {"limits": LIMITS, "budgets": [MONTH, SOFT]}
        await all_done(product, [product.submit(model=model, **own) for model in ("demo", "second")])
        await product.settled()  # a soft budget is charged when the ledger has the rows
        alive = product.submit(max_tokens=400, **own)
        await product.until(lambda: bool(alive.events))
        async with product.second_web() as other:
            answers = [await ask(product, caller(), web) for web in (None, other)]
        used, reserved = 2 * EACH, 3 + 400
        for answer in answers:
            assert figures(answer) == [
                ("rpm", 3, 0, 997),
                ("tpm", used, reserved, 1000 - used - reserved),
                ("concurrency", 1, 0, 999),
                ("budget", used, reserved, 1000 - used - reserved),
                ("budget", used, reserved, 500 - used - reserved),
            ]
            queues = [(queue.model, queue.waiting, queue.running, queue.expected_wait) for queue in answer.queues]
            assert queues == [("demo", 0, 1, 0.0), ("second", 0, 0, 0.0)]
        await alive.hang_up()


async def test_a_budget_resets_at_the_tenants_own_midnight_and_a_rate_within_its_minute(start) -> None:
    """FR-016."""
    async with start() as product:
        await product.ready()
        await all_done(product, [product.submit(limits=LIMITS, budgets=[MONTH])])
        answer = await ask(product, caller())
    resets = {one.kind + one.period: one.reset for one in answer.limits}
    local = datetime.fromtimestamp(resets["budgetmonth"] or 0.0, ZoneInfo("Asia/Tokyo"))
    assert (local.day, local.hour, local.minute, local.second) == (1, 0, 0, 0)
    assert local > datetime.fromtimestamp(answer.at, UTC) > datetime.fromtimestamp(WALL, UTC)
    assert answer.at < (resets["rpmminute"] or 0.0) <= answer.at + 62
    assert (resets["concurrency"], resets["budgettotal"]) == (None, None)


async def test_another_tenant_sees_nothing_of_it(start) -> None:
    async with start() as product:
        await product.ready()
        await all_done(product, [product.submit(limits=LIMITS, budgets=[MONTH, SOFT])])
        outsider = caller(
            tenant="2",
            key="8",
            limits=(LimitSpec("tenant", "2", "", "rpm", 1000),),
            budgets=(budget(1000, owner="2", period="month"),),
        )
        assert figures(await ask(product, outsider)) == [("rpm", 0, 0, 1000), ("budget", 0, 0, 1000)]


async def test_asking_counts_and_holds_nothing(start) -> None:
    async with start() as product:
        await product.ready()
        first, again = [figures(await ask(product, caller())) for _ in range(2)]
        assert first == again
        assert {(used, reserved) for _, used, reserved, _ in first} == {(0, 0)}
        product.assert_nothing_is_held()


async def test_two_schedulers_together_know_all(start) -> None:
    async with two_schedulers(start) as (first, second):
        own = {"limits": LIMITS, "budgets": [MONTH, SOFT]}
        await all_done(first, [first.submit(**own), second.submit(model="second", id="second-1", **own)])
        for product in (first, second):
            await product.settled()
        both = [await ask(product, caller()) for product in (first, second)]
        for answer in (merged(both), merged(both[::-1])):
            used = 2 * EACH
            assert figures(answer) == [
                ("rpm", 2, 0, 998),
                ("tpm", used, 0, 1000 - used),
                ("concurrency", 0, 0, 1000),
                ("budget", used, 0, 1000 - used),
                ("budget", used, 0, 500 - used),
            ]
            assert {queue.model for queue in answer.queues} == {"demo", "second"}


async def test_what_only_the_database_knows_is_not_guessed_while_it_is_away(start, monkeypatch) -> None:
    """What this process has all of on lease it knows itself."""
    async with start() as product:
        await product.ready()
        await all_done(product, [product.submit(budgets=[MONTH])])

        def away(*_: Any) -> None:
            raise OperationalError

        monkeypatch.setattr(accounts, "exchange", away)
        (month,) = (await ask(product, caller(limits=(), budgets=(MONTH,)))).limits
        assert (month.used, month.remaining) == (EACH, 1000 - EACH)
        with pytest.raises(GatewayUnavailable, match="cannot be checked"):
            await ask(product, caller(limits=(), budgets=(MONTH, SOFT)))
        monkeypatch.undo()


async def test_the_queue_is_that_of_the_own_tier(start) -> None:
    async with start() as product:
        await product.ready()
        running = [product.submit(max_tokens=400) for _ in range(4)]
        await product.until(lambda: all(answer.events for answer in running))
        waiting = [product.submit(tier="free") for _ in range(2)]
        await product.until(lambda: all(answer.events for answer in waiting))
        (free,) = (await ask(product, caller(tier="free"))).queues
        assert (free.model, free.waiting, free.running, free.expected_wait) == ("demo", 2, 0, None)
        (vip,) = (await ask(product, caller())).queues
        assert (vip.waiting, vip.running, vip.expected_wait) == (0, 4, 0.0)
        for answer in [*running, *waiting]:
            await answer.hang_up()
