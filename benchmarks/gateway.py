"""What Harness costs between a client and its engine: the whole product, over HTTP, with an engine that costs nothing.

    JSON      requests a second over 16 connections, one token each
    SSE       tokens and events a second over 16 streams; tokens that pile up share an event
    latency   one connection, one token, one request after the other

Beside it the floor: an application that answers with ready bytes, served by the same server with the same arguments
(`benchmarks/floor.py`). Rounds of the two take turns. Server and client run on cores of their own where there are two.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop

from benchmarks.floor import TOKENS_HEADER
from benchmarks.report import Spread, keep, on_separate_cores, percentile, show
from harness_web.env import child_environment
from harness_web.serve import uvicorn_arguments

ROOT = Path(__file__).resolve().parents[1]
CONNECTIONS = 16
ROUNDS = 5
ROUND_SECONDS = 1.5  # of JSON, of SSE, and at most of latency
STREAM_TOKENS = 256
LATENCY_REQUESTS = 200  # in a round, if they fit into ROUND_SECONDS
WARM_UP = 100  # requests
START = 60.0  # seconds in which the servers must be ready
STOP = 40.0

SETUP = {
    "version": 1,
    "tiers": [{"name": "bench", "rank": 1, "weight": 1}],
    "tenants": [{"slug": "bench", "name": "Bench", "tier": "bench", "keys": [{"name": "bench"}]}],
    "deployments": [
        {
            "model": "demo",
            "engine": "simulated",
            "options": {"step": {}, "max_seqs": 64, "step_tokens": 2048, "kv_tokens": 200_000, "max_model_len": 4096},
        }
    ],
}


class BenchmarkError(Exception):
    """The measurement means nothing; the text says why."""


# --- the servers ----------------------------------------------------------------------------------------------------


@dataclass
class Servers:
    """Harness and the floor, each on a free loopback port, with a data directory of their own."""

    data_dir: Path
    harness_port: int = 0
    floor_port: int = 0
    key: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Returns when both serve. Raises BenchmarkError."""
        self._manage("migrate", "-v0")
        setup = self.data_dir / "setup.yaml"
        setup.write_text(json.dumps(SETUP))  # JSON is YAML
        self.key = json.loads(self._manage("apply", str(setup), "--json"))["created"]["keys"][0]["key"]
        self.harness_port, self.floor_port = free_ports(2)
        self._run("harness", "manage.py", "up", "--no-seed", "--port", str(self.harness_port))
        _, *arguments = uvicorn_arguments("127.0.0.1", self.floor_port, 1)
        self._run("floor", "-m", "uvicorn", "benchmarks.floor:application", *arguments)
        self._wait_until_ready(self.harness_port, "harness")
        self._wait_until_ready(self.floor_port, "floor")

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGINT)
        for process in self.processes:
            process.wait(STOP)

    def _manage(self, *arguments: str) -> str:
        command = [sys.executable, "manage.py", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self._environment(), capture_output=True, text=True)
        if done.returncode:
            raise BenchmarkError(f"manage.py {arguments[0]} failed: {done.stderr}")
        return done.stdout

    def _run(self, name: str, *arguments: str) -> None:
        with (self.data_dir / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=self._environment(), stdout=log, stderr=log
            )
        self.processes.append(process)

    def _environment(self) -> dict[str, str]:
        return child_environment(HARNESS_DATA_DIR=str(self.data_dir))

    def _wait_until_ready(self, port: int, name: str) -> None:
        give_up = time.monotonic() + START
        while time.monotonic() < give_up and all(process.poll() is None for process in self.processes):
            with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as ask:
                ask.request("GET", "/readyz")
                if ask.getresponse().status == 200:
                    return
            time.sleep(0.1)
        raise BenchmarkError(f"{name} is not ready:\n{(self.data_dir / f'{name}.log').read_text()[-2000:]}")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def running() -> Iterator[tuple[Servers, str]]:
    """Both servers, and a sentence on the cores they have."""
    with tempfile.TemporaryDirectory(prefix="hb-") as folder:
        servers = Servers(Path(folder))
        try:
            cores = on_separate_cores(servers.start)
            yield servers, cores
        finally:
            servers.stop()


# --- the client -----------------------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """A kept-alive connection that does as little as a client can: it finds the end of each answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer = bytearray()
        self._done: asyncio.Future[bytes] | None = None

    async def ask(self, request: bytes) -> bytes:
        """The answer as it came. Raises BenchmarkError for any status but 200."""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        answer = await self._done
        if not answer.startswith(b"HTTP/1.1 200"):
            raise BenchmarkError(f"refused: {answer[:500].decode(errors='replace')}")
        return answer

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if self._is_complete() and self._done is not None:
            answer, self._answer = self._answer, bytearray()
            self._done.set_result(bytes(answer))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(BenchmarkError("the server closed the connection"))

    def _is_complete(self) -> bool:
        end = self._answer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._answer[:end].lower()
        _, found, rest = head.partition(b"\r\ncontent-length: ")
        if found:
            return len(self._answer) >= end + 4 + int(rest.split(b"\r\n", 1)[0])
        return self._answer.endswith(b"0\r\n\r\n")


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    name: str
    port: int
    key: str

    def request(self, **fields: Any) -> bytes:
        """A chat request, ready to be written."""
        body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hello"}], **fields}).encode()
        tokens = fields["max_tokens"] if fields.get("stream") else 0
        return (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\n{TOKENS_HEADER.decode()}: {tokens}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    async def connect(self, count: int) -> list[Connection]:
        loop = asyncio.get_running_loop()
        made = [await loop.create_connection(Connection, "127.0.0.1", self.port) for _ in range(count)]
        return [connection for _, connection in made]


@dataclass
class Rounds:
    """What one subject showed, a number for each round, and the latencies of all rounds in seconds."""

    json: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


async def load(connections: Sequence[Connection], request: bytes) -> tuple[int, int, float]:
    """Keep every connection busy for ROUND_SECONDS: answers, events in them, and seconds until the last had come."""
    start = time.perf_counter()

    async def repeat(connection: Connection) -> tuple[int, int]:
        answers = events = 0
        while time.perf_counter() - start < ROUND_SECONDS:
            events += (await connection.ask(request)).count(b"data: ")
            answers += 1
        return answers, events

    counts = await asyncio.gather(*(repeat(connection) for connection in connections))
    return sum(count[0] for count in counts), sum(count[1] for count in counts), time.perf_counter() - start


async def latencies(connection: Connection, request: bytes) -> list[float]:
    """Seconds of each of up to LATENCY_REQUESTS, one after the other."""
    times: list[float] = []
    give_up = time.perf_counter() + ROUND_SECONDS
    while len(times) < LATENCY_REQUESTS and time.perf_counter() < give_up:
        start = time.perf_counter()
        await connection.ask(request)
        times.append(time.perf_counter() - start)
    return times


async def one_round(subject: Subject, rounds: Rounds) -> None:
    connections = await subject.connect(CONNECTIONS)
    answers, _, seconds = await load(connections, subject.request(max_tokens=1))
    rounds.json.append(answers / seconds)
    answers, events, seconds = await load(connections, subject.request(max_tokens=STREAM_TOKENS, stream=True))
    rounds.tokens.append(answers * STREAM_TOKENS / seconds)
    rounds.events.append(events / seconds)
    rounds.latencies += await latencies(connections[0], subject.request(max_tokens=1))
    for connection in connections:
        connection.close()


async def measure(subjects: Sequence[Subject]) -> dict[str, Rounds]:
    for subject in subjects:
        (connection,) = await subject.connect(1)
        for _ in range(WARM_UP):
            await connection.ask(subject.request(max_tokens=1))
        connection.close()
    seen = {subject.name: Rounds() for subject in subjects}
    for _ in range(ROUNDS):
        for subject in subjects:
            await one_round(subject, seen[subject.name])
    return seen


# --- the report -----------------------------------------------------------------------------------------------------


def report(seen: dict[str, Rounds], cores: str) -> None:
    floor, harness = seen["floor"], seen["harness"]
    rates = [
        (f"JSON requests/s, {CONNECTIONS} connections", floor.json, harness.json),
        (f"SSE tokens/s, {CONNECTIONS} streams", floor.tokens, harness.tokens),
        (f"SSE events/s, {CONNECTIONS} streams", floor.events, harness.events),
    ]
    spreads = [(name, Spread.of(bare), Spread.of(ours)) for name, bare, ours in rates]
    show(
        f"Harness beside bare ASGI, median and range of {ROUNDS} rounds ({cores})",
        ["", "bare ASGI", "Harness", "ratio"],
        [[name, f"{bare:,.0f}", f"{ours:,.0f}", f"{ours.middle / bare.middle:.3f}"] for name, bare, ours in spreads],
    )
    times = {p: (percentile(floor.latencies, p), percentile(harness.latencies, p)) for p in (50, 99)}
    show(
        f"Latency of one connection, {len(harness.latencies)} requests of one token, ms",
        ["", "bare ASGI", "Harness", "added"],
        [
            [f"p{p}", f"{bare * 1e3:.2f}", f"{ours * 1e3:.2f}", f"{(ours - bare) * 1e3:.2f}"]
            for p, (bare, ours) in times.items()
        ],
    )
    keep(
        "gateway",
        {
            "cores": cores,
            "rates": {name: {"floor": bare, "harness": ours} for name, bare, ours in spreads},
            "latency": {f"p{p}": {"floor": bare, "harness": ours} for p, (bare, ours) in times.items()},
        },
    )


def main() -> None:
    with running() as (servers, cores):
        subjects = [Subject("floor", servers.floor_port, ""), Subject("harness", servers.harness_port, servers.key)]
        seen = uvloop.run(measure(subjects))
    report(seen, cores)


if __name__ == "__main__":
    try:
        main()
    except BenchmarkError as error:
        sys.exit(f"gateway: {error}")
