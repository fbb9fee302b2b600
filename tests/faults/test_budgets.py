"""Two scheduler processes over one database spend one budget: real processes, real sockets, one of them killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from scheduler.gateway import BudgetSpec, Caller, Event, Gateway, Sampling, Submit, socket_path
from tests.faults import postgres
from tests.journey.product import ROOT

MODELS = {"scheduler-a": "one", "scheduler-b": "two"}  # process -> its pool and model
SETUP = """
from tenants.models import Tier
from scheduler.models import Deployment
Tier.objects.create(name="vip", slo_ttft=60, slo_e2e=60)
for model in ("one", "two"):
    Deployment.objects.create(model=model, engine="simulated", options={"step": {"base": 0.005}, "max_seqs": 16})
"""
PATIENCE = 120.0  # seconds, on a busy machine
PROMPT, OUTPUT = 3, 7
EACH = PROMPT + OUTPUT


class Schedulers:
    """Scheduler processes over a data directory of their own. `url`: of another database than the embedded one."""

    def __init__(self, data_dir: Path, url: str = "") -> None:
        self.data_dir = data_dir
        self._url = url
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        for arguments in (("migrate", "--skip-checks", "-v0"), ("shell", "-v0", "-c", SETUP)):
            subprocess.run(self._command(*arguments), env=self._environment(), check=True, timeout=PATIENCE)

    def start(self, name: str) -> None:
        command = self._command("run_scheduler", "--name", name, "--pool", MODELS[name])
        with (self.data_dir / "log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, env=self._environment(name), stderr=log)

    def end(self, name: str, number: signal.Signals) -> None:
        process = self.running.pop(name)
        process.send_signal(number)
        process.wait(PATIENCE)

    def check(self) -> None:
        """All of them run."""
        assert all(process.poll() is None for process in self.running.values()), (self.data_dir / "log").read_text()

    def books(self) -> tuple[int, int, int]:
        """What the budget has as spent, what the ledger has, what is on lease."""
        with closing(self._connect()) as db:
            queries = (
                "SELECT SUM(spent) FROM tenants_budgetaccount",
                "SELECT SUM(prompt_tokens + completion_tokens) FROM tenants_usagerecord",
                "SELECT SUM(amount) FROM tenants_budgetlease",
            )
            spent, used, held = (int(db.execute(query).fetchone()[0] or 0) for query in queries)
            return spent, used, held

    def _connect(self) -> Any:
        if self._url:
            return psycopg.connect(self._url)
        return sqlite3.connect(f"file:{self.data_dir / 'harness.sqlite3'}?mode=ro", uri=True)

    def _environment(self, name: str = "setup") -> dict[str, str]:
        database = {"HARNESS_DATABASE_URL": self._url} if self._url else {}
        return {**os.environ, **database, "HARNESS_DATA_DIR": str(self.data_dir), "HARNESS_PROCESS": name}

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, str(ROOT / "manage.py"), *arguments]


@pytest.fixture(params=["sqlite", "postgresql"])
def schedulers(request: pytest.FixtureRequest) -> Iterator[Schedulers]:
    with ExitStack() as open_now:
        url = ""
        if request.param == "postgresql":
            if reason := postgres.missing():
                pytest.skip(reason)
            url = open_now.enter_context(postgres.running()).url
        # A short path: sockets live in it.
        folder = open_now.enter_context(tempfile.TemporaryDirectory(prefix="hb-", dir="/tmp"))
        made = Schedulers(Path(folder), url)
        try:
            yield made
        finally:
            for process in made.running.values():
                process.kill()
                process.wait()


async def connect(schedulers: Schedulers, open_now: AsyncExitStack) -> Gateway:
    """A web process's view of both, when both are ready."""
    for name in MODELS:
        if name not in schedulers.running:
            schedulers.start(name)
    gateway = Gateway(lambda: [socket_path(schedulers.data_dir / "run", name) for name in MODELS], "web")
    await gateway.start()
    open_now.push_async_callback(gateway.aclose)
    await ready(gateway, schedulers)
    return gateway


async def ready(gateway: Gateway, schedulers: Schedulers) -> None:
    while gateway.models() != {"one": "ready", "two": "ready"}:
        schedulers.check()
        await asyncio.sleep(0.05)


async def ask(gateway: Gateway, name: str, model: str, limit: int, tokens: int = OUTPUT) -> str:
    """`Done`, or the reason why not."""
    budget = BudgetSpec("tenant", "1", "", "tokens", "total", "UTC", limit, True)
    caller = Caller("1", "acme", "7", "vip", (), 1, "prod", (budget,))
    words = ({"role": "user", "content": "one two three"},)
    request = Submit(name, 1, 0.0, caller, model, words, Sampling(max_tokens=tokens), True)
    last: Event | None = None
    async for event in gateway.submit(request):
        last = event
    return str(getattr(last, "reason", type(last).__name__))


async def test_two_processes_serve_exactly_what_one_budget_covers(schedulers: Schedulers) -> None:
    async with asyncio.timeout(PATIENCE), AsyncExitStack() as open_now:
        gateway = await connect(schedulers, open_now)
        asking = [ask(gateway, f"r{number}", ("one", "two")[number % 2], 50 * EACH) for number in range(200)]
        answers = await asyncio.gather(*asking)
        assert (answers.count("Done"), answers.count("limit_tenant_tokens")) == (50, 150)
    for name in MODELS:
        schedulers.end(name, signal.SIGTERM)
    assert schedulers.books() == (50 * EACH, 50 * EACH, 0)


async def test_a_process_that_is_killed_costs_the_budget_what_it_delivered_and_no_more(schedulers: Schedulers) -> None:
    """What the dead one had leased is spent for the other one, until its successor has brought its books in order."""
    limit = 1000
    async with asyncio.timeout(PATIENCE), AsyncExitStack() as open_now:
        gateway = await connect(schedulers, open_now)
        assert await ask(gateway, "first", "one", limit) == "Done"
        running = asyncio.create_task(ask(gateway, "killed", "one", limit, tokens=900))
        while schedulers.books()[1] < EACH:
            await asyncio.sleep(0.05)
        schedulers.end("scheduler-a", signal.SIGKILL)
        assert await running == "scheduler_lost"
        refused = await ask(gateway, "too early", "two", limit, tokens=900)
        schedulers.start("scheduler-a")
        await ready(gateway, schedulers)
        while schedulers.books()[2]:
            await asyncio.sleep(0.05)
        spent, used, _ = schedulers.books()
        assert spent == used
        assert EACH + PROMPT <= spent < EACH + PROMPT + 900
        assert await ask(gateway, "rest", "two", limit, tokens=limit - spent - PROMPT) == "Done"
        assert await ask(gateway, "over", "one", limit, tokens=1) == "limit_tenant_tokens"
        assert refused == "limit_tenant_tokens"
    for name in MODELS:
        schedulers.end(name, signal.SIGTERM)
    assert schedulers.books() == (limit, limit, 0)
