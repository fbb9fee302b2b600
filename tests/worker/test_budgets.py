"""Budgets in a scheduler process: exactly what fits is served, whoever shares it, whatever becomes of the process."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError
from django.db.models import Count, F, Sum
from django.utils import timezone

from scheduler.clock import ManualClock
from scheduler.core.budgets import Account, AccountKey
from scheduler.dead_letters import pack, unpack
from scheduler.gateway import BudgetSpec, Caller, Sampling, Submit
from scheduler.models import Deployment, SchedulerProcess
from scheduler.wire.messages import Done, Refused
from scheduler.worker import leases, ledger
from tenants import budgets as accounts
from tenants.models import BudgetAccount, BudgetAlert, BudgetLease, Price, UsageRecord

from .conftest import ADDRESS, STEP, WALL, Answer, Product, budget, limit
from .test_recovery import crashed

pytestmark = pytest.mark.usefixtures("demo")

DAY = 86_400
PROMPT, OUTPUT = 3, 4
EACH = PROMPT + OUTPUT  # tokens that a request of these tests reserves, and uses


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of these tests runs ahead of the database's threads: what a request waits for a lease is no matter."""
    monkeypatch.setattr(leases, "PATIENCE", 3600.0)


def outcomes(answers: Iterable[Answer]) -> list[str]:
    """`done`, or the reason of the refusal."""
    return ["done" if isinstance(one.last, Done) else one.last.reason for one in answers]


async def all_done(product: Product, answers: Iterable[Answer]) -> None:
    await product.until(lambda: all(answer.done() for answer in answers), step=0.02)


def served(answers: Iterable[Answer]) -> int:
    return outcomes(answers).count("done")


async def books() -> tuple[int, int, int]:
    """What accounts have as spent, what the ledger has, what leases hold."""
    account = await BudgetAccount.objects.aget()
    used = await UsageRecord.objects.aaggregate(sum=Sum(F("prompt_tokens") + F("completion_tokens")))
    held = await BudgetLease.objects.aaggregate(sum=Sum("amount"))
    return account.spent, used["sum"] or 0, held["sum"] or 0


def accounts_of(product: Product) -> list[Account]:
    """What the process knows of budgets."""
    return list(product.runtime.services.admission.budgets.accounts.values())


async def test_of_200_requests_at_once_exactly_the_50_that_a_budget_covers_are_served(start) -> None:
    async with start() as product:
        await product.ready()
        answers = [product.submit(budgets=[budget(50 * EACH)]) for _ in range(200)]
        await all_done(product, answers)
        assert (served(answers), outcomes(answers).count("limit_tenant_tokens")) == (50, 150)
        await product.settled()
        product.assert_nothing_is_held()
        assert await books() == (50 * EACH, 50 * EACH, 0)
    assert not await BudgetLease.objects.aexists()


# --- who shares it ----------------------------------------------------------------------------------------------------


async def test_two_web_workers_share_a_budget(start) -> None:
    async with start() as product:
        await product.ready()
        async with product.second_web() as other:
            answers = [product.submit(budgets=[budget(50 * EACH)], gateway=web) for web in (None, other) * 100]
            await all_done(product, answers)
        assert (served(answers), outcomes(answers).count("limit_tenant_tokens")) == (50, 150)


async def test_two_pools_of_a_scheduler_share_a_budget(start) -> None:
    await Deployment.objects.acreate(model="second", engine="simulated", options=STEP)
    async with start() as product:
        await product.ready()
        await product.ready("second")
        answers = [product.submit(budgets=[budget(50 * EACH)], model=model) for model in ("demo", "second") * 100]
        await all_done(product, answers)
        assert (served(answers), outcomes(answers).count("limit_tenant_tokens")) == (50, 150)


@asynccontextmanager
async def two_schedulers(start) -> AsyncIterator[list[Product]]:
    """One process for each of two models, on one database and one clock."""
    await Deployment.objects.acreate(model="second", engine="simulated", options=STEP)
    clock = ManualClock()
    async with (
        start(clock=clock, name="scheduler-a", pools=("demo",)) as first,
        start(clock=clock, name="scheduler-b", pools=("second",)) as second,
    ):
        await first.ready()
        await second.ready("second")
        yield [first, second]


async def test_two_schedulers_share_a_budget_to_the_last_token(start) -> None:
    async with two_schedulers(start) as (first, second):
        answers = []
        for number in range(100):
            answers.append(first.submit(budgets=[budget(50 * EACH)]))
            answers.append(second.submit(budgets=[budget(50 * EACH)], model="second", id=f"second-{number}"))
        await all_done(first, answers)
        assert set(outcomes(answers)) == {"done", "limit_tenant_tokens"}
        assert served(answers) == 50
        for product in (first, second):
            await product.settled()
            product.assert_nothing_is_held()
        assert await books() == (50 * EACH, 50 * EACH, 0)


async def test_a_scheduler_gives_what_another_one_asks_for(start) -> None:
    """The first one holds everything and uses little; the second one gets its part within the patience of a request."""
    async with two_schedulers(start) as (first, second):
        mine = first.submit(budgets=[budget(10 * EACH)])
        await all_done(first, [mine])
        theirs = [second.submit(budgets=[budget(10 * EACH)], model="second", id=f"second-{n}") for n in range(9)]
        await all_done(second, theirs)
        assert (served([mine]), served(theirs)) == (1, 9)
        last = [first.submit(budgets=[budget(10 * EACH)])]
        await all_done(first, last)
        assert outcomes(last) == ["limit_tenant_tokens"]


# --- whatever becomes of a request ------------------------------------------------------------------------------------


async def test_every_end_of_a_request_gives_back_what_it_did_not_use(start) -> None:
    """Finished early, failed, cancelled in the queue and in the engine, expired, and refused after its reservation."""
    async with start() as product:
        await product.ready()
        pays = {"budgets": [budget(10_000)]}
        early = product.submit(max_tokens=50, simulate={"tokens": 2}, **pays)
        failed = product.submit(max_tokens=50, simulate={"fail_at": 3}, **pays)
        await all_done(product, [early, failed])
        running = [product.submit(max_tokens=100, **pays) for _ in range(4)]
        await product.until(lambda: all("Delta" in one.kinds() for one in running))
        expired = product.submit(queue_timeout=0.05, **pays)
        waiting = product.submit(max_tokens=100, **pays)
        await product.until(lambda: "Accepted" in waiting.kinds())
        (account,) = accounts_of(product)
        assert account.reserved >= 5 * (PROMPT + 100)
        await waiting.hang_up()
        await product.until(expired.done)
        for one in running:
            await one.hang_up()
        await product.until(lambda: not product.runtime.pools["demo"].flights)
        assert account.reserved == 0
        await product.settled()
        product.assert_nothing_is_held()
        spent, used, held = await books()
        assert spent == used == account.used == 10_000 - account.lease == 10_000 - held
        assert used < 10_000
        assert outcomes([expired]) == ["queue_timeout"]


async def test_the_death_of_the_engine_does_not_cost_a_request_twice(start) -> None:
    async with start() as product:
        await product.ready()
        answer = product.submit(max_tokens=20, budgets=[budget(PROMPT + 20)])
        await product.until(lambda: "Delta" in answer.kinds())
        product.runtime.pools["demo"].engine._die("it fell over")
        await all_done(product, [answer])
        await product.settled()
        assert isinstance(answer.last, Done)
        assert await books() == (PROMPT + 20, PROMPT + 20, 0)


async def test_the_lease_of_a_process_that_was_killed_comes_back_with_its_books(start, tmp_path) -> None:
    key = AccountKey("tenant", "1", "", "tokens", "day", int(WALL // DAY * DAY))
    terms = accounts.Terms(1000, True, (), 1)
    move = accounts.Move(key, "1", key.starts + DAY, terms, 1, need=1)
    await sync_to_async(accounts.exchange)("scheduler", 1, [move])
    await SchedulerProcess.objects.acreate(
        name="scheduler", epoch=1, address=ADDRESS, lease_until=timezone.now(), started_at=timezone.now()
    )
    (tmp_path / "spool").mkdir()
    crashed(tmp_path / "spool", leased=(key,))
    async with start() as product:
        await product.ready()
        await product.until(_no_lease)
        spent, used, _ = await books()
        assert spent == used > 0
        fits = product.submit(max_tokens=1000 - spent - PROMPT - 500, budgets=[budget(1000)], tier="vip")
        await all_done(product, [fits])
        assert outcomes([fits]) == ["done"]
        assert (await books())[2] <= 1000 - spent


async def _no_lease() -> bool:
    return not await BudgetLease.objects.aexists()


async def test_what_a_process_that_stops_in_order_had_leased_is_free_at_once(start) -> None:
    async with start() as product:
        await product.ready()
        await all_done(product, [product.submit(budgets=[budget(2 * EACH)])])
    assert await books() == (EACH, EACH, 0)
    async with start() as product:
        await product.ready()
        answers = [product.submit(budgets=[budget(2 * EACH)]) for _ in range(2)]
        await all_done(product, answers)
        assert outcomes(answers) == ["done", "limit_tenant_tokens"]


# --- the database -----------------------------------------------------------------------------------------------------


async def test_while_the_database_is_away_requests_go_on_as_far_as_the_lease_reaches(start, monkeypatch) -> None:
    async with start() as product:
        await product.ready()
        await all_done(product, [product.submit(budgets=[budget(3 * EACH)])])

        def away(*args: Any) -> None:
            raise OperationalError("no such host")

        for name in ("exchange", "wishes"):
            monkeypatch.setattr(accounts, name, away)
        answers = [product.submit(budgets=[budget(3 * EACH)]) for _ in range(3)]
        await all_done(product, answers)
        assert sorted(outcomes(answers)) == ["done", "done", "limit_tenant_tokens"]
        unknown = product.submit(budgets=[budget(9 * EACH, period="month")])
        await all_done(product, [unknown])
        assert (unknown.last.reason, unknown.last.retry_after) == ("budget_unavailable", 5.0)
        monkeypatch.undo()
        monkeypatch.setattr(leases, "PATIENCE", 3600.0)
        known = product.submit(budgets=[budget(9 * EACH, period="month")])
        await all_done(product, [known])
        assert outcomes([known]) == ["done"]


async def test_an_outage_is_told_when_it_begins_and_when_it_is_over(start, monkeypatch, caplog) -> None:
    """A turn comes several times a second; the log is for what has changed."""
    caplog.set_level(logging.INFO)
    refused = 0

    def away(*args: Any) -> None:
        nonlocal refused
        refused += 1
        raise OperationalError("no such host")

    def told(words: str) -> int:
        return sum(f"leases of budgets {words}" in record.getMessage() for record in caplog.records)

    async with start() as product:
        await product.ready()
        for outage in (1, 2):
            await all_done(product, [product.submit(budgets=[budget(100 * EACH)])])
            with monkeypatch.context() as broken:
                broken.setattr(accounts, "wishes", away)
                await product.until(lambda: refused >= 5 * outage)  # noqa: B023 - awaited at once
                assert told("wait for the database") == outage
                assert told("have the database back") == outage - 1
            await product.until(lambda: told("have the database back") == outage)  # noqa: B023


async def test_fr_019_a_reservation_that_cannot_be_written_is_503_and_nothing_runs(start, monkeypatch) -> None:
    """FR-019."""

    def broken(*args: Any) -> None:
        raise OperationalError("disk I/O error")

    async with start() as product:
        await product.ready()
        monkeypatch.setattr(accounts, "exchange", broken)
        answer = product.submit(budgets=[budget(1000)])
        await all_done(product, [answer])
        assert (answer.last.reason, answer.last.retry_after) == ("budget_unavailable", 5.0)
        assert answer.kinds() == ["Refused"]
        product.assert_nothing_is_held()
        monkeypatch.undo()
        await product.settled()
    assert not await UsageRecord.objects.aexists()


# --- changes and periods ----------------------------------------------------------------------------------------------


async def test_a_lowered_budget_holds_from_the_first_request_that_knows_of_it(start) -> None:
    async with start() as product:
        await product.ready()
        await all_done(product, [product.submit(budgets=[budget(100 * EACH)]) for _ in range(5)])
        answers = [product.submit(budgets=[budget(7 * EACH)], version=2) for _ in range(4)]
        await all_done(product, answers)
        stale = product.submit(budgets=[budget(100 * EACH)], version=1)
        await all_done(product, [stale])
        assert (served(answers), outcomes([stale])) == (2, ["limit_tenant_tokens"])
        raised = product.submit(budgets=[budget(8 * EACH)], version=3)
        await all_done(product, [raised])
        assert outcomes([raised]) == ["done"]


async def test_a_budget_that_is_made_in_mid_period_counts_what_was_used_before(start) -> None:
    async with start() as product:
        await product.ready()
        await all_done(product, [product.submit() for _ in range(3)])
        await product.settled()
        answers = [product.submit(budgets=[budget(5 * EACH)]) for _ in range(4)]
        await all_done(product, answers)
        assert (served(answers), outcomes(answers).count("limit_tenant_tokens")) == (2, 2)


async def test_a_request_belongs_to_the_period_of_its_arrival(start) -> None:
    """It ends in the next one, which does not pay for it."""
    midnight = WALL // DAY * DAY
    clock = ManualClock()
    async with start(clock=clock, wall=lambda: midnight - 3.0 + clock.now()) as product:
        await product.ready()
        old = product.submit(max_tokens=200, budgets=[budget(203)], simulate={"pace": 0.02, "tokens": 200})
        await product.until(lambda: "Delta" in old.kinds())
        refused = product.submit(budgets=[budget(203)])
        await all_done(product, [refused])
        await product.until(lambda: clock.now() > 3.0)
        assert not old.done()
        fresh = product.submit(max_tokens=200, budgets=[budget(203)])
        await all_done(product, [old, fresh])
        await product.settled()
        assert outcomes([old, refused, fresh]) == ["done", "limit_tenant_tokens", "done"]
        assert 0.0 < refused.last.retry_after < 3.0
        spent = [account.spent async for account in BudgetAccount.objects.all()]
        assert spent == [203, 203]


@pytest.mark.parametrize(
    ("zone", "border"), [("Asia/Tokyo", "2026-07-31T15:00:00Z"), ("America/Los_Angeles", "2026-08-01T07:00:00Z")]
)
async def test_fr_016_a_month_ends_at_the_tenants_midnight(start, monkeypatch, zone: str, border: str) -> None:
    """FR-016."""
    ends = datetime.fromisoformat(border).timestamp()
    pays = {"budgets": [budget(EACH, period="month", zone=zone)]}
    clock = ManualClock()
    async with start(clock=clock, wall=lambda: ends - 60.0 + clock.now()) as product:
        await product.ready()
        first = product.submit(**pays)
        await all_done(product, [first])
        await product.until(lambda: clock.now() >= 58.5)
        before = product.submit(**pays)
        await product.until(before.done)
        await product.until(lambda: clock.now() >= 60.01)
        after = product.submit(**pays)
        await all_done(product, [after])
        assert outcomes([first, before, after]) == ["done", "limit_tenant_tokens", "done"], after.last
        assert f"It begins anew at {border}." in before.last.message
        await product.settled()
        spent = [account.spent async for account in BudgetAccount.objects.order_by("starts_at")]
        assert spent == [EACH, EACH]


# --- money ------------------------------------------------------------------------------------------------------------


async def price(**rates: str) -> Price:
    fields = {"input_per_mtok": "0", "cached_input_per_mtok": "0", "output_per_mtok": "0", **rates}
    return await Price.objects.acreate(model="demo", effective_from=datetime(2026, 1, 1, tzinfo=UTC), **fields)


def dollars(amount: str, **changes: Any) -> BudgetSpec:
    return budget(int(Decimal(amount).scaleb(10)), unit="USD", **changes)


async def test_fr_007_a_balance_of_money_is_spent_to_the_last_credit_and_no_further(start) -> None:
    """FR-007: 1000 credits, 1 per token of the answer, 100 tokens each: ten are served, by whichever key they come.

    At no instant is more spent or reserved than there is.
    """
    await price(output_per_mtok="1000000")
    async with start() as product:
        await product.ready()
        pays = {"max_tokens": 100, "budgets": [dollars("1000", period="total")]}
        answers = [product.submit(key=str(number % 5), **pays) for number in range(50)]

        def all_answered() -> bool:
            (account,) = accounts_of(product) or [None]
            assert account is None or account.used + account.reserved <= account.budget.limit
            return all(answer.done() for answer in answers)

        await product.until(all_answered, step=0.02)
        later = [product.submit(**pays) for _ in range(3)]
        await all_done(product, later)
        assert (served(answers), outcomes(answers).count("limit_tenant_spend")) == (10, 40)
        assert outcomes(later) == ["limit_tenant_spend"] * 3
        await product.settled()
        charged = await UsageRecord.objects.aaggregate(count=Count("id"), sum=Sum("charge"))
        account = await BudgetAccount.objects.aget()
        assert (charged["count"], charged["sum"], account.spent) == (10, Decimal(1000), 1000 * 10**10)


async def test_fr_008_without_max_tokens_what_the_tier_allows_is_reserved_and_no_more(start) -> None:
    """FR-008: the tier `free` allows 64 tokens: prompt and 64 are reserved, and what was used remains."""
    five = {"tokens": 5, "pace": 0.5}
    async with start() as product:
        await product.ready()
        both = [product.submit(max_tokens=None, tier="free", simulate=five, budgets=[budget(2 * 67)]) for _ in range(2)]
        await product.until(lambda: all("Accepted" in one.kinds() for one in both))
        (account,) = accounts_of(product)
        assert (account.reserved, account.free) == (2 * (PROMPT + 64), 0)
        await all_done(product, both)
        assert outcomes(both) == ["done", "done"]
        await product.settled()
        assert (await books())[0] == 2 * (PROMPT + 5)
        long = product.submit(words=60, max_tokens=None, tier="free", budgets=[budget(100)], version=2)
        await all_done(product, [long])
        assert outcomes([long]) == ["limit_tenant_tokens"]
        assert long.kinds() == ["Refused"]


async def test_fr_019_a_model_without_a_price_is_refused_to_budgets_of_money_and_free_of_charge_to_others(
    start,
) -> None:
    """FR-019."""
    async with start() as product:
        await product.ready()
        answers = [product.submit(budgets=[dollars("1")]) for _ in range(20)]
        await all_done(product, answers)
        assert set(outcomes(answers)) == {"no_price"}
        assert "no price in USD" in answers[0].last.message
        others = [
            product.submit(),
            product.submit(budgets=[budget(100)]),
            product.submit(budgets=[dollars("1", hard=False)]),
            product.submit(budgets=[dollars("1", model="another")]),
        ]
        await all_done(product, others)
        assert served(others) == 4
        await product.settled()
        rows = [(row.prompt_tokens, row.completion_tokens, row.charge) async for row in UsageRecord.objects.all()]
        assert rows == [(PROMPT, OUTPUT, None)] * 4


async def test_a_price_in_another_currency_is_no_price(start) -> None:
    await price(output_per_mtok="1", currency="EUR")
    async with start() as product:
        await product.ready()
        answer = product.submit(budgets=[dollars("1")])
        await all_done(product, [answer])
        assert outcomes([answer]) == ["no_price"]


async def test_what_is_reserved_and_charged_is_the_price_of_the_arrival(start) -> None:
    """A new price in between changes neither."""
    await price(output_per_mtok="1000000")
    async with start() as product:
        await product.ready()
        full = [product.submit(max_tokens=100, budgets=[dollars("500")]) for _ in range(5)]
        await product.until(lambda: sum("Accepted" in one.kinds() for one in full) == 5)
        await Price.objects.acreate(
            model="demo",
            input_per_mtok="0",
            cached_input_per_mtok="0",
            output_per_mtok="2000000",
            effective_from=datetime(2026, 2, 1, tzinfo=UTC),
        )
        await product.runtime.refresh()
        await all_done(product, full)
        await product.settled()
        account = await BudgetAccount.objects.aget()
        assert (served(full), account.spent) == (5, 500 * 10**10)


async def test_fr_018_zero_admits_nothing_unset_everything_and_a_refusal_names_its_scope(start) -> None:
    """FR-018."""
    await price(output_per_mtok="1000000")
    async with start() as product:
        await product.ready()
        ten = dollars("10", period="total")

        keys = {
            "7": [ten],
            "8": [ten, dollars("0", scope="key", owner="8")],
            "9": [ten, dollars("0.0005", scope="key")],
        }
        answers = [product.submit(max_tokens=1, key=key, budgets=budgets) for key, budgets in keys.items()]
        await all_done(product, answers)
        assert outcomes(answers) == ["done", "limit_key_spend", "limit_key_spend"]
        for answer in answers[1:]:
            assert answer.last.message.startswith("The budget of this key does not cover the request: limit 0.00")
        assert "limit 0.0005 USD" in answers[2].last.message
        more = [product.submit(max_tokens=1, budgets=[ten]) for _ in range(10)]
        await all_done(product, more)
        assert served(more) == 9
        (refused,) = [one.last for one in more if isinstance(one.last, Refused)]
        assert refused.reason == "limit_tenant_spend"
        assert refused.message.startswith("The budget of this tenant does not cover the request: limit 10.00 USD")


# --- soft budgets and alerts ------------------------------------------------------------------------------------------


async def test_a_soft_budget_alerts_once_and_refuses_nothing_also_after_a_restart(start, caplog) -> None:
    pays = {"budgets": [budget(4 * EACH, hard=False, alerts=(0.5,))]}
    for run in ("first", "second"):
        async with start() as product:
            await product.ready()
            answers = [product.submit(id=f"{run}-{number}", **pays) for number in range(5)]
            await all_done(product, answers)
            assert served(answers) == 5
            await product.until(lambda: all(one.is_current for one in accounts_of(product)))
            await product.settled()
    assert [alert.level async for alert in BudgetAlert.objects.order_by("level")] == [0.5, 1.0]
    assert (await BudgetAccount.objects.aget()).spent == 10 * EACH
    told = [record for record in caplog.records if "'event': 'budget'" in record.getMessage()]
    assert len(told) == 2


async def test_levels_of_a_hard_budget_are_counted_for_the_operator(start) -> None:
    async with start() as product:
        await product.ready()
        await all_done(product, [product.submit(budgets=[budget(2 * EACH, alerts=(0.5,))]) for _ in range(2)])
        await product.settled()
        assert 'harness_budget_alerts_total{scope="tenant"} 2.0' in await product.gateway.ask("metrics")


# --- parallel requests and rates --------------------------------------------------------------------------------------


ENDS = {
    "unknown model": {"model": "no-such-model"},
    "engine fails": {"simulate": {"fail_at": 2}},
    "engine hangs": {"simulate": {"hang_at": 2}},
    "too long": {"words": 600},
    "budget": {"budgets": [budget(0)]},
}


@pytest.mark.parametrize("end", ENDS)
async def test_fr_010_no_end_keeps_the_only_place_of_a_key(start, end: str) -> None:
    """FR-010 ii to iv, and refusals."""
    alone = [limit("concurrency", 1)]
    async with start() as product:
        await product.ready()
        await all_done(product, [product.submit(limits=alone, **ENDS[end])])
        await product.ready()  # an engine that hung was started again
        valid = product.submit(limits=alone)
        await all_done(product, [valid])
        assert outcomes([valid]) == ["done"]
        product.assert_nothing_is_held()


async def test_fr_010_a_caller_or_web_process_that_goes_frees_its_place_at_once(start) -> None:
    """FR-010 v, vi."""
    alone = [limit("concurrency", 1)]
    async with start() as product:
        await product.ready()
        hanging = product.submit(limits=alone, simulate={"hang_at": 2})
        await product.until(lambda: "Delta" in hanging.kinds())
        await hanging.hang_up()
        async with product.second_web() as other:
            held = product.submit(limits=alone, simulate={"hang_at": 2}, gateway=other)
            await product.until(lambda: "Delta" in held.kinds())
        valid = product.submit(limits=alone)
        await all_done(product, [valid])
        assert outcomes([valid]) == ["done"]
        product.assert_nothing_is_held()


async def test_fr_011_a_stream_holds_its_place_to_its_last_byte_or_its_abort(start) -> None:
    """FR-011: at no time are two of them in the engine."""
    alone = [limit("concurrency", 1)]
    async with start() as product:
        await product.ready()
        first = product.submit(limits=alone, max_tokens=50, simulate={"pace": 0.1, "tokens": 50})
        await product.until(lambda: product.clock.now() > 1.0 and "Delta" in first.kinds())
        second = product.submit(limits=alone)
        await product.until(second.done)
        assert second.kinds() == ["Refused"]
        await first.hang_up()
        third = product.submit(limits=alone)
        await all_done(product, [third])
        assert outcomes([second, third]) == ["limit_concurrency", "done"]
        product.assert_nothing_is_held()


async def test_fr_014_a_restart_and_more_web_processes_give_nobody_a_second_allowance(start) -> None:
    """FR-014: 30 a minute and a budget for 30 answers, over two web processes, one of which goes, and a restart of the
    scheduler. What is left falls with every request, whichever process it came by.
    """
    clock = ManualClock()
    rate = [limit("rpm", 30)]
    async with start(clock=clock) as product:
        await product.ready()
        async with product.second_web() as other:
            answers = [product.submit(limits=rate, gateway=web) for web in (None, other) * 45]
            await all_done(product, answers)
        assert (served(answers), outcomes(answers).count("limit_rpm")) == (30, 60)
        left = [one.events[0].limits["remaining-requests"] for one in answers if outcomes([one]) == ["done"]]
        assert sorted(left, reverse=True) == list(range(29, -1, -1))
        async with product.second_web() as fresh:
            refused = product.submit(limits=rate, gateway=fresh)
            await all_done(product, [refused])
            assert (refused.last.reason, refused.last.limits["remaining-requests"]) == ("limit_rpm", 0)
    async with start(clock=clock) as product:
        await product.ready()
        again = [product.submit(limits=rate) for _ in range(10)]
        await all_done(product, again)
        assert outcomes(again) == ["limit_rpm"] * 10
        paid = [product.submit(id=f"paid-{number}", budgets=[budget((30 + 30) * EACH)]) for number in range(60)]
        await all_done(product, paid)
        assert served(paid) == 30


async def test_fr_010_a_ledger_that_is_slow_keeps_no_place(start, monkeypatch) -> None:
    """FR-010 vii."""

    def away(*args: Any, **options: Any) -> None:
        raise OperationalError("no such host")

    alone = [limit("concurrency", 1)]
    async with start() as product:
        await product.ready()
        with monkeypatch.context() as broken:
            broken.setattr(ledger, "record_usage", away)
            for _ in range(2):
                answer = product.submit(limits=alone, budgets=[budget(2 * EACH)])
                await all_done(product, [answer])
                assert outcomes([answer]) == ["done"]
        await product.settled()
        assert await books() == (2 * EACH, 2 * EACH, 0)


def test_a_dead_letter_that_is_retried_is_paid_by_the_same_budgets() -> None:
    caller = Caller("1", "acme", "7", "vip", (), 3, "prod", (budget(5, alerts=(0.5,)),))
    submit = Submit("req-1", 1, 0.0, caller, "demo", ({"role": "user", "content": "hi"},), Sampling(), True)
    assert unpack(pack(submit), "req-1") == submit
