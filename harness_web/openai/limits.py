"""`GET /v1/limits`: what a key may use, and what of that is left."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
from msgspec.structs import asdict

from harness_web.openai.access import authenticate
from harness_web.openai.errors import ApiError
from harness_web.openai.exchange import Exchange
from harness_web.openai.views import caller
from harness_web.runtime import WebRuntime
from scheduler.gateway import GatewayUnavailable, LimitState
from tenants.auth import Principal
from tenants.models.fields import DECIMALS

COUNTED = ("requests", "tokens")  # units that are no currency


class ShownLimit(msgspec.Struct):
    """`reset_at` and `reset_seconds`: when nothing is used any more; null where that is not known, or never."""

    scope: str
    model: str | None  # null: all models
    kind: str
    unit: str
    period: str | None
    hard: bool  # refuses what exceeds it; a soft budget only tells
    limit: int | str  # money is exact, as text
    used: int | str
    reserved: int | str
    remaining: int | str
    reset_at: str | None
    reset_seconds: float | None


class ShownLimits(msgspec.Struct):
    at: str
    tenant: str
    key: str
    tier: str
    limits: list[ShownLimit]
    queues: list[dict[str, Any]]  # the fields of `QueueState`, by model


async def read_limits(exchange: Exchange, runtime: WebRuntime) -> None:
    principal = visible(await authenticate(exchange, runtime, "inference"))
    try:
        state = await runtime.gateway.limits(caller(principal))
    except GatewayUnavailable as error:
        raise ApiError("engine_not_ready", str(error)) from None
    hard = [True] * len(principal.limits) + [budget.hard for budget in principal.budgets]
    shown = ShownLimits(
        at=instant(state.at),
        tenant=principal.tenant_slug,
        key=principal.key_name,
        tier=principal.tier,
        limits=[shown_limit(one, firm, state.at) for one, firm in zip(state.limits, hard, strict=True)],
        queues=[asdict(queue) for queue in state.queues if principal.allows_model(queue.model)],
    )
    await exchange.respond(200, msgspec.json.encode(shown))


def visible(principal: Principal) -> Principal:
    """Without limits on models that the key may not use: their names are not its to see."""
    return replace(
        principal,
        limits=tuple(one for one in principal.limits if not one.model or principal.allows_model(one.model)),
        budgets=tuple(one for one in principal.budgets if not one.model or principal.allows_model(one.model)),
    )


def shown_limit(state: LimitState, hard: bool, at: float) -> ShownLimit:
    return ShownLimit(
        scope=state.scope,
        model=state.model or None,
        kind=state.kind,
        unit=state.unit,
        period=state.period or None,
        hard=hard,
        limit=amount(state.limit, state.unit),
        used=amount(state.used, state.unit),
        reserved=amount(state.reserved, state.unit),
        remaining=amount(state.remaining, state.unit),
        reset_at=None if state.reset is None else instant(state.reset),
        reset_seconds=None if state.reset is None else round(max(state.reset - at, 0.0), 3),
    )


def amount(value: int, unit: str) -> int | str:
    """Counts as they are, money in its currency with all its digits."""
    return value if unit in COUNTED else f"{Decimal(value).scaleb(-DECIMALS).normalize():f}"


def instant(at: float) -> str:
    """A Unix time as text in UTC, rounded up to the second: nobody comes back too early."""
    return datetime.fromtimestamp(math.ceil(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
