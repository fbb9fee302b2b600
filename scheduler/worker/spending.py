"""Who pays for a request: its caller's limits, the budgets in the periods of its arrival, and the most it may cost."""

from __future__ import annotations

from scheduler.core.budgets import TOKENS, AccountKey, Budget, Spending
from scheduler.core.types import Limit, Reason, Refusal
from scheduler.wire.messages import BudgetSpec, Caller
from tenants.periods import Calendar
from tenants.pricing import TokenPrice


def limits_of(caller: Caller) -> tuple[Limit, ...]:
    """Its rates and its bounds of parallel requests, of all models."""
    return tuple(Limit(one.scope, one.owner, one.model, one.kind, one.value) for one in caller.limits)


def budgets_of(caller: Caller, model: str, at: float, calendar: Calendar) -> tuple[Budget, ...]:
    """The budgets that a request for `model`, arrived at `at` (Unix time), is charged to."""
    return tuple(budget_of(spec, caller, at, calendar) for spec in caller.budgets if spec.model in ("", model))


def budget_of(spec: BudgetSpec, caller: Caller, at: float, calendar: Calendar) -> Budget:
    """The budget in the period of `at`."""
    period = calendar.find(spec.period, spec.zone, at)
    key = AccountKey(spec.scope, spec.owner, spec.model, spec.unit, spec.period, period.starts)
    return Budget(key, caller.tenant, period.ends, spec.value, spec.hard, spec.alerts, caller.version)


def spending_of(
    budgets: tuple[Budget, ...], price: TokenPrice | None, prompt: int, completion: int, at: float
) -> Spending | Refusal:
    """What `prompt` and at most `completion` tokens may cost. A hard budget of money needs a price in its currency:
    what cannot be priced is refused, not free. A soft one goes without.
    """
    currency = None if price is None else price.currency
    paying: list[Budget] = []
    for budget in budgets:
        if budget.key.unit in (TOKENS, currency):
            paying.append(budget)
        elif budget.hard:
            message = (
                f"The model has no price in {budget.key.unit}, which a budget of this {budget.key.scope} is kept in. "
                "The operator has to add one."
            )
            return Refusal(Reason.NO_PRICE, message)
    money = 0 if price is None else price.most(prompt, completion)
    return Spending(tuple(paying), prompt + completion, money, at)
