"""What the caller's own limits cost: the check before a request is queued, and its way into the ledger.

check     CPU of all that limits and budgets are to a request in the scheduler: periods, price, leases looked at,
          reserved and settled. Beside it the same request without any.
settle    ended requests from the spool into the database, by the second of CPU that it takes: rows of usage, and the
          same rows with the accounts and leases of budgets. The wall clock beside it is that of a machine at its work.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report import Spread, keep, show

WALL = 1_800_000_000.0
TENANTS = 50
REQUESTS = 20_000  # a round of checks
ROWS = 4_000  # a round of settling
ROUNDS = 5
RATES = ("rpm", "tpm", "concurrency")
BUDGETS = (("tokens", "day"), ("tokens", "minute"), ("USD", "month"))  # of the tenant, and of the key


@dataclass(frozen=True)
class Case:
    """`rates` and `budgets`: whether a request has them, of its tenant and of its key."""

    name: str
    rates: bool
    budgets: bool


CASES = (Case("no limits", False, False), Case("6 rates", True, False), Case("6 rates, 6 budgets", True, True))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="harness-bench-") as folder:
        os.environ["HARNESS_DATA_DIR"] = folder
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "harness_web.settings")
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0, skip_checks=True)
        checks = {case.name: Spread.of([_check(case) for _ in range(ROUNDS)]) for case in CASES}
        settled = {
            name: [_settle(Path(folder), number, budgets) for number in range(ROUNDS)]
            for name, budgets in (("usage", False), ("usage and 6 budgets", True))
        }
    by_cpu = {name: Spread.of([cpu for cpu, _ in rounds]) for name, rounds in settled.items()}
    by_wall = {name: Spread.of([wall for _, wall in rounds]) for name, rounds in settled.items()}
    base = checks[CASES[0].name].middle
    show(
        "CPU of the check, in microseconds a request",
        ("request with", "median (range)", "added"),
        [(name, f"{spread:.1f}", f"{spread.middle - base:.1f}") for name, spread in checks.items()],
    )
    show(
        "Settling, in requests a second",
        ("what is written", "of CPU: median (range)", "of the wall clock"),
        [(name, f"{spread:.0f}", f"{by_wall[name]:.0f}") for name, spread in by_cpu.items()],
    )
    keep("admission", {"check_us": checks, "settled_per_cpu_second": by_cpu, "settled_per_second": by_wall})


# --- the check ------------------------------------------------------------------------------------------------------


def _check(case: Case) -> float:
    """Microseconds of CPU a request, as `worker/intake.py` and `worker/endings.py` do it."""
    from scheduler.core.admission import Admission
    from scheduler.core.budgets import Spending
    from scheduler.core.types import Limit
    from scheduler.wire.messages import BudgetSpec, Caller, LimitSpec
    from scheduler.worker.spending import budgets_of, spending_of
    from tenants.periods import Calendar
    from tenants.pricing import TokenPrice

    def caller(number: int) -> Caller:
        who = (("tenant", f"t{number}"), ("key", f"k{number}"))
        limits = [LimitSpec(*one, "", kind, 10**12) for one in who for kind in RATES if case.rates]
        budgets = [
            BudgetSpec(*one, "", unit, period, "Asia/Shanghai", 10**15, True, (0.8, 0.95))
            for one in who
            for unit, period in BUDGETS
            if case.budgets
        ]
        return Caller(f"t{number}", "acme", f"k{number}", "vip", tuple(limits), 1, "prod", tuple(budgets))

    admission, calendar = Admission(), Calendar()
    price = TokenPrice(1, "USD", 20_000_000, 5_000_000, 60_000_000)
    callers = [caller(number) for number in range(TENANTS)]
    for one in callers:
        for budget in budgets_of(one, "demo", WALL, calendar):
            account = admission.budgets.note(budget, 0.0)
            account.receive(10**15, told=budget, held=10**15, spent=0, elsewhere=0, shared=False)
    alive: list[str] = []
    began = time.process_time()
    for number in range(REQUESTS):
        one, now, name = callers[number % TENANTS], number * 0.0005, f"r{number}"
        limits = tuple(Limit(spec.scope, spec.owner, spec.model, spec.kind, spec.value) for spec in one.limits)
        spending = spending_of(budgets_of(one, "demo", WALL + now, calendar), price, 100, 400, WALL + now)
        assert isinstance(spending, Spending)
        assert not admission.budgets.short(spending, now)
        assert admission.reserve(name, limits, "demo", 500, now, spending) is None
        admission.leased(name)
        alive.append(name)
        if len(alive) > 200:
            admission.settle(alive.pop(0), 300, now, price.charge(100, 10, 200))
    return (time.process_time() - began) / REQUESTS * 1e6


# --- settling -------------------------------------------------------------------------------------------------------


def _settle(folder: Path, number: int, budgets: bool) -> tuple[float, float]:
    """Requests a second of CPU, and of the wall clock, through `settlement.carry` and `ledger.Ledger`."""
    import asyncio

    from scheduler.worker.ledger import Ledger
    from scheduler.worker.settlement import carry
    from scheduler.worker.spool import Spool
    from tenants import budgets as accounts

    process = f"bench-{number}-{budgets}"
    spool = Spool(folder / f"{process}.sqlite3")
    keys = [_keys(tenant) if budgets else () for tenant in range(TENANTS)]
    for tenant in range(TENANTS if budgets else 0):
        terms = accounts.Terms(10**15, True, (0.8, 0.95), 1)
        accounts.exchange(process, 1, [accounts.Move(key, f"{tenant}", None, terms, 1, need=1) for key in keys[tenant]])
    endings = [_ending(f"{process}-{row}", row % TENANTS, keys[row % TENANTS]) for row in range(ROWS)]
    spool.end([(0, ending) for ending in endings])

    async def drain() -> tuple[float, float]:
        ledger = Ledger(process, lambda charged: None)
        cpu, wall = time.process_time(), time.perf_counter()
        await carry(spool, ledger.store)
        took = time.process_time() - cpu, time.perf_counter() - wall
        await ledger.aclose()
        return took

    cpu, wall = asyncio.run(drain())
    assert spool.is_done()
    spool.close()
    accounts.release(process, 1)
    return ROWS / cpu, ROWS / wall


def _keys(tenant: int) -> tuple[Any, ...]:
    from scheduler.core.budgets import AccountKey

    start = int(datetime(2027, 1, 1, tzinfo=UTC).timestamp())
    return tuple(
        AccountKey(scope, f"{tenant}", "", unit, period, start)
        for scope in ("tenant", "key")
        for unit, period in BUDGETS
    )


def _ending(name: str, tenant: int, leased: tuple[Any, ...]) -> Any:
    from scheduler.worker.spool import Ending, Intent

    intent = Intent(
        request_id=name,
        attempt=1,
        tenant_id=f"{tenant}",
        tenant_slug="acme",
        key_id=f"{tenant}",
        key_name="prod",
        tier="vip",
        model="demo",
        deployment="demo",
        stream=True,
        prompt_tokens=100,
        max_tokens=400,
        arrived_at=WALL,
        dispatched_at=WALL + 0.5,
        batch_id="b-1",
        policy_version=1,
        price=None,
        limits=(),
        leased=leased,
        epoch=1,
    )
    return Ending(
        intent=intent,
        status="finished",
        finish_reason="stop",
        reason="",
        prompt_tokens=100,
        cached_tokens=0,
        completion_tokens=200,
        first_token_at=WALL + 0.6,
        ended_at=WALL + 2.0,
        batch_size=8.0,
        attained=True,
        miss_reason="",
    )


if __name__ == "__main__":
    main()
