"""A real engine under a workload: who is let in is decided by a policy of ours, or by nobody.

    vllm-fcfs        every request goes to the engine as it arrives, all with the same priority
    vllm-priority    the same, with the tier's rank as priority
    any policy       arrivals wait in the planner; a pump carries its decisions out, as the serving process does
    policy+shaper    the same, and the engine is told what its step shaper needs to know

Prompts are random tokens of the exact length, outputs have their forced length: every arm does the same work.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from scheduler.clock import RealClock
from scheduler.core.planner import Planner
from scheduler.core.step_model import Coefficients
from scheduler.core.types import (
    Dispatch,
    Expire,
    Outcome,
    PolicyConfig,
    PoolCapacity,
    Preempt,
    Reason,
    Request,
    StepReport,
    TierSpec,
)
from scheduler.engines import create_engine
from scheduler.engines.base import ChatPrompt, Delta, Engine, EngineRequest, Rendered, Sampling, Terms
from scheduler.simulator.replay import Record
from scheduler.simulator.workload import Workload
from scheduler.worker.engine_watch import EngineWatch
from scheduler.worker.pump import Bell, Pump

DIRECT = {"vllm-fcfs": False, "vllm-priority": True}  # name -> is the rank passed on?
SHAPED = "+shaper"
LEAD_IN = 0.1  # seconds from the start of a run to its first possible arrival
DRAIN_SECONDS = 40.0  # after the last arrival, eight times the longest deadline; the rest is given up
HELD_TICK = 0.05  # seconds between two looks while the engine's own queue is not empty
FIRST_TOKENS = 3  # ids below are special


def leave_computing_cores_alone() -> None:
    """Keep this process and the engine's loop off the cores that the engine computes on.

    vLLM on the CPU binds its worker to cores and reserves one for the rest, but nothing keeps the rest off the
    worker's. Does nothing where no core is left or nothing is bound.
    """
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    cores = {process.pid: set(process.cpu_affinity()) for process in family}
    everything = cores[os.getpid()]
    rest = everything - set().union(*(some for some in cores.values() if some < everything))
    if not rest or rest == everything:
        return
    for process in family:
        if cores[process.pid] == everything:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, rest)


class LiveEngine:
    """The started engine, and prompts for it. `listener` hears each step."""

    def __init__(self, engine: Engine, capacity: PoolCapacity, template: Rendered, vocabulary: int) -> None:
        self.engine = engine
        self.capacity = capacity
        self.clock = RealClock()
        self.listener: Callable[[StepReport], None] = lambda report: None
        self._template = template.payload
        draw = random.Random(7)
        self._ids = [draw.randrange(FIRST_TOKENS, vocabulary) for _ in range(2 * capacity.max_model_len)]

    @classmethod
    async def start(cls, options: dict[str, Any], data_dir: Path) -> LiveEngine:
        """Build and start vLLM. Raises EngineStartError."""
        reports: list[Callable[[StepReport], None]] = []

        def on_step(report: StepReport) -> None:
            for hear in reports:
                hear(report)

        engine = await asyncio.to_thread(
            create_engine, "vllm", "benchmark", options, clock=RealClock(), on_step=on_step, data_dir=data_dir
        )
        limits = await engine.start()
        leave_computing_cores_alone()
        prompt = ChatPrompt(({"role": "user", "content": "Hello"},))
        live = cls(engine, limits.capacity, await engine.render(prompt, Sampling(max_tokens=1)), limits.vocab_size)
        reports.append(lambda report: live.listener(report))
        return live

    async def generate(
        self, name: str, request: Request, priority: int, produced: tuple[int, ...] = (), terms: Terms | None = None
    ) -> AsyncIterator[Delta]:
        """The answer to a prompt of that length, with exactly `max_tokens` tokens. `name` must be new to the engine."""
        offset = zlib.crc32(request.id.encode()) % self.capacity.max_model_len
        payload = {**self._template, "prompt_token_ids": self._ids[offset : offset + request.prompt_tokens]}
        stream = self.engine.generate(
            EngineRequest(
                name,
                Rendered(request.prompt_tokens, request.max_tokens, payload),
                Sampling(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True),
                priority,
                request.arrival,
                produced=produced,
                terms=terms,
            )
        )
        async for event in stream:
            if isinstance(event, Delta):
                yield event


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step that followed another at once. `period`: seconds between their reports; `elapsed`: the engine's own."""

    prefill_tokens: int
    decode_seqs: int
    decode_context: int
    period: float
    elapsed: float


class StepObserver:
    """Makes samples of reports. `context`: KV tokens of what decodes, when asked."""

    def __init__(self, context: Callable[[], int]) -> None:
        self.samples: list[StepSample] = []
        self._context = context
        self._last: StepReport | None = None

    def step(self, report: StepReport) -> None:
        last, self._last = self._last, report
        if last is not None and last.running and report.elapsed:
            period = report.at - last.at
            sample = StepSample(report.prefill_tokens, report.decode_seqs, self._context(), period, report.elapsed)
            self.samples.append(sample)


@dataclass(slots=True)
class Steps:
    """What the engine reported while a run lasted. `late`: seconds that arrivals were sent after their instant."""

    count: int = 0
    busy: float = 0.0
    running: int = 0
    waiting: int = 0
    most_waiting: int = 0
    recomputes: int = 0
    late: list[float] = field(default_factory=list)

    def add(self, report: StepReport) -> None:
        self.count += 1
        self.busy += report.elapsed
        self.running += report.running
        self.waiting += report.waiting
        self.most_waiting = max(self.most_waiting, report.waiting)
        self.recomputes += report.preemptions


@dataclass(slots=True)
class Served:
    """A finished run. Instants in `records` are seconds from its beginning.

    `delivered`: tokens by the last arrival. `cpu`: seconds of this process until then, the engine's processes excluded.
    """

    records: list[Record]
    steps: Steps
    samples: list[StepSample]
    delivered: int
    evictions: int
    cpu: float


@dataclass(slots=True, eq=False)
class Flight:
    """One request of a run. `before`: tokens that earlier runs of it have made.

    A task that is cancelled before its first step never enters its coroutine: such a flight is told by `evicting`.
    """

    request: Request
    record: Record
    tokens: int = 0
    before: int = 0
    context: int = 0  # KV tokens once it decodes
    produced: list[int] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    entered: bool = False
    evicting: bool = False


class Front(Protocol):
    """Who lets requests into the engine."""

    def arrive(self, request: Request, now: float) -> Reason | None: ...

    def stepped(self, report: StepReport) -> None: ...

    def progressed(self, flight: Flight, now: float) -> None: ...

    def ended(self, flight: Flight, now: float) -> None: ...

    def evicted(self, flight: Flight, now: float) -> None: ...

    async def run(self) -> None: ...


class Direct:
    """Nobody does: the engine gets everything at once."""

    def __init__(self, owner: Run, tiers: dict[str, TierSpec], ranked: bool) -> None:
        self._owner = owner
        self._priorities = {name: tier.rank if ranked else 0 for name, tier in tiers.items()}

    def arrive(self, request: Request, now: float) -> Reason | None:
        self._owner.begin(request.id, self._priorities[request.tier])
        return None

    def stepped(self, report: StepReport) -> None:
        pass

    def progressed(self, flight: Flight, now: float) -> None:
        pass

    def ended(self, flight: Flight, now: float) -> None:
        pass

    def evicted(self, flight: Flight, now: float) -> None:
        raise AssertionError("nobody evicts")

    async def run(self) -> None:
        await asyncio.Event().wait()


class Planned:
    """A planner does, by one of our policies."""

    def __init__(self, owner: Run, planner: Planner, clock: RealClock) -> None:
        self._owner = owner
        self._planner = planner
        self._clock = clock
        self._watch = EngineWatch()
        self._bell = Bell(clock)
        self._pump = Pump(clock, self._bell, self._decide)

    def arrive(self, request: Request, now: float) -> Reason | None:
        refusal = self._planner.arrive(request, now)
        self._bell.ring()
        return refusal.reason if refusal else None

    def stepped(self, report: StepReport) -> None:
        self._watch.stepped(report)
        self._planner.step(replace(report, decode_context=self._planner.books.batcher.context))
        self._bell.ring()

    def progressed(self, flight: Flight, now: float) -> None:
        self._watch.alive(now)
        self._planner.progress(flight.request.id, flight.tokens - flight.before, now)

    def ended(self, flight: Flight, now: float) -> None:
        self._planner.finished(flight.request.id, Outcome(flight.tokens - flight.before), now)
        self._left()

    def evicted(self, flight: Flight, now: float) -> None:
        self._planner.evicted(flight.request.id, now)
        self._left()

    async def run(self) -> None:
        await self._pump.run()

    def _left(self) -> None:
        if not len(self._planner.books.batcher):
            self._watch.idle()
        self._bell.ring()

    def _decide(self, now: float) -> float | None:
        planner = self._planner
        free = not self._watch.crowded
        for decision in planner.decide(now) if free else planner.overdue(now):
            if isinstance(decision, Dispatch):
                self._owner.begin(decision.request.id, decision.engine_priority)
            elif isinstance(decision, Expire):
                self._owner.refuse(decision.request.id, decision.reason)
            elif isinstance(decision, Preempt):
                self._owner.evict(decision.request.id)
        return planner.next_wakeup(now) if free else now + HELD_TICK


class Run:
    """One workload, once, under one arm. `name` must differ from that of every other run of the engine."""

    def __init__(self, live: LiveEngine, workload: Workload, arm: str, name: str, step_cost: Coefficients) -> None:
        self._live = live
        self._workload = workload
        self._name = name
        self._records = [Record(request, cost) for request, cost in zip(workload.requests, workload.costs, strict=True)]
        self._flights: dict[str, Flight] = {}
        self._all_over = asyncio.Event()
        self._steps = Steps()
        self._observer = StepObserver(lambda: self._context)
        self._context = 0
        self._delivered = 0
        self._evictions = 0
        self._begun = 0.0
        self._shaped = arm.endswith(SHAPED)
        tiers = dict(workload.tiers)
        if arm in DIRECT:
            self._front: Front = Direct(self, tiers, DIRECT[arm])
        else:
            policy = PolicyConfig(name=arm.removesuffix(SHAPED))
            planner = Planner(live.capacity, tiers, policy, step_cost=step_cost, cpu_clock=time.thread_time)
            self._front = Planned(self, planner, live.clock)

    async def serve(self) -> Served:
        """Send every request at its instant and wait for what comes of it."""
        self._live.listener = self._stepped
        front = asyncio.create_task(self._front.run(), name="front")
        self._begun = self._live.clock.now() + LEAD_IN
        cpu = time.process_time()
        try:
            for record in self._records:
                await self._arrive(record)
            cpu = time.process_time() - cpu
            self._all_over.clear()
            if self._flights:
                over = asyncio.create_task(self._all_over.wait(), name="all-over")
                await asyncio.wait([over, front], timeout=DRAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                over.cancel()
            if front.done():
                front.result()  # it never ends by itself
        finally:
            front.cancel()
            await self._give_up()
        return Served(self._records, self._steps, self._observer.samples, self._delivered, self._evictions, cpu)

    # --- what a front asks for ------------------------------------------------------------------------------------

    def begin(self, request_id: str, priority: int) -> None:
        flight = self._flights[request_id]
        flight.entered = flight.evicting = False
        flight.task = asyncio.create_task(self._run(flight, priority), name=f"run-{request_id}")

    def refuse(self, request_id: str, reason: Reason) -> None:
        self._flights[request_id].record.refusal = reason
        self._over(request_id)

    def evict(self, request_id: str) -> None:
        self._evictions += 1
        flight = self._flights[request_id]
        flight.evicting = True
        if flight.entered and flight.task is not None:
            flight.task.cancel()

    # --- details --------------------------------------------------------------------------------------------------

    async def _arrive(self, record: Record) -> None:
        clock, begun = self._live.clock, self._begun
        await clock.sleep(begun + record.request.arrival - clock.now())
        now = clock.now()
        self._steps.late.append(now - begun - record.request.arrival)
        request = replace(
            record.request,
            arrival=begun + record.request.arrival,
            deadline=begun + record.request.deadline,
            queue_deadline=begun + record.request.queue_deadline,
            resumable=True,
        )
        self._flights[request.id] = Flight(request, record)
        reason = self._front.arrive(request, now)
        if reason is not None:
            self.refuse(request.id, reason)

    async def _run(self, flight: Flight, priority: int) -> None:
        name = f"{self._name}-{flight.request.id}-{flight.before}"
        tier = self._workload.tiers[flight.request.tier]
        terms = Terms(tier.rank, tier.tpot, whole=not flight.request.stream) if self._shaped else None
        stream = self._live.generate(name, flight.request, priority, tuple(flight.produced), terms)
        clock = self._live.clock
        flight.entered = True
        try:
            if not flight.evicting:
                async for delta in stream:
                    self._deliver(flight, delta, clock.now())
        except asyncio.CancelledError:
            if not flight.evicting:
                raise
        self._context -= flight.context
        flight.context = 0
        if flight.evicting and flight.tokens < flight.request.max_tokens:
            flight.before = flight.tokens
            self._front.evicted(flight, clock.now())
            return
        now = clock.now()
        flight.record.last_token = now - self._begun
        self._front.ended(flight, now)
        self._over(flight.request.id)

    def _deliver(self, flight: Flight, delta: Delta, now: float) -> None:
        if flight.record.first_token is None:
            flight.record.first_token = now - self._begun
        if now - self._begun <= self._workload.span:
            self._delivered += delta.tokens - flight.tokens
        flight.tokens = delta.tokens
        context = flight.request.prompt_tokens + flight.tokens
        self._context += context - flight.context
        flight.context = context
        flight.produced += delta.token_ids
        self._front.progressed(flight, now)

    def _over(self, request_id: str) -> None:
        del self._flights[request_id]
        if not self._flights:
            self._all_over.set()

    def _stepped(self, report: StepReport) -> None:
        if report.at - self._begun <= self._workload.span:
            self._steps.add(report)
            self._observer.step(report)
        self._front.stepped(report)

    async def _give_up(self) -> None:
        """End what still runs. Raises what a run has failed with: every arm is to do all of its work."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        self._live.listener = lambda report: None
        for result in results:
            if isinstance(result, Exception):
                raise result
