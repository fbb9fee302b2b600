"""Two scheduler processes, their budgets, and everything that may befall them, in any order: no amount is spent twice.

The real accounts, leases and admission; what is left out are the loop and the threads between them. A process that is
killed loses what it knows and keeps its spool, as on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import OperationalError
from django.db.models import Q, Sum
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from scheduler.core.admission import Admission
from scheduler.core.budgets import AccountKey, Budget, Spending
from scheduler.core.types import Limit
from scheduler.worker.leases import LEAVE_EVERY, Leases, _Waiter
from tenants import budgets as accounts
from tenants.ledger import UsageRow, record_usage
from tenants.models import BudgetAccount, BudgetLease, UsageRecord
from tenants.periods import period_of
from tests.tenants.conftest import empty_ledger
from tests.tenants.test_ledger import ROW

WALL = 1_800_000_000.0
DAY = 86_400.0
NAMES = ("a", "b")
LIMITS = [Limit("tenant", "1", "", "rpm", 10_000), Limit("tenant", "1", "", "concurrency", 8)]


LOOP = asyncio.new_event_loop()  # never runs: futures need one to belong to


class Time:
    """A clock that nobody sleeps by."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("a turn does not sleep")


def complete(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run what waits for nothing, without a loop: under one, Django would open another connection."""
    with pytest.raises(StopIteration):
        coroutine.send(None)


class Thread:
    """`DatabaseThread` without the thread. `deaf`: the next answer is lost after the database has done its work."""

    def __init__(self) -> None:
        self.deaf = False

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        answer = function(*args)
        if self.deaf and function is accounts.exchange:
            self.deaf = False
            raise OperationalError("the connection was lost")
        return answer


@dataclass
class Process:
    """One scheduler process: what dies with it, and its spool, which does not."""

    name: str
    clock: Time
    epoch: int = 0
    running: dict[str, tuple[Spending, tuple[AccountKey, ...]]] = field(default_factory=dict)
    spool: list[tuple[UsageRow, tuple[AccountKey, ...]]] = field(default_factory=list)
    unrecovered: list[int] = field(default_factory=list)  # epochs whose leases are out

    def start(self) -> None:
        self.epoch += 1
        self.admission = Admission()
        self.thread = Thread()
        self.leases = Leases(
            self.name, self.epoch, self.admission.budgets, self.clock, lambda: WALL + self.clock.now(), print
        )
        self.leases._thread = self.thread  # type: ignore[assignment]

    def end(self, request: str, tokens: int, epoch: int) -> None:
        spending, leased = self.running.pop(request)
        arrived = datetime.fromtimestamp(spending.at, UTC)
        row = replace(
            ROW, request_id=request, prompt_tokens=tokens, completion_tokens=0, arrived_at=arrived, epoch=epoch
        )
        self.spool.append((row, leased))

    def store(self) -> None:
        rows, self.spool = self.spool, []
        leased = {(row.request_id, row.attempt): keys for row, keys in rows}
        record_usage([row for row, _ in rows], process=self.name, leased=leased)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Time()
        self.processes = [Process(name, self.clock) for name in NAMES]
        self.requests = 0
        self.version = 1
        self.ceiling: dict[tuple[str, int], int] = {}  # of an account, the highest limit that was ever in force

    @initialize(day=st.integers(0, 120), total=st.integers(0, 400))
    def begin(self, day: int, total: int) -> None:
        self.limits = {"day": day, "total": total}
        for process in self.processes:
            process.start()

    # --- what may happen --------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), tokens=st.integers(0, 40), turns=st.lists(st.integers(0, 1), max_size=7))
    def arrives(self, which: int, tokens: int, turns: list[int]) -> None:
        """A request, which waits for these turns of the processes while the lease is short."""
        process, now = self.processes[which], self.clock.now()
        spending = Spending(self._budgets(), tokens, 0, WALL + now)
        asked: set[Any] = set()
        for turn in turns:
            if process.admission.budgets.short(spending, now):
                process.leases._waiters = [_Waiter(spending, asked, LOOP.create_future())]
                self._turn(self.processes[turn])
        process.leases._waiters = []
        self.requests += 1
        request = f"r{self.requests}"
        if process.admission.reserve(request, LIMITS, "m", tokens, now, spending) is None:
            process.running[request] = (spending, process.admission.leased(request))

    @rule(which=st.integers(0, 1), tokens=st.integers(1, 40))
    def many_arrive(self, which: int, tokens: int) -> None:
        """As many as the lease covers, without asking for more."""
        for _ in range(8):
            self.arrives(which, tokens, [])

    @rule(which=st.integers(0, 1), data=st.data())
    def ends(self, which: int, data: st.DataObject) -> None:
        process = self.processes[which]
        if process.running:
            request = data.draw(st.sampled_from(sorted(process.running)))
            tokens = data.draw(st.integers(0, process.running[request][0].tokens))
            process.admission.settle(request, tokens, self.clock.now())
            process.end(request, tokens, process.epoch)

    @rule(which=st.integers(0, 1), data=st.data())
    def is_cancelled_in_the_queue(self, which: int, data: st.DataObject) -> None:
        process = self.processes[which]
        if process.running:
            request = data.draw(st.sampled_from(sorted(process.running)))
            process.admission.release(request, self.clock.now())
            del process.running[request]

    @rule(which=st.integers(0, 1))
    def usage_reaches_the_ledger(self, which: int) -> None:
        self.processes[which].store()

    @rule(which=st.integers(0, 1))
    def a_turn(self, which: int) -> None:
        self._turn(self.processes[which])

    @rule(which=st.integers(0, 1))
    def the_next_answer_is_lost(self, which: int) -> None:
        self.processes[which].thread.deaf = True

    @rule(which=st.integers(0, 1), data=st.data())
    def is_killed(self, which: int, data: st.DataObject) -> None:
        """What ran is interrupted, after part of it was delivered."""
        process = self.processes[which]
        for request, (spending, _) in list(process.running.items()):
            process.end(request, data.draw(st.integers(0, spending.tokens)), process.epoch)
        process.unrecovered.append(process.epoch)
        process.start()

    @rule(which=st.integers(0, 1))
    def recovers(self, which: int) -> None:
        process = self.processes[which]
        process.store()
        for epoch in process.unrecovered:
            accounts.release(process.name, epoch)
        process.unrecovered = []

    @rule(hours=st.integers(1, 30))
    def time_passes(self, hours: int) -> None:
        self.clock.at += hours * 3600.0

    @rule(period=st.sampled_from(["day", "total"]), limit=st.integers(0, 400))
    def a_budget_is_changed(self, period: str, limit: int) -> None:
        self.limits[period] = limit
        self.version += 1

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def spent_is_what_the_ledger_says(self) -> None:
        for account in BudgetAccount.objects.all():
            rows = UsageRecord.objects.filter(
                Q() if account.ends_at is None else Q(arrived_at__lt=account.ends_at),
                arrived_at__gte=account.starts_at,
            )
            assert account.spent == (rows.aggregate(sum=Sum("prompt_tokens"))["sum"] or 0)

    @invariant()
    def spent_and_leased_never_exceed_the_limit(self) -> None:
        for account in BudgetAccount.objects.annotate(held=Sum("leases__amount")):
            self._hold(account, account.spent + (account.held or 0))

    @invariant()
    def spent_ended_and_reserved_never_exceed_the_limit(self) -> None:
        """Whatever the leases say: what is in the ledger, in the spools and held by requests."""
        for account in BudgetAccount.objects.all():
            key = accounts.key_of(account)
            at_stake = account.spent
            for process in self.processes:
                at_stake += sum(row.prompt_tokens for row, keys in process.spool if key in keys)
                at_stake += sum(spending.tokens for spending, keys in process.running.values() if key in keys)
            self._hold(account, at_stake)

    def teardown(self) -> None:
        """When everything has ended and is in the ledger, nothing is reserved and nothing stays leased."""
        try:
            for process in self.processes:
                for request in list(process.running):
                    process.admission.settle(request, 0, self.clock.now())
                    process.end(request, 0, process.epoch)
                process.thread.deaf = False
            for process in self.processes:
                self.recovers(self.processes.index(process))
                assert process.admission.reserved() == 0
                assert all(one.reserved == 0 for one in process.admission.budgets.accounts.values())
            self.clock.at += 40 * DAY
            for _ in range(6):
                for process in self.processes:
                    self._turn(process)
                self.clock.at += LEAVE_EVERY
            assert not BudgetLease.objects.exists()
            assert all(not process.admission.budgets.accounts for process in self.processes)
        finally:
            BudgetAccount.objects.all().delete()
            empty_ledger()

    # --- details ----------------------------------------------------------------------------------------------------

    def _budgets(self) -> tuple[Budget, ...]:
        budgets = []
        for name, limit in self.limits.items():
            period = period_of(name, "UTC", WALL + self.clock.now())
            key = AccountKey("tenant", "1", "", "tokens", name, period.starts)
            budgets.append(Budget(key, "1", period.ends, limit, True, (0.5,), self.version))
            place = (name, period.starts)
            self.ceiling[place] = max(self.ceiling.get(place, 0), limit)
        return tuple(budgets)

    def _hold(self, account: BudgetAccount, amount: int) -> None:
        *_, period, starts = accounts.key_of(account)
        assert amount <= self.ceiling[(period, starts)]

    def _turn(self, process: Process) -> None:
        complete(process.leases.turn())


@pytest.mark.django_db
def test_no_amount_is_spent_twice_whatever_happens() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
