"""Budgets as one process sees them: nothing beyond the lease, paid at the end, refused in words that explain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.core.admission import Admission
from scheduler.core.budgets import Account, AccountKey, Budget, Spending, show
from scheduler.core.types import Limit, Reason, Refusal

NOON = 1_800_000_000
DAY_ENDS = NOON + 43_200


def budget(limit: int = 100, *, unit: str = "tokens", period: str = "day", **changes: Any) -> Budget:
    scope, model = changes.pop("scope", "tenant"), changes.pop("model", "")
    ends = None if period == "total" else DAY_ENDS
    fields = {"ends": ends, "limit": limit, "hard": True, "alerts": (), "version": 1}
    return Budget(AccountKey(scope, "1", model, unit, period, 0), "1", **(fields | changes))


def lend(admission: Admission, one: Budget, lease: int, *, spent: int = 0, elsewhere: int = 0) -> Account:
    """The database has answered for the budget."""
    account = admission.budgets.note(one, 0.0)
    account.receive(lease, told=one, held=lease, spent=spent, elsewhere=elsewhere, shared=bool(elsewhere))
    return account


def reserve(admission: Admission, name: str, *budgets: Budget, tokens: int = 10, money: int = 0) -> Refusal | None:
    return admission.reserve(name, [], "m", tokens, 0.0, Spending(budgets, tokens, money, NOON))


def test_what_a_lease_covers_is_reserved_and_what_exceeds_it_refused() -> None:
    admission, one = Admission(), budget(25)
    lend(admission, one, 25)
    assert [reserve(admission, name, one) is None for name in "abc"] == [True, True, False]


def test_an_end_gives_back_what_was_not_used() -> None:
    admission, one = Admission(), budget(20)
    account = lend(admission, one, 20)
    reserve(admission, "a", one, tokens=20)
    assert reserve(admission, "b", one) is not None
    admission.settle("a", 5, 1.0)
    assert (account.lease, account.reserved, account.used) == (15, 0, 5)
    assert reserve(admission, "b", one) is None


def test_a_request_that_never_ran_costs_nothing() -> None:
    admission, one = Admission(), budget(20)
    account = lend(admission, one, 20)
    reserve(admission, "a", one)
    for _ in range(2):
        admission.release("a", 1.0)
    assert (account.lease, account.reserved, account.used) == (20, 0, 0)


def test_of_several_budgets_and_rates_all_are_reserved_or_none() -> None:
    admission, wide, narrow = Admission(), budget(100), budget(15, scope="key")
    accounts = [lend(admission, one, one.limit) for one in (wide, narrow)]
    rpm = Limit("tenant", "1", "", "rpm", 1)
    assert reserve(admission, "a", wide, narrow) is None
    assert reserve(admission, "b", wide, narrow) is not None
    assert [account.reserved for account in accounts] == [10, 10]
    assert admission.reserve("c", [rpm], "m", 10, 0.0, Spending((wide, narrow), 10, 0, NOON)) is not None
    assert admission.headers([rpm], "m", 0.0)["remaining-requests"] == 1
    assert admission.reserve("d", [rpm], "m", 5, 0.0, Spending((wide, narrow), 5, 0, NOON)) is None
    assert admission.reserve("e", [rpm], "m", 5, 0.0, Spending((wide,), 5, 0, NOON)) is not None
    assert [account.reserved for account in accounts] == [15, 15]


@pytest.mark.parametrize(("period", "ends"), [("total", None), ("day", 43_200)])
def test_who_has_spent_a_budget_is_not_told_to_come_back_for_a_rate(period: str, ends: float | None) -> None:
    admission, one = Admission(), budget(10, period=period)
    lend(admission, one, 10)
    rpm = Limit("tenant", "1", "", "rpm", 1)
    assert admission.reserve("a", [rpm], "m", 10, 0.0, Spending((one,), 10, 0, NOON)) is None
    refusal = admission.reserve("b", [rpm], "m", 10, 0.0, Spending((one,), 10, 0, NOON))
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == (Reason.LIMIT_TENANT_TOKENS, ends)


def test_money_is_reserved_and_paid_in_money() -> None:
    admission, one = Admission(), budget(1000, unit="USD")
    account = lend(admission, one, 1000)
    reserve(admission, "a", one, tokens=10, money=700)
    assert account.reserved == 700
    admission.settle("a", 10, 1.0, money=250)
    assert (account.lease, account.used) == (750, 250)


def test_a_soft_budget_refuses_nothing_and_needs_no_lease() -> None:
    admission, one = Admission(), budget(5, hard=False)
    assert reserve(admission, "a", one) is None
    assert admission.leased("a") == ()
    assert admission.budgets.short(Spending((one,), 10), 0.0) == []


def test_the_accounts_that_pay_from_a_lease_are_known() -> None:
    admission, hard, soft = Admission(), budget(50), budget(5, hard=False, scope="key")
    lend(admission, hard, 50)
    reserve(admission, "a", hard, soft)
    assert admission.leased("a") == (hard.key,)


# --- when the database has to be asked ------------------------------------------------------------------------------


def short(admission: Admission, one: Budget, tokens: int = 10) -> bool:
    return bool(admission.budgets.short(Spending((one,), tokens), 0.0))


def test_the_database_is_asked_for_what_it_may_have_and_for_nothing_else() -> None:
    admission, one = Admission(), budget(100)
    assert short(admission, one)  # never asked
    lend(admission, one, 20)
    assert not short(admission, one)  # covered
    assert not short(admission, one, 30)  # alone, so that there is no more
    assert not short(admission, budget(0, scope="key"))  # can never fit
    lend(admission, one, 0, elsewhere=80)
    assert short(admission, one, 30)  # others hold some


def test_a_raised_limit_is_no_reason_to_wait_a_lowered_one_is() -> None:
    admission, one = Admission(), budget(100)
    lend(admission, one, 100)
    assert not short(admission, replace(one, limit=200, version=2))
    assert short(admission, replace(one, limit=50, version=3))
    refusal = reserve(admission, "a", replace(one, limit=50, version=3))
    assert refusal is not None and refusal.reason is Reason.BUDGET_UNAVAILABLE


def test_a_request_with_an_older_view_does_not_bring_a_limit_back() -> None:
    admission, one = Admission(), budget(100)
    lend(admission, replace(one, limit=5, version=7), 5)
    assert admission.budgets.note(one, 0.0).budget.limit == 5
    assert reserve(admission, "a", one) is not None


def test_a_lease_that_is_larger_than_a_lowered_limit_is_not_spent() -> None:
    """What requests that ended give back to the lease is not below the limit by itself."""
    admission, one = Admission(), budget(100)
    account = lend(admission, one, 100)
    reserve(admission, "a", one, tokens=80)
    lowered = replace(one, limit=50, version=2)
    account.receive(0, told=lowered, held=100, spent=0, elsewhere=0, shared=False)
    admission.settle("a", 10, 1.0)
    assert [reserve(admission, name, lowered, tokens=20) is None for name in "bcd"] == [True, True, False]


def test_only_what_is_free_is_given_away() -> None:
    admission, one = Admission(), budget(100)
    account = lend(admission, one, 100)
    reserve(admission, "a", one, tokens=60)
    assert (account.give(30), account.give(30), account.give(30)) == (30, 10, 0)
    admission.settle("a", 60, 1.0)
    assert (account.lease, account.used) == (0, 60)


def test_what_a_process_does_not_know_is_our_fault_and_not_the_callers() -> None:
    refusal = reserve(Admission(), "a", budget(100))
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == (Reason.BUDGET_UNAVAILABLE, 5.0)


# --- what is said ---------------------------------------------------------------------------------------------------


def test_a_refusal_says_whose_budget_it_is_and_how_it_stands() -> None:
    admission, one = Admission(), budget(10**10, unit="USD", scope="key", model="m")
    lend(admission, one, 5 * 10**9, spent=25 * 10**8, elsewhere=25 * 10**8)
    assert reserve(admission, "a", one, money=4 * 10**9) is None
    refusal = reserve(admission, "b", one, money=2 * 10**9)
    assert refusal is not None
    assert refusal.reason is Reason.LIMIT_KEY_SPEND
    assert refusal.retry_after == 43_200
    assert refusal.message == (
        "The budget of this key on model m does not cover the request: limit 1.00 USD per day, spent 0.25 USD, "
        "reserved 0.40 USD, held by other schedulers 0.25 USD, requested 0.20 USD. "
        "It begins anew at 2027-01-15T20:00:00Z."
    )


@pytest.mark.parametrize(
    ("scope", "unit", "reason"),
    [
        ("key", "USD", Reason.LIMIT_KEY_SPEND),
        ("key", "tokens", Reason.LIMIT_KEY_TOKENS),
        ("tenant", "EUR", Reason.LIMIT_TENANT_SPEND),
        ("tenant", "tokens", Reason.LIMIT_TENANT_TOKENS),
    ],
)
@pytest.mark.parametrize("period", ["day", "total"])
def test_the_reason_says_which_budget_is_spent(scope: str, unit: str, period: str, reason: Reason) -> None:
    refusal = reserve(Admission(), "a", budget(0, scope=scope, unit=unit, period=period), money=1)
    assert refusal is not None
    assert refusal.reason is reason


def test_a_budget_in_total_never_begins_anew() -> None:
    admission, one = Admission(), budget(5, period="total")
    refusal = reserve(admission, "a", one)
    assert refusal is not None
    assert (refusal.retry_after, "anew" in refusal.message) == (None, False)
    assert "limit 5 tokens in total" in refusal.message


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [
        (1200, "tokens", "1200 tokens"),
        (0, "USD", "0.00 USD"),
        (5_000_000, "USD", "0.0005 USD"),
        (125_000_000_001, "EUR", "12.5000000001 EUR"),
    ],
)
def test_amounts_are_shown_with_all_their_digits(amount: int, unit: str, text: str) -> None:
    assert show(amount, unit) == text


def test_the_standing_of_limits_and_budgets_is_one_list() -> None:
    admission, one = Admission(), budget(100)
    lend(admission, one, 70, spent=30)
    limits = [Limit("tenant", "1", "", kind, 50) for kind in ("rpm", "tpm", "concurrency")]
    admission.reserve("a", limits, "m", 20, 0.0, Spending((one,), 20, 0, NOON))
    admission.reserve("b", limits, "m", 10, 0.0, Spending((one,), 10, 0, NOON))
    admission.settle("b", 4, 1.0)
    rows = admission.standing(limits, [one], 1.0, NOON + 1.0)
    shown = [(row.kind, row.unit, row.limit, row.used, row.reserved, row.remaining) for row in rows]
    assert shown == [
        ("rpm", "requests", 50, 2, 0, 48),
        ("tpm", "tokens", 50, 4, 20, 26),
        ("concurrency", "requests", 50, 1, 0, 49),
        ("budget", "tokens", 100, 34, 20, 46),
    ]
    resets = [row.reset for row in rows]
    assert resets[2:] == [None, DAY_ENDS]
    assert all(reset is not None and NOON + 60 <= reset <= NOON + 62 for reset in resets[:2])
