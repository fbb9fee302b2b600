"""Which limits apply to a key."""

from __future__ import annotations

from decimal import Decimal

import pytest
from django.db import IntegrityError, transaction

from tenants.limits import effective_budgets, effective_limits
from tenants.models import ApiKey, Limit, Tenant

from .conftest import issue


def found(tenant: Tenant, key: ApiKey) -> set[tuple[str, str, str, int]]:
    limits = effective_limits(tenant.tier, tenant, key)
    assert {limit.owner for limit in limits} <= {str(tenant.pk), str(key.pk)}
    return {(limit.scope, limit.model, limit.kind, limit.value) for limit in limits}


def test_a_tiers_limits_are_defaults_for_its_tenants(acme: Tenant) -> None:
    acme.tier.limits.create(kind="rpm", value=20)
    assert found(acme, issue(acme).key) == {("tenant", "", "rpm", 20)}


def test_a_tenants_own_value_replaces_the_tiers_of_the_same_model_and_kind(acme: Tenant) -> None:
    acme.tier.limits.create(kind="rpm", value=20)
    acme.tier.limits.create(kind="tpm", value=1000)
    acme.limits.create(kind="rpm", value=600)
    acme.limits.create(kind="rpm", value=5, model="demo")
    assert found(acme, issue(acme).key) == {
        ("tenant", "", "rpm", 600),
        ("tenant", "demo", "rpm", 5),
        ("tenant", "", "tpm", 1000),
    }


def test_a_keys_limits_come_on_top_and_are_counted_apart(acme: Tenant) -> None:
    key = issue(acme).key
    acme.limits.create(kind="rpm", value=600)
    key.limits.create(kind="rpm", value=60)
    assert found(acme, key) == {("tenant", "", "rpm", 600), ("key", "", "rpm", 60)}


def budgets_of(tenant: Tenant, key: ApiKey) -> list[tuple[str, str, str, str, int, bool]]:
    budgets = effective_budgets(tenant.tier, tenant, key)
    return [(one.scope, one.model, one.unit, one.period, one.value, one.hard) for one in budgets]


def test_budgets_are_not_rates(acme: Tenant) -> None:
    acme.limits.create(kind="budget", period="day", value=5)
    key = issue(acme).key
    assert found(acme, key) == set()
    assert budgets_of(acme, key) == [("tenant", "", "tokens", "day", 5, True)]


def test_a_tiers_budget_is_a_default_until_the_tenant_has_one_of_that_model_period_and_unit(acme: Tenant) -> None:
    acme.tier.limits.create(kind="budget", period="day", value=5)
    acme.tier.limits.create(kind="budget", period="month", amount="10", currency="USD")
    acme.limits.create(kind="budget", period="day", value=9, hard=False)
    acme.limits.create(kind="budget", period="day", amount="1", currency="EUR")
    key = issue(acme).key
    key.limits.create(kind="budget", period="total", amount="0.0005", currency="USD", model="demo")
    assert budgets_of(acme, key) == [
        ("tenant", "", "tokens", "day", 9, False),
        ("tenant", "", "EUR", "day", 10**10, True),
        ("tenant", "", "USD", "month", 10**11, True),
        ("key", "demo", "USD", "total", 5 * 10**6, True),
    ]


def test_a_budget_follows_the_time_zone_of_its_tenant_and_keeps_its_alerts(acme: Tenant) -> None:
    acme.timezone = "Asia/Tokyo"
    acme.limits.create(kind="budget", period="month", value=5, alerts=[0.8, 0.95])
    (budget,) = effective_budgets(acme.tier, acme, issue(acme).key)
    assert (budget.zone, budget.alerts) == ("Asia/Tokyo", (0.8, 0.95))


def test_a_budget_of_nothing_is_a_budget(acme: Tenant) -> None:
    acme.limits.create(kind="budget", period="day", value=0)
    acme.limits.create(kind="budget", period="month", amount="0", currency="USD")
    assert [one.value for one in effective_budgets(acme.tier, acme, issue(acme).key)] == [0, 0]


def test_another_tenants_limits_do_not_apply(acme: Tenant, globex: Tenant) -> None:
    globex.limits.create(kind="rpm", value=1)
    globex.tier.limits.create(kind="tpm", value=1)
    assert found(acme, issue(acme).key) == set()


def test_a_budget_is_kept_to_the_last_digit(acme: Tenant) -> None:
    amount = Decimal("922337202.9999")
    limit = acme.limits.create(kind="budget", period="month", amount=amount, currency="USD", alerts=[0.8, 0.95])
    limit.refresh_from_db()
    assert (limit.amount, limit.alerts) == (amount, [0.8, 0.95])


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "rpm"},
        {"kind": "rpm", "value": 0},
        {"kind": "rpm", "value": 1, "period": "day"},
        {"kind": "rpm", "value": 1, "hard": False},
        {"kind": "rpm", "amount": Decimal(1), "currency": "USD"},
        {"kind": "budget", "value": 1},
        {"kind": "budget", "period": "day", "amount": Decimal(1)},
        {"kind": "budget", "period": "day", "amount": Decimal(1), "currency": "USD", "value": 1},
    ],
)
def test_the_database_refuses_a_limit_that_means_nothing(acme: Tenant, fields: dict[str, object]) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        Limit.objects.create(tenant=acme, **fields)


def test_the_database_refuses_a_limit_of_two_owners_or_none(acme: Tenant) -> None:
    for owners in ({}, {"tenant": acme, "tier": acme.tier}):
        with pytest.raises(IntegrityError), transaction.atomic():
            Limit.objects.create(kind="rpm", value=1, **owners)


def test_the_database_refuses_the_same_limit_twice(acme: Tenant) -> None:
    acme.limits.create(kind="rpm", value=1)
    with pytest.raises(IntegrityError), transaction.atomic():
        acme.limits.create(kind="rpm", value=2)
