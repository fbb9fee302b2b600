"""What a caller is told of its limits: those of its key and tenant, and the queues of its tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import msgspec

from scheduler.core.budgets import Account, Budget
from scheduler.core.types import TierSnapshot
from scheduler.wire.messages import Caller, Limits, LimitState, QueueState
from scheduler.worker.leases import LeaseError, Leases
from scheduler.worker.pool import Pool
from scheduler.worker.services import Services
from scheduler.worker.spending import budget_of, limits_of
from tenants.periods import Calendar

UNKNOWN = "What is left of a budget cannot be checked at the moment."


class LimitsDesk:
    """Answers the question `limits` of the web; nothing is reserved or counted by asking."""

    def __init__(self, services: Services, pools: Mapping[str, Pool], leases: Leases) -> None:
        self._services = services
        self._pools = pools
        self._leases = leases
        self._calendar = Calendar()

    async def answer(self, args: Mapping[str, Any]) -> Limits:
        """`args`: the `caller`."""
        caller = msgspec.convert(args["caller"], Caller)
        wall = self._services.wall()
        budgets = [budget_of(spec, caller, wall, self._calendar) for spec in caller.budgets]
        try:
            await self._bring_up_to_date(budgets)
        except LeaseError as error:
            return Limits(wall, unavailable=str(error))
        now, wall = self._services.clock.now(), self._services.wall()
        standings = self._services.admission.standing(limits_of(caller), budgets, now, wall)
        limits = tuple(LimitState(*astuple(standing)) for standing in standings)
        return Limits(wall, limits, self._queues(caller.tier, now))

    async def _bring_up_to_date(self, budgets: list[Budget]) -> None:
        """Raises LeaseError if what has been spent is not known."""
        asked = [budget for budget in budgets if _may_have_news(self._account(budget))]
        if asked:
            await self._leases.look(asked)
        if not all(self._account(budget).is_current for budget in asked):
            raise LeaseError(UNKNOWN)

    def _account(self, budget: Budget) -> Account:
        return self._services.admission.budgets.note(budget, self._services.clock.now())

    def _queues(self, tier: str, now: float) -> tuple[QueueState, ...]:
        queues: list[QueueState] = []
        for model, pool in sorted(self._pools.items()):
            if pool.planner is not None:
                counts = pool.planner.snapshot(now).tiers.get(tier, TierSnapshot())
                wait = pool.planner.expected_wait(tier, now)
                queues.append(QueueState(model, counts.waiting, counts.running, wait))
        return tuple(queues)


def _may_have_news(account: Account) -> bool:
    """The database may know more than this process; not of a hard budget of which nobody else has a part."""
    return account.shared or not account.is_current or not account.budget.hard
