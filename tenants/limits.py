"""Which limits apply to a key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .models import ApiKey, Limit, Tenant, Tier

RATES = frozenset({Limit.Kind.RPM.value, Limit.Kind.TPM.value, Limit.Kind.CONCURRENCY.value})


@dataclass(frozen=True, slots=True)
class EffectiveLimit:
    """One rate or concurrency limit. `scope` (tenant or key) and `owner` (its id) name the counter it is charged to."""

    scope: str
    owner: str
    model: str  # "" = all models
    kind: str  # rpm | tpm | concurrency
    value: int


def effective_limits(tier: Tier, tenant: Tenant, key: ApiKey) -> tuple[EffectiveLimit, ...]:
    """Everything that a request of `key` must pass.

    The tier's limits are defaults: a tenant's own value replaces the tier's of the same model and kind, upwards too.
    A key's limits come on top of its tenant's and never replace them. Budgets are not rates and not in here.
    """
    for_tenant = {**_rates(tier.limits.all()), **_rates(tenant.limits.all())}
    return (
        *_charged_to("tenant", str(tenant.pk), for_tenant),
        *_charged_to("key", str(key.pk), _rates(key.limits.all())),
    )


def _rates(limits: Iterable[Limit]) -> dict[tuple[str, str], int]:
    return {(limit.model, limit.kind): limit.value for limit in limits if limit.kind in RATES and limit.value}


def _charged_to(scope: str, owner: str, rates: dict[tuple[str, str], int]) -> Iterable[EffectiveLimit]:
    return (EffectiveLimit(scope, owner, model, kind, value) for (model, kind), value in sorted(rates.items()))
