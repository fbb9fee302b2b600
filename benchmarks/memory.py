"""What a scheduler process holds of a request that waits: resident memory, from nothing to 10,000 that wait.

A real process with the simulated engine, which runs one request and lets the others wait; they come over the wire as
web processes send them, from 50 tenants with three limits each. The same is done with prompts of a few tokens and of a
thousand: what a thousand tokens more weigh is the prompt, the rest is the request.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop

from benchmarks.report import keep, show
from harness_web.env import child_environment
from scheduler.clock import RealClock
from scheduler.engines.base import Sampling
from scheduler.wire.connection import Connection
from scheduler.wire.messages import (
    Accepted,
    AnyMessage,
    Caller,
    Events,
    Failed,
    LimitSpec,
    Models,
    Refused,
    Submit,
    Welcome,
)
from scheduler.wire.session import REQUESTS, dial
from scheduler.wire.transport import SocketTransport, socket_path

ROOT = Path(__file__).resolve().parents[1]
WAITING = 10_000
TENANTS = 50
SHORT, LONG = 4, 1_004  # words, each a token of the simulated engine
MODEL = "demo"
MAX_TOKENS = 4_000  # the one that runs does so for longer than this takes
WARM_UP = 500  # requests before the first look: what the process needs only once
AT_ONCE = 64  # submissions that are not answered yet
START = 60.0  # seconds in which the process must serve
PATIENCE = 300.0  # seconds for all submissions

SETUP = {
    "version": 1,
    "tiers": [
        {
            "name": name,
            "rank": rank,
            "weight": weight,
            "slo": {"ttft": 3600, "e2e": 3600},
            "queue": {"max_length": 100_000, "max_wait": 3600},
        }
        for rank, (name, weight) in enumerate([("vip", 60), ("paid", 30), ("free", 10)], start=1)
    ],
    "deployments": [
        {
            "model": MODEL,
            "engine": "simulated",
            "options": {"step": {"base": 1.0}, "max_seqs": 1, "kv_tokens": 40_000, "max_model_len": 32_768},
        }
    ],
}


class BenchmarkError(Exception):
    """The measurement means nothing; the text says why."""


class Web:
    """Sends requests, a few at once, and waits until all are accepted."""

    def __init__(self) -> None:
        self.connection: Connection
        self.welcomed = asyncio.Event()
        self.accepted = 0
        self.trouble: str | None = None
        self._room = asyncio.Semaphore(AT_ONCE)

    def on_welcome(self, connection: Connection, welcome: Welcome) -> None:
        self.connection = connection
        if welcome.models.get(MODEL) == "ready":
            self.welcomed.set()

    def on_message(self, message: AnyMessage) -> None:
        match message:
            case Models() if message.models.get(MODEL) == "ready":
                self.welcomed.set()
            case Events():
                for event in message.events:
                    if isinstance(event, Accepted):
                        self.accepted += 1
                        self._room.release()
                    elif isinstance(event, Refused | Failed):
                        self.on_closed(f"{event.reason}: {event.message}")

    def on_closed(self, reason: str) -> None:
        self.trouble = self.trouble or reason
        self._room.release()

    async def send(self, first: int, number: int, words: int) -> None:
        for serial in range(first, first + number):
            await self._room.acquire()
            if self.trouble is not None:
                raise BenchmarkError(self.trouble)
            self.connection.send(submission(serial, words))
        while self.accepted < first + number:
            await self._room.acquire()
            if self.trouble is not None:
                raise BenchmarkError(self.trouble)


def submission(serial: int, words: int) -> Submit:
    number = serial % TENANTS
    tenant, tier = str(number), ("vip", "paid", "free")[number % 3]
    limits = tuple(LimitSpec("tenant", tenant, "", kind, 10**9) for kind in ("rpm", "tpm", "concurrency"))
    caller = Caller(tenant, f"tenant-{tenant}", tenant, tier, limits, key_name="bench")
    # As a language has them: words of some letters, and no two prompts alike.
    text = " ".join(f"w{(serial * 7919 + place) % 100_000:05d}" for place in range(words))
    messages = ({"role": "user", "content": text},)
    sampling = Sampling(max_tokens=MAX_TOKENS)
    return Submit(f"req_{serial:032x}", 1, 0.0, caller, MODEL, messages, sampling, stream=True, queue_timeout=3600.0)


class Scheduler:
    """The process, with a data directory of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes]

    def start(self) -> None:
        setup = self._folder / "setup.yaml"
        setup.write_text(json.dumps(SETUP))  # JSON is YAML
        for arguments in (["migrate", "-v0"], ["apply", str(setup), "--json"]):
            done = subprocess.run(self._command(*arguments), cwd=ROOT, env=self._environment(), capture_output=True)
            if done.returncode:
                raise BenchmarkError(f"manage.py {arguments[0]} failed: {done.stderr.decode()}")
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command("run_scheduler"), cwd=ROOT, env=self._environment(), stdout=log, stderr=log
            )

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    async def connect(self) -> Web:
        """Returns when the model is served."""
        path = socket_path(self._folder / "run", "scheduler")
        web = Web()
        async with asyncio.timeout(START):
            while True:
                try:
                    await dial(path, web, transport=SocketTransport(), clock=RealClock(), name="web", role=REQUESTS)
                    break
                except OSError:  # it does not listen yet
                    if self._process.poll() is not None:
                        raise BenchmarkError((self._folder / "log").read_text()[-2000:]) from None
                    await asyncio.sleep(0.1)
            await web.welcomed.wait()
        return web

    def resident(self) -> int:
        """Bytes of memory that the process has in use."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "manage.py", *arguments]

    def _environment(self) -> dict[str, str]:
        return child_environment(HARNESS_DATA_DIR=str(self._folder), HARNESS_LOG_LEVEL="WARNING")


async def held(words: int) -> float:
    """Bytes a request, with prompts of that many words."""
    with tempfile.TemporaryDirectory(prefix="hb-") as folder:
        scheduler = Scheduler(Path(folder))
        scheduler.start()
        try:
            web = await scheduler.connect()
            async with asyncio.timeout(PATIENCE):
                await web.send(0, WARM_UP, words)
                before = scheduler.resident()
                await web.send(WARM_UP, WAITING, words)
            return (scheduler.resident() - before) / WAITING
        finally:
            scheduler.stop()


def main() -> None:
    if sys.platform != "linux":
        print("Resident memory is read from /proc: this needs Linux.")
        return
    short, long = (uvloop.run(held(words)) for words in (SHORT, LONG))
    prompt = (long - short) * 1_000 / (LONG - SHORT)
    show(
        f"Bytes in a scheduler process of each of {WAITING} requests that wait",
        ["part", "bytes"],
        [["request", f"{short:.0f}"], ["1,000 tokens of prompt: text and token ids", f"{prompt:.0f}"]],
    )
    keep("memory", {"waiting": WAITING, "request": round(short), "prompt_of_1000_tokens": round(prompt)})


if __name__ == "__main__":
    main()
