"""Budgets in a scheduler process: exactly what fits is served, whoever shares it, whatever becomes of the process."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from django.db.models import F, Sum

from scheduler.wire.messages import Done
from scheduler.worker import leases
from tenants.models import BudgetAccount, BudgetLease, UsageRecord

from .conftest import Answer, Product, budget

pytestmark = pytest.mark.usefixtures("demo")

PROMPT, OUTPUT = 3, 4
EACH = PROMPT + OUTPUT  # tokens that a request of these tests reserves, and uses


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of these tests runs ahead of the database's threads: what a request waits for a lease is no matter."""
    monkeypatch.setattr(leases, "PATIENCE", 3600.0)


def outcomes(answers: Iterable[Answer]) -> list[str]:
    """`done`, or the reason of the refusal."""
    return ["done" if isinstance(one.last, Done) else one.last.reason for one in answers]


async def all_done(product: Product, answers: Iterable[Answer]) -> None:
    await product.until(lambda: all(answer.done() for answer in answers), step=0.02)


def served(answers: Iterable[Answer]) -> int:
    return outcomes(answers).count("done")


async def books() -> tuple[int, int, int]:
    """What accounts have as spent, what the ledger has, what leases hold."""
    account = await BudgetAccount.objects.aget()
    used = await UsageRecord.objects.aaggregate(sum=Sum(F("prompt_tokens") + F("completion_tokens")))
    held = await BudgetLease.objects.aaggregate(sum=Sum("amount"))
    return account.spent, used["sum"] or 0, held["sum"] or 0


async def test_of_200_requests_at_once_exactly_the_50_that_a_budget_covers_are_served(start) -> None:
    async with start() as product:
        await product.ready()
        answers = [product.submit(budgets=[budget(50 * EACH)]) for _ in range(200)]
        await all_done(product, answers)
        assert (served(answers), outcomes(answers).count("limit_budget")) == (50, 150)
        await product.settled()
        product.assert_nothing_is_held()
        assert await books() == (50 * EACH, 50 * EACH, 0)
    assert not await BudgetLease.objects.aexists()
