"""One deployment in this process: a planner, its pump, and the life of its engine.

             ┌──────────── options changed ───────────┐
             ▼                                        │
    start: STARTING ──► READY ──► (taken away) ──► DRAINING ──► STOPPED
             ▲  │         │
             │  ▼         │ the engine died: what ran fails, what waited is refused
           FAILED ◄───────┘
             back-off 1, 2, 4 … 30 s

One task walks this diagram (`run`); `retarget` tells it that the deployment has changed or gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import structlog

from scheduler.core.lifecycle import State
from scheduler.core.planner import Planner
from scheduler.core.types import Decision, Dispatch, Expire, Outcome, Reason, Refusal, Request, StepReport
from scheduler.engines.base import Engine, EngineDeadError, EngineLimits, EngineStartError
from scheduler.worker.configuration import DeploymentSpec
from scheduler.worker.flight import Flight, Phase, StepTally, sequences_in
from scheduler.worker.pump import Pump
from scheduler.worker.races import first
from scheduler.worker.runs import Runs
from scheduler.worker.services import Services
from scheduler.worker.spool import SpoolError

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_BACKOFF = 30.0  # seconds
STABLE_SECONDS = 60.0  # an engine that lived this long starts a new count of failures
DEAD_ENGINE_SECONDS = 5.0  # how long the streams of a dead engine may take to notice
RETRY_STARTING = 5.0  # seconds: what a caller is told while the engine is not there


class PoolState(StrEnum):
    """As the wire, `DeploymentStatus` and telemetry spell it."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"
    STOPPED = "stopped"


class Pool:
    """See the module text. `label` is the prefix of its batch ids; `on_state` hears of every change of state."""

    def __init__(self, spec: DeploymentSpec, label: str, services: Services, on_state: Callable[[Pool], None]) -> None:
        self.spec = spec
        self.model = spec.model
        self.state = PoolState.STARTING
        self.message = ""
        self.hint = ""
        self.engine: Engine | None = None
        self.limits: EngineLimits | None = None
        self.planner: Planner | None = None
        self.flights: dict[str, Flight] = {}  # queued and running
        self.tally = StepTally()
        self._wanted: DeploymentSpec | None = spec
        self._changed = asyncio.Event()
        self._dead = asyncio.Event()
        self._failures = 0  # in a row
        self._label = label
        self._services = services
        self._on_state = on_state
        self._pump: Pump | None = None
        self._runs: Runs | None = None

    # --- what intake asks of it -------------------------------------------------------------------------------------

    def unavailable(self) -> Refusal | None:
        """Why it takes no request now."""
        if self.state is PoolState.READY:
            return None
        if self.state is PoolState.DRAINING:
            return Refusal(Reason.DRAINING, f"The model {self.model} is being taken out of service.", RETRY_STARTING)
        return Refusal(Reason.ENGINE_NOT_READY, f"The model {self.model} is {self.state}.", RETRY_STARTING)

    def enqueue(self, flight: Flight, request: Request, now: float) -> Refusal | None:
        """Hand the request to the planner; answers its refusal."""
        assert self.planner is not None
        refusal = self.planner.arrive(request, now)
        if refusal is None:
            flight.phase = Phase.QUEUED
            self.flights[flight.id] = flight
            self._ring()
        return refusal

    def cancel(self, flight: Flight) -> None:
        """The caller of a queued or running flight has gone."""
        assert self.planner is not None
        if self.planner.cancel(flight.id, self._services.clock.now()) is State.QUEUED:
            del self.flights[flight.id]
            self._services.endings.cancelled_before_dispatch(flight)
            self._ring()
        elif flight.task is not None:
            flight.abort_reason = Reason.CLIENT_GONE
            flight.task.cancel()

    def left_engine(self, flight: Flight, outcome: Outcome, now: float) -> None:
        """A running flight has ended: its slot is free. Called exactly once for each, by `Endings`."""
        if self.planner is not None:  # None: it failed and is being replaced
            self.planner.finished(flight.id, outcome, now)
        del self.flights[flight.id]
        self._ring()

    def reconfigure(self) -> None:
        """Tiers or policy have changed."""
        if self.planner is not None:
            configuration = self._services.configuration
            self.planner.reconfigure(configuration.tiers, configuration.policy, self._services.clock.now())
            self._ring()

    def retarget(self, spec: DeploymentSpec | None) -> None:
        """Serve `spec` from now on (None: nothing). The same engine and options change nothing."""
        if spec is not None and self._wanted is not None and _same_engine(spec, self._wanted):
            self.spec = self._wanted = spec
            return
        self._wanted = spec
        self._failures = 0
        self._changed.set()

    # --- the life of the engine -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the deployment is taken away."""
        while (spec := self._wanted) is not None:
            self.spec = spec
            self._changed.clear()
            engine = await self._start(spec)
            if engine is not None:
                await self._serve(engine)
        self._enter(PoolState.STOPPED)

    async def _start(self, spec: DeploymentSpec) -> Engine | None:
        """A started engine; None: it failed and the back-off is over, or the deployment has changed meanwhile."""
        self._enter(PoolState.STARTING, self.message if self._failures else "")
        try:
            return await self._unless_changed(self._build(spec))
        except EngineStartError as error:
            self._enter(PoolState.FAILED, str(error), error.hint)
        except Exception as error:  # the boundary of an engine: its bugs are this deployment's state
            log.exception("engine start failed", model=self.model)
            self._enter(PoolState.FAILED, f"The engine could not be started ({type(error).__name__}).", "See the log.")
        await self._back_off()
        return None

    async def _build(self, spec: DeploymentSpec) -> Engine:
        # Importing an engine may take seconds, so it is not done on the loop.
        engine = await asyncio.to_thread(
            self._services.create_engine,
            spec.engine,
            spec.model,
            spec.options,
            clock=self._services.clock,
            on_step=self._step,
            data_dir=self._services.data_dir,
        )
        try:
            self.limits = await engine.start()
        except BaseException:
            await engine.aclose()
            raise
        return engine

    async def _serve(self, engine: Engine) -> None:
        """Work until the engine dies or the deployment changes, then leave nothing behind."""
        started = self._services.clock.now()
        self._dead.clear()
        self.engine = engine
        pump = self._pump = self._make_pump()
        runs = self._runs = self._make_runs(engine)
        pumping = asyncio.create_task(pump.run(), name=f"pump-{self.model}")
        self._enter(PoolState.READY)
        pump.bell.ring()
        try:
            await first(self._changed.wait(), self._dead.wait(), pumping)
            if self._dead.is_set():
                await self._bury(runs)
            elif self._changed.is_set():
                await self._drain(runs)
            else:
                await self._stop_failed_pump(pumping, runs)
        finally:
            pumping.cancel()
            self.engine = self._pump = self._runs = None
            await engine.aclose()
        if self._dead.is_set() and not self._changed.is_set():
            await self._after_death(self._services.clock.now() - started)

    async def _bury(self, runs: Runs) -> None:
        """The engine died: every stream ends with it."""
        await first(runs.wait(), self._services.clock.sleep(DEAD_ENGINE_SECONDS))
        runs.stop(Reason.ENGINE_FAILED)
        await runs.wait()

    async def _drain(self, runs: Runs) -> None:
        """The deployment goes: nothing new, and time for what runs."""
        self._enter(PoolState.DRAINING)
        refusal = self.unavailable()
        assert refusal is not None
        self._refuse_queue(refusal)
        services = self._services
        await first(runs.wait(), services.clock.sleep(services.drain_seconds), services.hurry.wait())
        runs.stop(Reason.SHUTDOWN)
        await runs.wait()

    async def _stop_failed_pump(self, pumping: asyncio.Task[None], runs: Runs) -> None:
        """The planner or what acts on it raised: a bug. The pool starts again from nothing and says so."""
        log.error("pump failed", model=self.model, exc_info=pumping.exception())
        self.message = "The scheduler of this model failed and was started again."
        self._enter(PoolState.STARTING, self.message)
        self.planner = None
        for flight in list(self.flights.values()):
            if flight.phase is Phase.QUEUED:
                del self.flights[flight.id]
                self._services.endings.refused(flight, Refusal(Reason.ENGINE_NOT_READY, self.message, RETRY_STARTING))
        runs.stop(Reason.ENGINE_FAILED)
        await runs.wait()

    async def _after_death(self, lived: float) -> None:
        """The first death after a stable time is answered at once, further ones with back-off."""
        if lived >= STABLE_SECONDS:
            self._failures = 0
        if self._failures:
            await self._back_off()
        else:
            self._failures = 1

    async def _back_off(self) -> None:
        seconds = min(2.0**self._failures, MAX_BACKOFF)
        self._failures += 1
        await self._unless_changed(self._services.clock.sleep(seconds))

    async def _unless_changed(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns, or None when the deployment changes first; the work is then cancelled."""
        task = asyncio.create_task(work, name=f"pool-{self.model}")
        await first(task, self._changed.wait())
        return task.result() if task.done() and not task.cancelled() else None

    # --- acting on decisions ----------------------------------------------------------------------------------------

    def _act(self, decisions: Sequence[Decision], now: float) -> None:
        dispatches = []
        for decision in decisions:
            if isinstance(decision, Dispatch):
                dispatches.append(decision)
            elif isinstance(decision, Expire):
                self._expire(decision)
        if dispatches:
            self._dispatch([self._prepare(dispatch, now) for dispatch in dispatches], now)

    def _prepare(self, dispatch: Dispatch, now: float) -> Flight:
        flight = self.flights[dispatch.request.id]
        caller, configuration = flight.submit.caller, self._services.configuration
        flight.dispatch = dispatch
        flight.dispatched = now
        flight.phase = Phase.RUNNING
        flight.steps_before = self.tally.copy()
        flight.policy_version = configuration.policy.version
        flight.price = configuration.price(self.model, caller.tier, caller.tenant, flight.arrived_at)
        return flight

    def _dispatch(self, flights: Sequence[Flight], now: float) -> None:
        """Intents first: what is not in the spool does not run."""
        assert self._runs is not None
        services = self._services
        try:
            services.settlement.begin([(flight, services.endings.intent(flight)) for flight in flights])
        except SpoolError:
            for flight in flights:
                self.left_engine(flight, Outcome(0, Reason.SPOOL_UNAVAILABLE), now)
                services.endings.refused(flight, spool_refusal())
            return
        for flight in flights:
            services.statistics.dispatched(flight)
            self._runs.start(flight)

    def _expire(self, expire: Expire) -> None:
        flight = self.flights.pop(expire.request.id)
        waited = self._services.clock.now() - flight.arrival
        self._services.endings.refused(
            flight, Refusal(expire.reason, f"The request waited {waited:.1f} s without getting its turn.", 1.0)
        )

    def _refuse_queue(self, refusal: Refusal) -> None:
        assert self.planner is not None
        for request in self.planner.drain(self._services.clock.now()):
            self._services.endings.refused(self.flights.pop(request.id), refusal)

    # --- details ----------------------------------------------------------------------------------------------------

    def _make_pump(self) -> Pump:
        configuration, clock = self._services.configuration, self._services.clock
        assert self.limits is not None
        if self.planner is None:
            self.planner = Planner(self.limits.capacity, configuration.tiers, configuration.policy, pool=self._label)
        else:
            self.planner.resize(self.limits.capacity, clock.now())
        decided = self._services.statistics.metrics.decision.labels(self.model).observe
        return Pump(self.planner, clock, self._act, decided)

    def _make_runs(self, engine: Engine) -> Runs:
        services = self._services
        return Runs(
            engine,
            services.clock,
            services.settlement,
            services.outbox,
            services.endings,
            services.statistics,
            services.cache_salt,
            self._progress,
            self.died,
        )

    def _progress(self, flight: Flight, now: float) -> None:
        assert self.planner is not None
        self.planner.progress(flight.id, flight.tokens, now)

    def _step(self, report: StepReport) -> None:
        self.tally.add(sequences_in(report))
        self._services.statistics.step(self.model, report, self._services.clock.now())
        self._ring()

    def died(self, error: EngineDeadError) -> None:
        """A call to the engine has found it dead. Every call that does may say so."""
        if self._dead.is_set():
            return
        self._dead.set()
        log.error("engine died", model=self.model, error=str(error))
        if self.state is PoolState.READY:  # now, before the pump hands what waits to a dead engine
            self._enter(PoolState.STARTING, f"The engine died and is being rebuilt: {error}")
            self._refuse_queue(
                Refusal(Reason.ENGINE_NOT_READY, "The engine failed; it is being rebuilt.", RETRY_STARTING)
            )

    def _ring(self) -> None:
        if self._pump is not None:
            self._pump.bell.ring()

    def _enter(self, state: PoolState, message: str = "", hint: str = "") -> None:
        self.state, self.message, self.hint = state, message, hint
        log.info("deployment", model=self.model, state=str(state), message=message, hint=hint)
        self._on_state(self)


def spool_refusal() -> Refusal:
    """What callers are told while nothing can be billed."""
    return Refusal(Reason.SPOOL_UNAVAILABLE, "Usage cannot be recorded at the moment.", RETRY_STARTING)


def _same_engine(one: DeploymentSpec, other: DeploymentSpec) -> bool:
    return (one.engine, one.options) == (other.engine, other.options)
