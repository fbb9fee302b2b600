"""A served product for the tests of this folder: a web process and a scheduler with the simulated engine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from harness_web.serve import uvicorn_arguments

ROOT = Path(__file__).resolve().parents[2]
START = 60.0  # seconds in which the processes must be ready, on a busy machine
PATIENCE = 10.0

DOCUMENT = {
    "version": 1,
    "tiers": [
        {"name": "vip", "rank": 1, "weight": 60},
        {"name": "free", "rank": 3, "weight": 10, "limits": {"rpm": 3}},
    ],
    "tenants": [
        {
            "slug": "acme",
            "name": "Acme",
            "tier": "vip",
            "keys": [
                {"name": "prod", "scopes": ["inference"]},
                {"name": "spare", "scopes": ["inference"]},
                {"name": "elsewhere", "scopes": ["inference"], "allowed_ips": ["192.0.2.0/24"]},
                {"name": "ops", "scopes": ["admin"]},
            ],
        },
        {"slug": "globex", "name": "Globex", "tier": "free", "keys": [{"name": "prod", "scopes": ["inference"]}]},
    ],
    "deployments": [
        {
            "model": "demo",
            "engine": "simulated",
            "options": {"step": {"base": 0.005}, "max_seqs": 2, "kv_tokens": 20_000, "max_model_len": 8192},
        }
    ],
}

T = TypeVar("T")


def eventually(condition: Callable[[], T], patience: float = PATIENCE) -> T:
    """Ask again until `condition` holds; its value. Bounded."""
    until = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < until, "the condition did not come true in time"
        time.sleep(0.02)
    return value


class Product:
    """Base URL and keys by `tenant/name`."""

    def __init__(self, data_dir: Path) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.keys: dict[str, str] = {}
        self._environment = {**os.environ, "HARNESS_DATA_DIR": str(data_dir)}
        self._data_dir = data_dir
        self._processes: list[subprocess.Popen[bytes]] = []
        # One for all: making a client costs more than a hundred questions. No connection outlives its answer.
        self._client = httpx.Client(base_url=self.url, limits=httpx.Limits(max_keepalive_connections=0))

    def manage(self, *arguments: str) -> str:
        command = [sys.executable, "manage.py", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, document: dict[str, Any]) -> dict[str, Any]:
        path = self._data_dir / "apply.yaml"
        path.write_text(yaml.safe_dump(document))
        result: dict[str, Any] = json.loads(self.manage("apply", str(path), "--json"))
        for key in result["created"].get("keys", []):
            self.keys[f"{key['tenant']}/{key['name']}"] = key["key"]
        return result

    def start(self) -> None:
        self.manage("migrate", "-v0")
        self.apply(DOCUMENT)
        self._run("manage.py", "run_scheduler")
        self.start_web()
        eventually(lambda: self.health("/readyz") == 200, START)

    def start_web(self) -> None:
        self._run("-m", "uvicorn", *uvicorn_arguments("127.0.0.1", self.port, 1))
        eventually(lambda: self.health("/healthz") == 200, START)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(30)
        self._client.close()

    def stop_scheduler(self) -> None:
        """The web process stays."""
        scheduler = self._processes.pop(0)
        scheduler.terminate()
        scheduler.wait(30)

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self._data_dir.glob("*.log")))

    def get(self, path: str, key: str = "acme/ops") -> httpx.Response:
        return self._client.get(path, headers=self.auth(key))

    def auth(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[key]}"}

    def record(self, request_id: str) -> dict[str, Any] | None:
        """The engine's own record of a request."""
        response = self.get(f"/api/v1/simulated/requests/{request_id}")
        return response.json() if response.status_code == 200 else None

    def records(self, key: str = "acme/ops") -> list[dict[str, Any]]:
        """The rows of the ledger that the key sees, of today."""
        found: list[dict[str, Any]] = self.get("/api/v1/usage/records.json", key).json()
        return found

    def running(self) -> int:
        tiers = self.get("/v1/queue/status").json()["tiers"].values()
        return sum(tier["running"] + tier["waiting"] for tier in tiers)

    def _run(self, *arguments: str) -> None:
        path = self._data_dir / f"{len(self._processes)}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=self._environment, stderr=log, stdout=log
            )
        self._processes.append(process)

    def health(self, path: str) -> int:
        """The status of a probe; 0 while nobody answers."""
        assert all(process.poll() is None for process in self._processes), self.log()
        try:
            return self._client.get(path).status_code
        except httpx.TransportError:
            return 0


@contextmanager
def installed() -> Iterator[Product]:
    """An empty data directory; nothing runs yet."""
    data_dir = Path(tempfile.mkdtemp(prefix="hw-", dir="/tmp"))
    product = Product(data_dir)
    try:
        yield product
    finally:
        product.stop()
        shutil.rmtree(data_dir)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
