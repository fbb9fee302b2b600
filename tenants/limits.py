"""Which limits apply to a key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .models import ApiKey, Limit, Tenant, Tier


@dataclass(frozen=True, slots=True)
class EffectiveLimit:
    """One rate or concurrency limit. `scope` (tenant or key) and `owner` (its id) name the counter it is charged to."""

    scope: str
    owner: str
    model: str  # "" = all models
    kind: str  # rpm | tpm | concurrency
    value: int


@dataclass(frozen=True, slots=True)
class EffectiveBudget:
    """One budget. `scope`, `owner`, `model`, `unit` and the running period name the account that it is charged to.

    `unit` is `tokens`, or the currency of money, which is counted in 1e-10; `value` is what may be spent in a period of
    the calendar of `zone`. `alerts` are shares of it.
    """

    scope: str
    owner: str
    model: str  # "" = all models
    unit: str
    period: str  # as in Limit.Period
    zone: str
    value: int
    hard: bool
    alerts: tuple[float, ...]


def effective_limits(tier: Tier, tenant: Tenant, key: ApiKey) -> tuple[EffectiveLimit, ...]:
    """The rates that a request of `key` must keep to.

    The tier's limits are defaults: a tenant's own value replaces the tier's of the same model and kind, upwards too.
    A key's limits come on top of its tenant's and never replace them.
    """
    return tuple(
        EffectiveLimit(scope, owner, limit.model, limit.kind, limit.units)
        for scope, owner, limits in _charged(tier, tenant, key)
        for limit in limits
        if limit.kind != Limit.Kind.BUDGET
    )


def effective_budgets(tier: Tier, tenant: Tenant, key: ApiKey | None) -> tuple[EffectiveBudget, ...]:
    """The budgets that a request of `key` is charged to: as `effective_limits`, by model, period and unit.

    Without a key, those of the tenant alone.
    """
    return tuple(
        EffectiveBudget(
            scope=scope,
            owner=owner,
            model=limit.model,
            unit=limit.unit,
            period=limit.period,
            zone=tenant.timezone,
            value=limit.units,
            hard=limit.hard,
            alerts=tuple(limit.alerts),
        )
        for scope, owner, limits in _charged(tier, tenant, key)
        for limit in limits
        if limit.kind == Limit.Kind.BUDGET
    )


def _charged(tier: Tier, tenant: Tenant, key: ApiKey | None) -> Iterable[tuple[str, str, list[Limit]]]:
    """Scope and id of who is charged, with the limits that hold for it."""
    for_tenant = {_what(limit): limit for limit in (*tier.limits.all(), *tenant.limits.all())}
    yield "tenant", str(tenant.pk), [for_tenant[what] for what in sorted(for_tenant)]
    if key is not None:
        yield "key", str(key.pk), sorted(key.limits.all(), key=_what)


def _what(limit: Limit) -> tuple[str, str, str, str]:
    """What it limits: of two limits of that, one replaces the other."""
    return (limit.model, limit.kind, limit.period, limit.currency)
