"""A tenant's budgets in the periods that run, for people to look at: what is spent, and when they begin anew."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from .budgets import in_ledger, key_of
from .limits import EffectiveBudget, effective_budgets
from .models import BudgetAccount, Tenant
from .models.fields import DECIMALS
from .models.limit import TOKENS
from .periods import Period, period_of


@dataclass(frozen=True, slots=True)
class RunningBudget:
    """One budget of a tenant. `limit` and `spent` are exact, as text, in `unit`: tokens, or a currency.

    `ends` None: never.
    """

    model: str  # "" = all models
    unit: str
    period: str
    hard: bool
    limit: str
    spent: str
    ends: datetime | None


def running_budgets(tenant: Tenant, now: datetime) -> list[RunningBudget]:
    """All that it has at the instant `now`, also those by its tier. What runs at that moment is not in `spent` yet."""
    opened = BudgetAccount.objects.filter(scope="tenant", owner=str(tenant.pk))
    spent = {key_of(account): account.spent for account in opened}
    found: list[RunningBudget] = []
    for budget in effective_budgets(tenant.tier, tenant, None):
        period = period_of(budget.period, budget.zone, now.timestamp())
        account = _account(budget, period)
        units = spent.get(key_of(account))
        found.append(
            RunningBudget(
                model=budget.model,
                unit=budget.unit,
                period=budget.period,
                hard=budget.hard,
                limit=_quantity(budget.value, budget.unit),
                spent=_quantity(in_ledger(account) if units is None else units, budget.unit),
                ends=account.ends_at,
            )
        )
    return found


def _account(budget: EffectiveBudget, period: Period) -> BudgetAccount:
    """As the first request would open it."""
    return BudgetAccount(
        tenant_id=budget.owner,
        scope=budget.scope,
        owner=budget.owner,
        model=budget.model,
        unit=budget.unit,
        period=budget.period,
        starts_at=datetime.fromtimestamp(period.starts, UTC),
        ends_at=None if period.ends is None else datetime.fromtimestamp(period.ends, UTC),
        limit=budget.value,
    )


def _quantity(units: int, unit: str) -> str:
    return str(units) if unit == TOKENS else f"{Decimal(units).scaleb(-DECIMALS).normalize():f}"
