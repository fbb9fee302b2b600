"""From the spool to the database: endings become usage rows with their charge, which accounts of budgets pay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from decimal import Decimal

from scheduler.worker.settlement import StoreError
from scheduler.worker.spool import Ending
from tenants import budgets, pricing
from tenants.budgets import Charged
from tenants.database import DatabaseAway, DatabaseThread
from tenants.ledger import LedgerError, Recorded, UsageRow, record_usage
from tenants.models import Price
from tenants.pricing import TokenPrice


class Ledger:
    """The `Store` of a scheduler process: one thread, one connection. `on_charged` hears what accounts have paid."""

    def __init__(self, process: str, on_charged: Callable[[Charged], None]) -> None:
        self._process = process
        self._on_charged = on_charged
        self._thread = DatabaseThread("ledger")

    async def store(self, endings: Sequence[Ending]) -> list[int]:
        """See `settlement.Store`."""
        try:
            refused, charged = await self._thread.run(_store, self._process, endings)
        except DatabaseAway as error:
            raise StoreError(f"the database is away ({type(error).__name__})") from error
        self._on_charged(charged)
        return refused

    async def release(self, epoch: int) -> None:
        """All usage of an epoch is in the ledger: what it had leased of budgets comes back. Raises StoreError."""
        try:
            await self._thread.run(budgets.release, self._process, epoch)
        except DatabaseAway as error:
            raise StoreError(f"the database is away ({type(error).__name__})") from error

    async def aclose(self) -> None:
        await self._thread.aclose()


def _store(process: str, endings: Sequence[Ending]) -> tuple[list[int], Charged]:
    """Write all; when the ledger does not take one of them, each for itself. Answers the positions not taken."""
    leased = {(one.intent.request_id, one.intent.attempt): one.intent.leased for one in endings if one.intent.leased}

    def record(some: Sequence[Ending]) -> Recorded:
        return record_usage(usage_rows(some), process=process, leased=leased)

    try:
        return [], record(endings).charged
    except LedgerError:
        charged, refused = Charged(), []
        for position, ending in enumerate(endings):
            try:
                charged.add(record([ending]).charged)
            except LedgerError:
                refused.append(position)
        return refused, charged


def usage_rows(endings: Sequence[Ending]) -> list[UsageRow]:
    """The ledger's rows of endings, each at the price that it was reserved at.

    A price that has been removed meanwhile is charged all the same; the row cannot name it any more.
    """
    reserved = {ending.intent.price.id for ending in endings if ending.intent.price is not None}
    named = set(Price.objects.filter(pk__in=reserved).values_list("pk", flat=True))
    return [_usage_row(ending, named) for ending in endings]


def _usage_row(ending: Ending, prices: Collection[int]) -> UsageRow:
    """`prices`: the ids of those that are still there."""
    intent = ending.intent
    price = intent.price
    return UsageRow(
        request_id=intent.request_id,
        attempt=intent.attempt,
        tenant_id=intent.tenant_id,
        tenant_slug=intent.tenant_slug,
        key_id=intent.key_id,
        key_name=intent.key_name,
        project=intent.project,
        tier=intent.tier,
        model=intent.model,
        deployment=intent.deployment,
        status=ending.status,
        finish_reason=ending.finish_reason,
        reason=ending.reason,
        stream=intent.stream,
        prompt_tokens=ending.prompt_tokens,
        cached_tokens=ending.cached_tokens,
        completion_tokens=ending.completion_tokens,
        arrived_at=_instant(intent.arrived_at),
        dispatched_at=_instant(intent.dispatched_at),
        first_token_at=None if ending.first_token_at is None else _instant(ending.first_token_at),
        ended_at=_instant(ending.ended_at),
        wait_time=max(intent.dispatched_at - intent.arrived_at, 0.0),
        compute_time=max(ending.ended_at - intent.dispatched_at, 0.0),
        batch_id=intent.batch_id,
        batch_size=ending.batch_size,
        attained=ending.attained,
        miss_reason=ending.miss_reason,
        engine_seconds=ending.engine_seconds,
        policy_version=intent.policy_version,
        price_id=price.id if price is not None and price.id in prices else None,
        charge=None if price is None else _charge(price, ending),
        currency="" if price is None else price.currency,
        epoch=intent.epoch,
    )


def _charge(price: TokenPrice, ending: Ending) -> Decimal:
    return pricing.charge(price, ending.prompt_tokens, ending.cached_tokens, ending.completion_tokens)


def _instant(unix: float) -> datetime:
    return datetime.fromtimestamp(unix, UTC)
