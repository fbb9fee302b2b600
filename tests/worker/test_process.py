"""The real process: `manage.py run_scheduler` over a real socket, killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings

from scheduler.gateway import Caller, Delta, Done, Gateway, Sampling, Submit, socket_path

SETUP = """
from tenants.models import Tier
from scheduler.models import Deployment
Tier.objects.create(name="vip")
Deployment.objects.create(model="demo", engine="simulated", options={"step": {"base": 0.01}})
"""
PATIENCE = 60.0  # seconds, on a busy machine


class Process:
    """A scheduler process over a data directory of its own."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self._environment = {**os.environ, "HARNESS_DATA_DIR": str(data_dir), "HARNESS_PROCESS": "scheduler"}
        self.manage("migrate", "--skip-checks", "-v0")
        self.manage("shell", "-v0", "-c", SETUP)
        self.start()

    def manage(self, *arguments: str) -> None:
        subprocess.run(
            self._command(*arguments), env=self._environment, check=True, capture_output=True, timeout=PATIENCE
        )

    def start(self) -> None:
        with (self.data_dir / "log").open("ab") as log:
            self.popen = subprocess.Popen(self._command("run_scheduler"), env=self._environment, stderr=log)

    def end(self, number: signal.Signals) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(PATIENCE)

    def rows(self) -> dict[str, tuple[str, int]]:
        with sqlite3.connect(self.data_dir / "harness.sqlite3") as db:
            found = db.execute("SELECT request_id, status, completion_tokens FROM tenants_usagerecord").fetchall()
        db.close()
        return {name: (status, tokens) for name, status, tokens in found}

    @staticmethod
    def _command(*arguments: str) -> list[str]:
        return [sys.executable, str(settings.BASE_DIR / "manage.py"), *arguments]


@pytest.fixture
def process() -> Iterator[Process]:
    with tempfile.TemporaryDirectory(prefix="hw-", dir="/tmp") as folder:  # short: a socket lives in it
        made = Process(Path(folder))
        yield made
        if made.popen.poll() is None:
            made.popen.kill()
            made.popen.wait()


def request(name: str, max_tokens: int) -> Submit:
    return Submit(
        name,
        1,
        0.0,
        Caller("1", "acme", "7", "vip", key_name="prod"),
        "demo",
        ({"role": "user", "content": "one two three"},),
        Sampling(max_tokens=max_tokens),
        True,
    )


async def test_a_killed_process_bills_what_it_delivered_and_its_successor_serves_on(process):
    gateway = Gateway(lambda: [socket_path(process.data_dir / "run", "scheduler")], "web")
    await gateway.start()
    async with asyncio.timeout(PATIENCE):
        while gateway.models().get("demo") != "ready":
            await asyncio.sleep(0.05)
        delivered = 0
        async for event in gateway.submit(request("killed", 4000)):
            if isinstance(event, Delta):
                delivered = event.tokens
                if delivered >= 20 and process.popen.poll() is None:
                    process.end(signal.SIGKILL)
        assert event.reason == "scheduler_lost"
        process.start()
        while gateway.models().get("demo") != "ready":
            await asyncio.sleep(0.05)
        events = [event async for event in gateway.submit(request("after", 5))]
        assert isinstance(events[-1], Done)
        while len(process.rows()) < 2:
            await asyncio.sleep(0.05)
    await gateway.aclose()
    assert process.end(signal.SIGTERM) == 0
    rows = process.rows()
    status, tokens = rows["killed"]
    assert status == "interrupted"
    assert delivered <= tokens < 4000  # what the client saw is billed; what was never made is not
    assert rows["after"] == ("finished", 5)
    assert [path.name for path in (process.data_dir / "spool").iterdir() if "-1." in path.name] == []
    assert "one two" not in (process.data_dir / "log").read_text()
