"""Budgets as one scheduler process sees them: what it may spend, what requests hold of that, what they have used.

    ├──── used ────┼─ elsewhere ─┼──────── lease ────────┤ limit
       spent for      leases of     reserved │ free
       good           others

A hard budget is spent from the process's lease, so that no request waits for the database: a request reserves the most
it may cost, and at its end pays what it did cost. A lease that is short is a question to the database
(`worker/leases.py`), and only if that has nothing left a refusal. A soft budget is only counted.

Amounts are whole numbers: tokens, or 1e-10 of the currency. Instants of periods are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from scheduler.core.types import Reason, Refusal

TOKENS = "tokens"
MONEY_DECIMALS = 10
RETRY_UNKNOWN = 5.0  # seconds: the database, which knows what is left, could not be asked
SPENT = {
    ("key", False): Reason.LIMIT_KEY_SPEND,
    ("key", True): Reason.LIMIT_KEY_TOKENS,
    ("tenant", False): Reason.LIMIT_TENANT_SPEND,
    ("tenant", True): Reason.LIMIT_TENANT_TOKENS,
}
"""What refuses when a budget is spent: by its scope, and whether it is of tokens."""


class AccountKey(NamedTuple):
    """One budget in one period."""

    scope: str  # tenant | key
    owner: str
    model: str  # "" = all models
    unit: str  # tokens, or a currency
    period: str
    starts: int


@dataclass(frozen=True, slots=True)
class Budget:
    """One period of a budget, as change `version` made it. `ends` None: never; `alerts`: shares of the limit."""

    key: AccountKey
    tenant: str
    ends: int | None
    limit: int
    hard: bool
    alerts: tuple[float, ...]
    version: int

    def same_terms(self, other: Budget) -> bool:
        return (self.limit, self.hard, self.alerts) == (other.limit, other.hard, other.alerts)


@dataclass(frozen=True, slots=True)
class Spending:
    """What a request may come to cost, and the budgets that pay for it. `money` is in the currency of all of them."""

    budgets: tuple[Budget, ...] = ()
    tokens: int = 0
    money: int = 0
    at: float = 0.0  # Unix time of the arrival

    def amount(self, budget: Budget) -> int:
        return self.tokens if budget.key.unit == TOKENS else self.money


@dataclass(frozen=True, slots=True)
class Standing:
    """How one limit or budget stands. `unit`: requests, tokens, or a currency (in 1e-10).

    `reset` is the Unix time at which nothing is used any more; None: that is not known, or never. What other scheduler
    processes have reserved of a budget is not in `reserved`.
    """

    scope: str
    owner: str
    model: str
    kind: str  # rpm | tpm | concurrency | budget
    unit: str
    period: str  # of a budget
    limit: int
    used: int
    reserved: int
    remaining: int
    reset: float | None


@dataclass(slots=True)
class Account:
    """See the module text. `told` is the budget as the database last answered for it; None: it has not been asked yet.

    `shared`: other processes hold leases, or were given a part, so that the database may have more for us.
    """

    budget: Budget
    touched: float  # when a request last asked for it
    told: Budget | None = None
    lease: int = 0
    reserved: int = 0
    used: int = 0
    elsewhere: int = 0
    shared: bool = False

    @property
    def free(self) -> int:
        """What may be reserved."""
        return self.lease - self.reserved

    @property
    def is_current(self) -> bool:
        """The database has answered for the budget as it is now."""
        return self.told is not None and self.told.same_terms(self.budget)

    def covers(self, amount: int) -> bool:
        """The lease has room. A limit that was raised since it was taken out is no reason to wait, a lower one is."""
        told, limit = self.told, self.budget.limit
        if told is None or not told.hard or told.limit > limit:
            return False
        return amount <= self.free and self.used + self.reserved + amount <= limit

    def may_get(self, amount: int) -> bool:
        """It makes sense to ask the database for more."""
        return amount <= self.budget.limit and (self.shared or not self.is_current)

    def receive(self, granted: int, *, told: Budget, held: int, spent: int, elsewhere: int, shared: bool) -> None:
        """The database has answered: `granted` comes on top of the lease, of which it still counts `held` as ours."""
        self.lease += granted
        self.told = told
        if told.version >= self.budget.version:
            self.budget = told
        self.elsewhere = elsewhere
        self.shared = shared
        # What ended requests have cost is in `spent`, or still part of `held` until their rows are in the ledger.
        self.used = spent + held - self.lease

    def standing(self) -> Standing:
        budget = self.budget
        scope, owner, model, unit, period, _ = budget.key
        left = max(budget.limit - self.used - self.reserved, 0)
        return Standing(
            scope, owner, model, "budget", unit, period, budget.limit, self.used, self.reserved, left, budget.ends
        )

    def give(self, amount: int) -> int:
        """Take up to `amount` out of what is free; how much that is."""
        given = max(min(amount, self.free), 0)
        self.lease -= given
        return given


@dataclass(slots=True)
class Share:
    """What a request holds of an account. `leased`: it pays from the lease."""

    account: Account
    amount: int
    leased: bool


class Budgets:
    """The accounts that this process has to do with."""

    def __init__(self) -> None:
        self.accounts: dict[AccountKey, Account] = {}

    def note(self, budget: Budget, now: float) -> Account:
        """The account of a budget; the newest change that anybody has told of counts."""
        account = self.accounts.get(budget.key)
        if account is None:
            account = self.accounts[budget.key] = Account(budget, now)
        elif budget.version > account.budget.version:
            account.budget = budget
        account.touched = now
        return account

    def short(self, spending: Spending, now: float) -> list[tuple[Account, int]]:
        """Accounts of hard budgets whose lease does not cover the request but may grow, with what the request needs."""
        return [
            (account, amount)
            for account, amount in self._hard(spending, now)
            if not account.covers(amount) and account.may_get(amount)
        ]

    def check(self, spending: Spending, now: float) -> Refusal | None:
        """Why the request cannot be paid for."""
        for account, amount in self._hard(spending, now):
            if account.covers(amount):
                continue
            if account.is_current or amount > account.budget.limit:
                return _exhausted(account, amount, spending.at)
            message = f"What is left of a budget of this {account.budget.key.scope} cannot be checked at the moment."
            return Refusal(Reason.BUDGET_UNAVAILABLE, message, RETRY_UNKNOWN)
        return None

    def take(self, spending: Spending, now: float) -> list[Share]:
        """Reserve what `check` has let pass."""
        shares: list[Share] = []
        for budget in spending.budgets:
            account, amount = self.note(budget, now), spending.amount(budget)
            account.reserved += amount
            shares.append(Share(account, amount, account.budget.hard))
        return shares

    def settle(self, shares: Sequence[Share], tokens: int, money: int) -> None:
        """The request has ended and cost that."""
        for share in shares:
            account = share.account
            account.reserved -= share.amount
            if share.leased:
                cost = tokens if account.budget.key.unit == TOKENS else money
                account.lease -= cost
                account.used += cost

    def release(self, shares: Sequence[Share]) -> None:
        """The request never ran."""
        for share in shares:
            share.account.reserved -= share.amount

    def charged(self, key: AccountKey, spent: int) -> None:
        """The ledger has taken rows of the account. What a lease pays has been counted when the request ended."""
        account = self.accounts.get(key)
        if account is not None and not account.budget.hard:
            account.used = spent

    def _hard(self, spending: Spending, now: float) -> Iterator[tuple[Account, int]]:
        for budget in spending.budgets:
            account = self.note(budget, now)
            if account.budget.hard:
                yield account, spending.amount(budget)


def show(amount: int, unit: str) -> str:
    """An amount for people, like `1200 tokens` or `12.50 USD`: all its digits, money with at least two decimals."""
    if unit == TOKENS:
        return f"{amount} tokens"
    whole, rest = divmod(amount, 10**MONEY_DECIMALS)
    decimals = f"{rest:0{MONEY_DECIMALS}d}"
    return f"{whole}.{decimals[:2]}{decimals[2:].rstrip('0')} {unit}"


def _exhausted(account: Account, amount: int, at: float) -> Refusal:
    budget = account.budget
    scope, _, model, unit, period, _ = budget.key
    where = f" on model {model}" if model else ""
    span = "in total" if budget.ends is None else f"per {period}"
    parts = [f"spent {show(account.used, unit)}", f"reserved {show(account.reserved, unit)}"]
    if account.elsewhere:
        parts.append(f"held by other schedulers {show(account.elsewhere, unit)}")
    message = (
        f"The budget of this {scope}{where} does not cover the request: limit {show(budget.limit, unit)} {span}, "
        f"{', '.join(parts)}, requested {show(amount, unit)}."
    )
    reason = SPENT[scope, unit == TOKENS]
    if budget.ends is None:
        return Refusal(reason, message)
    again = datetime.fromtimestamp(budget.ends, UTC)
    return Refusal(reason, f"{message} It begins anew at {again:%Y-%m-%dT%H:%M:%SZ}.", budget.ends - at)
