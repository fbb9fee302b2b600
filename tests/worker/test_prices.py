"""FR-069: what a request costs is settled when it arrives, and no report changes afterwards."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from asgiref.sync import sync_to_async

from scheduler.models import Deployment
from tenants import reports
from tenants.models import Price, UsageRecord

from .conftest import WALL

CHANGE = 10.0  # seconds after the start of the clock
PROMPT, TOKENS = 500, 30


def price(per_thousand: str, at: float) -> None:
    rate = Decimal(per_thousand) * 1000
    rates = {"input_per_mtok": rate, "cached_input_per_mtok": rate, "output_per_mtok": rate}
    Price.objects.create(model="demo", effective_from=datetime.fromtimestamp(at, UTC), **rates)


@pytest.fixture
def prices(tiers: None) -> None:
    price("1.00", WALL - 86_400)
    price("0.80", WALL + CHANGE)
    options = {"step": {"base": 0.01}, "max_seqs": 4, "kv_tokens": 4096, "max_model_len": 1024}
    Deployment.objects.create(model="demo", engine="simulated", options=options)


def report() -> list[reports.Bucket]:
    span = reports.Span(int(WALL) - 86_400, int(WALL) + 86_400, "1d", "UTC", ("model", "key"))
    return list(reports.buckets(UsageRecord.objects.all(), span))


@pytest.mark.usefixtures("prices")
async def test_the_price_of_the_arrival_counts_also_for_what_ends_after_a_change(start):
    async with start() as product:
        await product.ready()
        await product.until(lambda: product.clock.now() > CHANGE - 0.05)
        spanning = product.submit(words=PROMPT, max_tokens=TOKENS)
        await product.until(lambda: bool(spanning.events), step=0.001)
        assert product.clock.now() < CHANGE
        reserved = product.runtime.pools["demo"].flights[spanning.request.id].price
        await product.until(lambda: product.clock.now() > CHANGE)
        after = product.submit(words=PROMPT, max_tokens=TOKENS)
        await product.until(lambda: spanning.done() and after.done())
        await product.settled()
    rows = {row.request_id: row async for row in UsageRecord.objects.all()}
    first, second = rows[spanning.request.id], rows[after.request.id]
    assert first.ended_at.timestamp() > WALL + CHANGE
    assert (first.charge, second.charge) == (Decimal("0.530"), Decimal("0.424"))
    assert (reserved.id, first.price_id != second.price_id) == (first.price_id, True)


@pytest.mark.usefixtures("prices")
async def test_later_prices_and_models_that_go_change_no_report(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(words=PROMPT, max_tokens=TOKENS)
        await product.until(answer.done)
        await product.settled()
    before = await sync_to_async(report)()
    assert [one.cost for bucket in before for one in bucket.groups.values()] == [Decimal("0.530")]
    await sync_to_async(price)("0.10", WALL + 1_000)
    await Deployment.objects.filter(model="demo").aupdate(model="renamed")
    assert await sync_to_async(report)() == before
    await Deployment.objects.all().adelete()
    assert await sync_to_async(report)() == before


@pytest.mark.usefixtures("prices")
async def test_a_price_that_goes_between_reservation_and_storing_is_charged_all_the_same(start):
    """FR-069: the row costs what was reserved; it cannot name the price any more."""
    async with start() as product:
        await product.ready()
        answer = product.submit(words=PROMPT, max_tokens=TOKENS)
        await product.until(lambda: bool(answer.events), step=0.001)
        await Price.objects.all().adelete()
        await product.until(answer.done)
        await product.settled()
    row = await UsageRecord.objects.aget()
    assert (row.status, row.charge, row.currency, row.price_id) == ("finished", Decimal("0.530"), "USD", None)
