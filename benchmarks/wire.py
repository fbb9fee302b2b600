"""What the wire between web and scheduler carries over its Unix socket: two processes, no engine, no HTTP.

chunks   64 streams; each step is one frame with a token for every stream, as the scheduler's outbox makes it.
         Beside it the same tokens with a frame each: what a frame per step is worth.
accept   one request at a time: from handing over the submission to holding the acceptance.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.report import Spread, keep, on_separate_cores, percentile, show
from scheduler.clock import RealClock
from scheduler.engines.base import Sampling
from scheduler.wire.connection import Connection
from scheduler.wire.messages import (
    Accepted,
    AnyMessage,
    BatchInfo,
    Caller,
    Delta,
    Done,
    Events,
    Hello,
    Submit,
    Welcome,
)
from scheduler.wire.session import REQUESTS, dial, serve
from scheduler.wire.transport import SocketTransport

STREAMS = 64
STEPS = 3_000  # a round carries STREAMS x STEPS tokens
ROUNDS = 5
SUBMISSIONS = 2_000
PATIENCE = 30.0  # seconds for one round, or for the other process to listen
TURN = 16  # steps between two looks at whether the peer still takes what is sent
FRAME_PER_STEP, FRAME_PER_TOKEN = "frame a step", "frame a token"


def submission(request_id: str, model: str) -> Submit:
    caller = Caller(tenant="1", tenant_slug="acme", key="1", tier="vip", key_name="bench")
    messages = ({"role": "user", "content": "hello"},)
    return Submit(request_id, 1, 0.0, caller, model, messages, Sampling(max_tokens=STEPS), stream=True)


# --- the scheduler's process ----------------------------------------------------------------------------------------


class Scheduler:
    """Accepts at once; when STREAMS requests of a model that names a way of framing have come, it plays them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._streams: list[str] = []
        self._playing: asyncio.Task[None] | None = None

    def on_message(self, message: AnyMessage) -> None:
        assert isinstance(message, Submit)
        self._connection.send(Accepted(message.id, "vip", 1))
        if message.model in (FRAME_PER_STEP, FRAME_PER_TOKEN):
            self._streams.append(message.id)
        if len(self._streams) == STREAMS:
            streams, self._streams = self._streams, []
            self._playing = asyncio.create_task(self._play(streams, message.model == FRAME_PER_STEP))

    def on_closed(self, reason: str) -> None:
        """The web's process is done, and ends this one."""

    async def _play(self, streams: list[str], together: bool) -> None:
        for step in range(1, STEPS + 1):
            deltas = tuple(Delta(stream, " token", step) for stream in streams)
            for events in [deltas] if together else [(delta,) for delta in deltas]:
                self._connection.send(Events(events))
            if step % TURN == 0:
                await asyncio.sleep(0)
                await self._connection.room()
        batch = BatchInfo("b1", 64.0, 0.0, 0.0)
        self._connection.send(Events(tuple(Done(stream, "length", 1, STEPS, 0, batch) for stream in streams)))


def run_scheduler(path: Path) -> None:
    """The other process, until it is terminated."""

    async def listen() -> None:
        def welcome() -> Welcome:
            return Welcome("scheduler", 1, {})

        def converse(connection: Connection, hello: Hello) -> Scheduler:
            return Scheduler(connection)

        await serve(path, converse, welcome=welcome, transport=SocketTransport(), clock=RealClock())
        await asyncio.Event().wait()

    uvloop.run(listen())


# --- the web's process ----------------------------------------------------------------------------------------------


class Web:
    """Counts what comes back."""

    def __init__(self) -> None:
        self.connection: Connection
        self.welcomed = asyncio.Event()
        self.accepted = asyncio.Event()
        self.all_done = asyncio.Event()
        self.tokens = 0
        self._done = 0

    def on_welcome(self, connection: Connection, welcome: Welcome) -> None:
        self.connection = connection
        self.welcomed.set()

    def on_message(self, message: AnyMessage) -> None:
        match message:
            case Accepted():
                self.accepted.set()
            case Events():
                for event in message.events:
                    if isinstance(event, Delta):
                        self.tokens += 1
                    elif isinstance(event, Done):
                        self._end()

    def on_closed(self, reason: str) -> None:
        self.all_done.set()  # the count then tells that something is missing

    def _end(self) -> None:
        self._done += 1
        if self._done == STREAMS:
            self._done = 0
            self.all_done.set()

    async def tokens_per_second(self, framing: str, round_number: int) -> float:
        self.tokens = 0
        self.all_done.clear()
        start = time.perf_counter()
        for stream in range(STREAMS):
            self.connection.send(submission(f"{framing}-{round_number}-{stream}", framing))
        async with asyncio.timeout(PATIENCE):
            await self.all_done.wait()
        assert self.tokens == STREAMS * STEPS, f"{self.tokens} tokens of {STREAMS * STEPS} came"
        return self.tokens / (time.perf_counter() - start)

    async def accept_latencies(self) -> list[float]:
        """Seconds, one submission at a time."""
        times = []
        for number in range(SUBMISSIONS):
            self.accepted.clear()
            start = time.perf_counter()
            self.connection.send(submission(f"accept-{number}", "accept"))
            await self.accepted.wait()
            times.append(time.perf_counter() - start)
        return times


async def connected(path: Path) -> Web:
    web = Web()
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                await dial(path, web, transport=SocketTransport(), clock=RealClock(), name="web", role=REQUESTS)
            except OSError:  # it does not listen yet
                await asyncio.sleep(0.05)
                continue
            await web.welcomed.wait()
            return web


async def measure(path: Path) -> tuple[dict[str, Spread], list[float]]:
    """Rounds of the two framings take turns, so that both meet the same disturbances."""
    web = await connected(path)
    rates: dict[str, list[float]] = {FRAME_PER_STEP: [], FRAME_PER_TOKEN: []}
    for round_number in range(ROUNDS):
        for framing, seen in rates.items():
            seen.append(await web.tokens_per_second(framing, round_number))
    latencies = await web.accept_latencies()
    web.connection.close("done")
    return {framing: Spread.of(seen) for framing, seen in rates.items()}, latencies


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="hb-") as folder:
        path = Path(folder) / "scheduler.sock"
        scheduler = multiprocessing.get_context("spawn").Process(target=run_scheduler, args=(path,), daemon=True)
        cores = on_separate_cores(scheduler.start)
        try:
            rates, latencies = uvloop.run(measure(path))
        finally:
            scheduler.terminate()
            scheduler.join()
    base = rates[FRAME_PER_TOKEN].middle
    show(
        f"Tokens a second, {STREAMS} streams, {ROUNDS} rounds ({cores})",
        ["framing", "tokens/s", "ratio"],
        [[framing, f"{rate:,.0f}", f"{rate.middle / base:.2f}"] for framing, rate in rates.items()],
    )
    p50, p99 = percentile(latencies, 50), percentile(latencies, 99)
    show(
        f"Submission to acceptance, {SUBMISSIONS} one after the other",
        ["", "p50 µs", "p99 µs"],
        [["accept", f"{p50 * 1e6:.0f}", f"{p99 * 1e6:.0f}"]],
    )
    keep("wire", {"cores": cores, "tokens_per_second": rates, "accept": {"p50": p50, "p99": p99}})


if __name__ == "__main__":
    main()
