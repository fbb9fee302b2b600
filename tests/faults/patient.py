"""A product of real processes to try faults on, and what is asked of it when they are over."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.faults import books
from tests.journey.product import ROOT, Product, alive, free_port

CONCURRENCY = 24  # of the tenant: the load fits, and a slot that is never given back is missed at the end
PROCESSES = ("scheduler", "web-1", "web-2", "tasks", "beat")
BACK_WITHIN = 120.0  # seconds, on a busy machine
DOCUMENT = {
    "version": 1,
    "tiers": [{"name": "paid", "rank": 1, "weight": 1, "slo": {"ttft": 60, "e2e": 120, "tpot": 5}}],
    "tenants": [
        {
            "slug": "acme",
            "name": "Acme",
            "tier": "paid",
            "limits": {
                "concurrency": CONCURRENCY,
                "budgets": [
                    {"tokens": 10**12, "period": "total", "hard": True},
                    {"amount": "1000000.00", "currency": "USD", "period": "total", "hard": True},
                ],
            },
            "keys": [{"name": "prod", "scopes": ["inference"]}, {"name": "ops", "scopes": ["admin"]}],
        }
    ],
    "prices": [
        {
            "model": "demo",
            "input_per_mtok": "0.20",
            "output_per_mtok": "0.60",
            "currency": "USD",
            "from": "2026-01-01T00:00:00Z",
        }
    ],
    "deployments": [
        {
            "model": "demo",
            "engine": "simulated",
            "options": {
                "step": {"base": 0.01, "prefill_token": 0.0001, "decode_seq": 0.0005},
                "max_seqs": CONCURRENCY,
                "step_tokens": 128,
                "kv_tokens": 1792,  # so small that requests wait for memory, or are preempted
                "max_model_len": 512,
            },
        }
    ],
}


class Patient:
    """The product that is hurt, in a data directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._started: list[Product] = []  # the last one may be alive
        self._seen: set[int] = set()
        # One for all: making a client costs more than a hundred questions. No connection outlives its answer.
        self._client = httpx.Client(base_url=self.url, limits=httpx.Limits(max_keepalive_connections=0))
        if "HARNESS_DATABASE_URL" in os.environ:
            self.keys = _install(folder)
        else:
            template, self.keys = _template()
            shutil.copytree(template, folder, dirs_exist_ok=True)

    def kill(self, name: str) -> bool:
        """SIGKILL; False if it does not run at the moment."""
        if name == "up":
            self._product.note_processes()
            self._product.process.kill()
            self._product.process.wait()
            self.start()
            return True
        pid = self.pid(name)
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return True

    def be_whole(self) -> None:
        """Wait until every process is there and requests are answered."""
        until = time.monotonic() + BACK_WITHIN
        while not self._is_whole():
            assert time.monotonic() < until, f"it did not come back:\n{self.output[-4000:]}"
            time.sleep(0.1)

    def idle(self) -> None:
        """Wait until nothing waits or runs and everything is in the database."""
        until = time.monotonic() + BACK_WITHIN
        while self._unsettled():
            assert time.monotonic() < until, f"it does not settle:\n{self.output[-4000:]}"
            time.sleep(0.1)

    def get(self, path: str) -> Any:
        return json.loads(self.text(path))

    def text(self, path: str) -> str:
        """What an operator is answered."""
        headers = {"authorization": f"Bearer {self.keys['ops']}"}
        return self._client.get(path, headers=headers, timeout=30).raise_for_status().text

    def stop(self) -> int:
        return self._product.stop()

    def close(self) -> None:
        """Leave no process behind, whatever has happened."""
        if self._started and self._product.process.poll() is None:
            self._product.note_processes()
            self._product.process.kill()
            self._product.process.wait()
        for pid in self._seen:
            if alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for product in self._started:
            product.release()
        self._client.close()

    def start(self) -> None:
        options = ["--engine", "simulated", "--no-seed", "--workers", "2"]
        self._started.append(Product(options, data_dir=self.data_dir, port=self.port, seen=self._seen))

    @property
    def output(self) -> str:
        """What the product that runs now has said."""
        return self._product.output

    @property
    def starts(self) -> int:
        return len(self._started)

    @property
    def _product(self) -> Product:
        return self._started[-1]

    def _is_whole(self) -> bool:
        assert self._product.process.poll() is None, f"it gave up:\n{self.output[-4000:]}"
        with contextlib.suppress(httpx.TransportError, ValueError):
            if self._client.get("/readyz", timeout=5).status_code == 200:
                return all(self.pid(name) for name in PROCESSES)
        return False

    def pid(self, name: str) -> int | None:
        """The process that does this work now. Celery overwrites its environment with a title, which tells as much."""
        if name not in ("tasks", "beat"):
            return self._product.pid_of(name)
        for child in psutil.Process(self._product.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                title = " ".join(child.cmdline())
                if "celery" in title and {"tasks": " worker ", "beat": " beat "}[name] in title:
                    return child.pid
        return None

    def busy(self) -> int:
        status = self.get("/v1/queue/status")
        return sum(tier["running"] + tier["waiting"] for tier in status["tiers"].values())

    def _unsettled(self) -> bool:
        try:
            return bool(self.busy() or books.unsettled(self.data_dir))
        except httpx.HTTPStatusError:  # a key that is not known yet cannot be checked while the database is away
            return True


def _install(folder: Path) -> dict[str, str]:
    """Make database and secrets in a data directory; the keys by name."""
    path = folder / "apply.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT))
    _manage(folder, "migrate", "-v0")
    created = json.loads(_manage(folder, "apply", str(path), "--json"))["created"]["keys"]
    return {key["name"]: key["key"] for key in created}


@cache
def _template() -> tuple[Path, dict[str, str]]:
    """A data directory with the embedded database, to be copied: to make one takes longer than many a test."""
    folder = Path(tempfile.mkdtemp(prefix="hk-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, _install(folder)


def _manage(data_dir: Path, *arguments: str) -> str:
    environment = os.environ | {"HARNESS_DATA_DIR": str(data_dir)}
    command = [sys.executable, str(ROOT / "manage.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def installed() -> Iterator[Patient]:
    """A product that nothing runs of yet. It leaves nothing behind."""
    folder = Path(tempfile.mkdtemp(prefix="hk-", dir="/tmp"))  # short: sockets live in it
    try:
        patient = Patient(folder)
        try:
            yield patient
        finally:
            patient.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition: Callable[[], object]) -> None:
    """Bounded."""
    until = time.monotonic() + BACK_WITHIN
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
