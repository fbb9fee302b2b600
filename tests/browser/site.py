"""A running web server with its own data directory, and how tests change what is behind it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OPERATOR, DEVELOPER, PASSWORD = "olga", "dev", "correct horse battery"

SEED = f"""
from django.contrib.auth.models import User
from tenants.models import Membership, Tenant, Tier
gold = Tier.objects.create(name="gold", rank=1, weight=60, objective=0.99, slo_ttft=0.5)
silver = Tier.objects.create(name="silver", rank=2, weight=30, objective=0.95, slo_ttft=2.0)
bronze = Tier.objects.create(name="bronze", rank=3, weight=10, objective=0.9, slo_ttft=5.0)
acme = Tenant.objects.create(slug="acme", name="Acme", tier=gold)
olga = User.objects.create_superuser("{OPERATOR}", password="{PASSWORD}")
Membership.objects.create(user=olga, role="operator")
dev = User.objects.create_user("{DEVELOPER}", password="{PASSWORD}")
Membership.objects.create(user=dev, role="developer", tenant=acme)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    """Poll a condition that has no event to wait on."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.05)


def snapshot(**changes: Any) -> dict[str, Any]:
    """A scheduler's report of a calm moment; `changes` replace top-level fields."""
    tier = {"tokens_per_s": 40.0, "requests_per_s": 2.0, "attained": 100, "judged": 100, "ttft_p95": 0.21}
    return {
        "policy": "priority",
        "policy_version": 3,
        "degradation_level": 0,
        "tiers": {
            "gold": {"waiting": 0, "oldest_wait": 0.0, "running": 3, **tier},
            "silver": {"waiting": 2, "oldest_wait": 0.4, "running": 4, **tier},
            "bronze": {"waiting": 11, "oldest_wait": 2.5, "running": 1, **tier},
        },
        "engines": [
            {
                "model": "demo",
                "replica": 0,
                "state": "ready",
                "running": 8,
                "kv_usage": 0.42,
                "busy": 0.87,
                "batch_mean": 7.5,
                "tokens_per_s": 120.0,
            }
        ],
        "gpus": [],
        **changes,
    }


@dataclass
class Site:
    """One server. `stop` and `start` cut and restore everything on the same port."""

    data_dir: Path
    app: str = "tests.browser.server:application"
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        own = {"HARNESS_DATA_DIR": str(self.data_dir), "HARNESS_ENGINE": "simulated", "PYTHONPATH": str(ROOT)}
        return os.environ | own

    def manage(self, *arguments: str) -> str:
        command = [sys.executable, str(ROOT / "manage.py"), *arguments]
        return subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True).stdout

    def shell(self, code: str) -> str:
        return self.manage("shell", "--verbosity=0", "-c", code)

    def start(self) -> None:
        command = [sys.executable, "-m", "uvicorn", self.app, "--port", str(self.port), "--log-level", "warning"]
        with (self.data_dir / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=self.environment, cwd=ROOT, stdout=log, stderr=log)
        wait_for(self.answers)

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.data_dir / "server.log").read_text()
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{self.url}/accounts/login/", timeout=5).status == 200)
        return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def play(self, speaking: bool = True, **schedulers: dict[str, Any]) -> None:
        """What the schedulers report from now on; the file is replaced in one step."""
        scratch = self.data_dir / "scenario.new"
        scratch.write_text(json.dumps({"speaking": speaking, "schedulers": schedulers}))
        scratch.replace(self.data_dir / "scenario.json")


@contextlib.contextmanager
def running(data_dir: Path) -> Iterator[Site]:
    site = Site(data_dir)
    site.manage("migrate", "--verbosity=0")
    site.shell(SEED)
    site.play(pool=snapshot())
    site.start()
    try:
        yield site
    finally:
        site.stop()
