"""A tenant's budgets for people to look at."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from tenants.budgets import Move, Terms, exchange
from tenants.ledger import record_usage
from tenants.models import Limit, Tenant
from tenants.running_budgets import RunningBudget, running_budgets

from .conftest import make_tenant
from .test_ledger import ROW

pytestmark = pytest.mark.django_db
SECOND = timedelta(seconds=1)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("zone", "border", "next_border"),
    [
        ("Asia/Tokyo", "2026-07-31T15:00:00Z", "2026-08-31T15:00:00Z"),
        ("America/Los_Angeles", "2026-08-01T07:00:00Z", "2026-09-01T07:00:00Z"),
    ],
)
def test_fr_016_what_is_spent_begins_anew_at_the_tenants_midnight(zone: str, border: str, next_border: str) -> None:
    """FR-016: to the second; what was used before counts no more."""
    tenant = make_tenant(timezone=zone)
    Limit.objects.create(tenant=tenant, kind="budget", period="month", value=100)
    for name, instant in (("before", at(border) - SECOND), ("after", at(border))):
        row = replace(ROW, request_id=name, tenant_id=str(tenant.pk), arrived_at=instant, ended_at=instant)
        record_usage([replace(row, prompt_tokens=7 if name == "before" else 2, completion_tokens=0)])

    def month(now: datetime) -> tuple[str, datetime | None]:
        (budget,) = running_budgets(tenant, now)
        return budget.spent, budget.ends

    assert month(at(border) - SECOND) == ("7", at(border))
    assert month(at(border)) == ("2", at(next_border))


def test_budgets_of_tenant_and_tier_are_shown_with_their_account_or_without() -> None:
    tenant = make_tenant()
    now = at("2026-07-31T12:00:00Z")
    Limit.objects.create(tenant=tenant, kind="budget", period="day", amount="0.5", currency="USD", hard=False)
    Limit.objects.create(tier=tenant.tier, kind="budget", period="total", model="demo", value=100)
    Limit.objects.create(tenant=tenant, kind="rpm", value=5)
    key = ("tenant", str(tenant.pk), "demo", "tokens", "total", 0)
    exchange("scheduler", 1, [Move(key, str(tenant.pk), None, Terms(100, True, (), 1), 1, need=1)])
    day = RunningBudget("", "USD", "day", False, "0.5", "0", at("2026-08-01T00:00:00Z"))
    total = RunningBudget("demo", "tokens", "total", True, "100", "0", None)
    assert running_budgets(tenant, now) == [day, total]
    assert running_budgets(Tenant.objects.get(pk=make_tenant("bare", "plain").pk), now) == []
