"""What it costs to record usage, and how many requests a second one core settles, in both durabilities.

The commits are those of a scheduler's loop: once for each engine step, one journal append, and one spool transaction
if requests have begun or ended. The whole life of a request is its intent, its progress in twenty steps, its end, and
its way in batches from the spool to the ledger, where two budgets pay for it. Everything shares one core, the thread
of the database included.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import django

from benchmarks.report import Spread, keep, show

if TYPE_CHECKING:
    from scheduler.worker.flight import Flight
    from scheduler.worker.settlement import Settlement
    from scheduler.worker.spool import Ending, Intent
    from tenants.pricing import TokenPrice

TARGET = 2_000  # requests a second
ROUNDS = 3
STREAMS = 64  # requests that one engine step moves on
STEPS = 500
BATCH = 50  # requests that begin, and that end, in one step
STEPS_OF_A_REQUEST = 20
REQUESTS = 6_000
TENANTS = 20
DURABILITIES = ("process", "power-loss")


@dataclass(frozen=True)
class Round:
    """Seconds of a commit, by what it holds, and requests a second over their whole life."""

    progress: float
    intents: float
    ends: float
    requests: float


def main() -> None:
    if len(sys.argv) == 3:  # in a process of its own: how the database is opened is a setting
        sys.stdout.write(json.dumps(asdict(measure(Path(sys.argv[2])))))
        return
    rounds = {durability: [_in_a_process(durability) for _ in range(ROUNDS)] for durability in DURABILITIES}
    rows = [_row(durability, each) for durability, each in rounds.items()]
    title = f"Settlement on one core: median (range) of {ROUNDS} rounds; target {TARGET} requests/s"
    commits = [f"{STREAMS} move, µs", f"{BATCH} begin, µs", f"{BATCH} end, µs"]
    show(title, ["durability", *commits, "commits/s", "requests/s"], rows)
    keep("settlement", {durability: [asdict(one) for one in each] for durability, each in rounds.items()})


def _row(durability: str, rounds: Sequence[Round]) -> list[str]:
    def spread(read: Callable[[Round], float]) -> Spread:
        return Spread.of([read(one) for one in rounds])

    return [
        durability,
        f"{spread(lambda one: one.progress * 1e6):.0f}",
        f"{spread(lambda one: one.intents * 1e6):.0f}",
        f"{spread(lambda one: one.ends * 1e6):.0f}",
        f"{spread(lambda one: 1 / one.progress):.0f}",
        f"{spread(lambda one: one.requests):.0f}",
    ]


def _in_a_process(durability: str) -> Round:
    with tempfile.TemporaryDirectory(prefix="hb-") as folder:
        environment = os.environ | {
            "DJANGO_SETTINGS_MODULE": "harness_web.settings",
            "HARNESS_DATA_DIR": folder,
            "HARNESS_DURABILITY": durability,
            "HARNESS_LOG_LEVEL": "ERROR",
        }
        command = [sys.executable, "-m", "benchmarks.settlement", "--in", folder]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Round(**json.loads(done.stdout))


# --- in the process that measures -----------------------------------------------------------------------------------


def measure(folder: Path) -> Round:
    """One round, on one core."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    django.setup()
    from django.conf import settings
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    price = _price_and_budgets()
    measured = asyncio.run(_measure(folder, price, power_loss=settings.HARNESS_POWER_LOSS))
    _check(REQUESTS - STREAMS)
    return measured


async def _measure(folder: Path, price: TokenPrice, *, power_loss: bool) -> Round:
    from scheduler.clock import RealClock
    from scheduler.worker.journal import Journal
    from scheduler.worker.ledger import Ledger
    from scheduler.worker.settlement import Settlement
    from scheduler.worker.spool import Spool

    ledger = Ledger("scheduler", lambda charged: None)
    spool = Spool(folder / "spool-scheduler-1.sqlite3", power_loss=power_loss)
    log = Journal(folder / "journal-scheduler-1.bin", power_loss=power_loss)
    settlement = Settlement(spool, log, ledger.store, RealClock(), time.time)
    flights = [_flight(number) for number in range(REQUESTS)]
    try:
        progress = _progress(settlement, flights[:STREAMS])
        began = time.perf_counter()
        intents = ends = 0.0
        for start in range(STREAMS, REQUESTS, BATCH):
            batch = flights[start : start + BATCH]
            opened = [(one, _intent(one, price)) for one in batch]
            at = time.perf_counter()
            settlement.begin(opened)
            intents += time.perf_counter() - at
            for step in range(1, STEPS_OF_A_REQUEST + 1):
                _move(settlement, batch, step)
            for one in batch:
                settlement.ended(one, _ending(one, price))
            at = time.perf_counter()
            settlement.commit()
            ends += time.perf_counter() - at
        assert await settlement.drain()
        seconds = time.perf_counter() - began
    finally:
        await ledger.aclose()
        settlement.close()
    batches = len(range(STREAMS, REQUESTS, BATCH))
    return Round(progress, intents / batches, ends / batches, (REQUESTS - STREAMS) / seconds)


def _progress(settlement: Settlement, flights: Sequence[Flight]) -> float:
    """Seconds of a commit of progress alone, as most steps are. Each step is charged to those that it moves."""
    from scheduler.core.service import Integrals, Meter

    settlement.begin([(one, _intent(one, None)) for one in flights])
    integrals = Integrals()
    for one in flights:
        meter = Meter(integrals)
        meter.join(100)
        one.charged = meter.read
    began = time.perf_counter()
    for step in range(1, STEPS + 1):
        integrals.a, integrals.index = step * 0.01, step
        _move(settlement, flights, step)
    return (time.perf_counter() - began) / STEPS


def _move(settlement: Settlement, flights: Sequence[Flight], tokens: int) -> None:
    for flight in flights:
        flight.advance(0, tokens, float(tokens))
        settlement.moved(flight)
    settlement.commit()


def _check(rows: int) -> None:
    """All of it has arrived, and the budgets have paid."""
    from tenants.models import BudgetAccount, UsageRecord

    assert UsageRecord.objects.count() == rows
    assert BudgetAccount.objects.filter(spent__gt=0).count() == 2 * TENANTS


def _price_and_budgets() -> TokenPrice:
    """A price and budgets as they are in use."""
    from tenants.models import BudgetAccount, Price
    from tenants.pricing import TokenPrice

    now = datetime.now(UTC)
    for number in range(TENANTS):
        for unit in ("tokens", "USD"):
            terms = {"period": "total", "starts_at": datetime.fromtimestamp(0, UTC), "limit": 10**18}
            BudgetAccount.objects.create(tenant_id=number, scope="tenant", owner=number, unit=unit, **terms)
    rates = {
        "input_per_mtok": Decimal("0.2"),
        "cached_input_per_mtok": Decimal("0.05"),
        "output_per_mtok": Decimal("0.6"),
    }
    return TokenPrice.of(Price.objects.create(model="demo", effective_from=now, **rates))


def _flight(number: int) -> Flight:
    from scheduler.core.types import TierSpec
    from scheduler.engines.base import Rendered, Sampling
    from scheduler.wire.messages import Caller, Submit
    from scheduler.worker.flight import Flight
    from scheduler.worker.outbox import Session

    tenant = str(number % TENANTS)
    submit = Submit(f"req-{number}", 1, 0.0, Caller(tenant, f"t{tenant}", tenant, "vip"), "demo", (), Sampling(), True)
    flight = Flight(submit, Session(_Nobody()), 0.0, time.time(), ())
    flight.tier, flight.rendered = TierSpec("vip", 1), Rendered(100, 1_000, None)
    return flight


class _Nobody:
    """A connection on which nothing is sent."""

    def send(self, message: object) -> bool:
        return True


def _intent(flight: Flight, price: TokenPrice | None) -> Intent:
    from scheduler.worker.spool import Intent

    caller = flight.submit.caller
    return Intent(
        request_id=flight.id,
        attempt=1,
        tenant_id=caller.tenant,
        tenant_slug=caller.tenant_slug,
        key_id=caller.key,
        key_name="prod",
        tier="vip",
        model="demo",
        deployment="demo",
        stream=True,
        prompt_tokens=100,
        max_tokens=200,
        arrived_at=flight.arrived_at,
        dispatched_at=flight.arrived_at,
        batch_id="demo-1.1-7",
        policy_version=3,
        price=price,
        limits=(),
        epoch=1,
    )


def _ending(flight: Flight, price: TokenPrice) -> Ending:
    from scheduler.worker.spool import Ending

    return Ending(
        intent=_intent(flight, price),
        status="finished",
        finish_reason="stop",
        reason="",
        prompt_tokens=100,
        cached_tokens=0,
        completion_tokens=flight.tokens,
        first_token_at=flight.arrived_at + 0.1,
        ended_at=flight.arrived_at + 1.0,
        batch_size=8.0,
        attained=True,
        miss_reason="",
        engine_seconds=0.05,
    )


if __name__ == "__main__":
    main()
