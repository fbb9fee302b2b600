"""One deployment in this process: its work, and the life of its engine.

             ┌──────────── options changed ───────────┐
             ▼                                        │
    start: STARTING ──► READY ──► (taken away) ──► DRAINING ──► STOPPED
             ▲  │         │
             │  ▼         │ the engine died: what waits goes on waiting, what ran goes back or fails (`work.py`)
           FAILED ◄───────┘
             back-off 1, 2, 4 … 30 s; an engine that does not come back ends what waits

One task walks this diagram (`run`); `retarget` tells it that the deployment has changed or gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import structlog

from scheduler.core.planner import Planner
from scheduler.core.types import PoolCapacity, Reason, Refusal, Request, StepReport
from scheduler.engines import with_smaller_step, with_step_tokens
from scheduler.engines.base import Engine, EngineDeadError, EngineLimits, EngineStartError
from scheduler.worker.configuration import DeploymentSpec
from scheduler.worker.engine_watch import Caution
from scheduler.worker.flight import Flight, StepTally
from scheduler.worker.races import first
from scheduler.worker.runs import Runs
from scheduler.worker.services import Services
from scheduler.worker.work import RETRY_STARTING, Work

log = structlog.get_logger(__name__)

T = TypeVar("T")

MAX_BACKOFF = 30.0  # seconds
STABLE_SECONDS = 60.0  # an engine that lived this long starts a new count of failures
DEAD_ENGINE_SECONDS = 5.0  # how long the streams of a dead engine may take to notice
WATCH_EVERY = 1.0  # seconds
ALARM = "The engine dies again and again: it is used in part until the deployment is changed or started anew."


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
        self._work: Work | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._wanted: DeploymentSpec | None = spec
        self._changed = asyncio.Event()
        self._dead = asyncio.Event()
        self._failures = 0  # in a row
        self._caution = Caution()
        self._whole: PoolCapacity | None = None  # what the engine has when it is started as it is configured
        self._label = label
        self._services = services
        self._on_state = on_state

    # --- what intake and endings ask of it --------------------------------------------------------------------------

    @property
    def planner(self) -> Planner | None:
        """None until the engine has been ready once."""
        return None if self._work is None else self._work.planner

    @property
    def flights(self) -> Mapping[str, Flight]:
        """Queued and running."""
        return {} if self._work is None else self._work.flights

    @property
    def tally(self) -> StepTally:
        return self._working.tally

    def unavailable(self) -> Refusal | None:
        """Why it takes no request now."""
        if self.state is PoolState.READY:
            return None
        if self.state is PoolState.DRAINING:
            return Refusal(Reason.DRAINING, f"The model {self.model} is being taken out of service.", RETRY_STARTING)
        return Refusal(Reason.ENGINE_NOT_READY, f"The model {self.model} is {self.state}.", RETRY_STARTING)

    def enqueue(self, flight: Flight, request: Request, now: float) -> Refusal | None:
        """Hand the request to the planner; answers its refusal."""
        return self._working.enqueue(flight, request, now)

    def cancel(self, flight: Flight) -> None:
        """The caller of a queued or running flight has gone."""
        self._working.cancel(flight)

    def ended(self, flight: Flight, reason: Reason | None, now: float) -> None:
        """A flight that has been dispatched is over. Called exactly once for each, by `Endings`."""
        self._working.ended(flight, reason, now)

    def reconfigure(self) -> None:
        """Tiers or policy have changed."""
        if self._work is not None:
            self._work.reconfigure()

    def retarget(self, spec: DeploymentSpec | None) -> None:
        """Serve `spec` from now on (None: nothing). The same engine and options change nothing."""
        if spec is not None and self._wanted is not None and _same_engine(spec, self._wanted):
            self.spec = self._wanted = spec
            return
        self._wanted = spec
        self._caution, self._whole = Caution(), None
        self._failures = 0
        self._changed.set()

    def died(self, error: EngineDeadError) -> None:
        """A call to the engine has found it dead, or the watch has given it up. Everybody who finds out may say so."""
        if self._dead.is_set():
            return
        self._dead.set()
        now = self._services.clock.now()
        log.error("engine died", model=self.model, error=str(error))
        self._services.statistics.metrics.engine_deaths.labels(self.model).inc()
        if self._caution.died(now):
            log.critical("engine dies again and again", model=self.model)
            self._services.statistics.event(now, self.model, "engine", ALARM)
        if self._work is not None:  # now, before the pump hands what waits to a dead engine
            self._work.engine_failed(str(error))
        if self.state is PoolState.READY:
            self._enter(PoolState.STARTING, f"The engine died and is being rebuilt: {error}")

    # --- the life of the engine -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the deployment is taken away."""
        try:
            while (spec := self._wanted) is not None:
                if self._changed.is_set():  # a rendered prompt belongs to the engine that it was rendered for
                    self._end_waiting("was changed")
                self.spec = spec
                self._changed.clear()
                engine = await self._start(spec)
                if engine is not None:
                    await self._serve(engine)
            self._end_waiting("is being taken out of service", Reason.DRAINING)
        finally:
            if self._pumping is not None:
                self._pumping.cancel()
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
        self._end_waiting("could not be started again")
        await self._back_off()
        return None

    async def _build(self, spec: DeploymentSpec) -> Engine:
        options = with_step_tokens(spec.engine, spec.options, self._services.configuration.policy.step_tokens)
        step = None if self._whole is None else self._caution.step_tokens(self._whole, self._services.clock.now())
        # Importing an engine may take seconds, so it is not done on the loop.
        engine = await asyncio.to_thread(
            self._services.create_engine,
            spec.engine,
            spec.model,
            options if step is None else with_smaller_step(spec.engine, options, step),
            clock=self._services.clock,
            on_step=self._stepped,
            data_dir=self._services.data_dir,
        )
        try:
            self.limits = await engine.start()
            if step is None:
                self._whole = self.limits.capacity
        except BaseException:
            await engine.aclose()
            raise
        return engine

    async def _serve(self, engine: Engine) -> None:
        """Work until the engine dies or the deployment changes, then leave no run behind."""
        started = self._services.clock.now()
        self._dead.clear()
        self.engine = engine
        work, pumping = self._employ()
        runs = work.resume(engine, self._capacity())
        watching = asyncio.create_task(self._watch(work), name=f"watch-{self.model}")
        self._enter(PoolState.READY, ALARM if self._caution.alarmed else "")
        try:
            await first(self._changed.wait(), self._dead.wait(), asyncio.wait([pumping]))
            if pumping.done():
                await self._stop_broken(work, pumping, runs)
            elif self._dead.is_set():
                await self._bury(runs)
            else:
                await self._drain(work, runs)
        finally:
            watching.cancel()
            work.suspend()
            self.engine = None
            await engine.aclose()
        if self._dead.is_set() and not self._changed.is_set():
            await self._after_death(self._services.clock.now() - started)

    def _employ(self) -> tuple[Work, asyncio.Task[None]]:
        """The work of this pool and its pump, made when the first engine is ready."""
        if self._work is None or self._pumping is None:
            self._work = Work(self.model, self._label, self._capacity(), self._services, self.died)
            self._pumping = asyncio.create_task(self._work.pump.run(), name=f"pump-{self.model}")
        return self._work, self._pumping

    async def _watch(self, work: Work) -> None:
        """Look once a second whether the engine still lives, and how much of it may be used."""
        clock = self._services.clock
        used = self._capacity()
        while True:
            await clock.sleep(WATCH_EVERY)
            if (silent := work.stalled(clock.now())) is not None:
                self.died(EngineDeadError(f"it made no step for {silent:.0f} s"))
            if (capacity := self._capacity()) != used:
                used = capacity
                work.resize(used)

    async def _bury(self, runs: Runs) -> None:
        """The engine died: every run ends with it."""
        await first(runs.wait(), self._services.clock.sleep(DEAD_ENGINE_SECONDS))
        runs.stop(Reason.ENGINE_FAILED)
        await runs.wait()

    async def _drain(self, work: Work, runs: Runs) -> None:
        """The deployment goes: nothing new, and time for what runs."""
        self._enter(PoolState.DRAINING)
        self._end_waiting("is being taken out of service", Reason.DRAINING)
        services = self._services
        patience = services.clock.sleep(services.drain_seconds)
        await first(work.emptied(), self._dead.wait(), patience, services.hurry.wait())
        runs.stop(Reason.SHUTDOWN)
        await runs.wait()

    async def _stop_broken(self, work: Work, pumping: asyncio.Task[None], runs: Runs) -> None:
        """The planner or what acts on it raised: a bug. The pool starts again from nothing and says so."""
        log.error("pump failed", model=self.model, exc_info=pumping.exception())
        work.broken = True
        work.suspend()
        self.message = "The scheduler of this model failed and was started again."
        self._enter(PoolState.STARTING, self.message)
        work.end_waiting(Refusal(Reason.ENGINE_NOT_READY, self.message, RETRY_STARTING))
        runs.stop(Reason.ENGINE_FAILED)
        await runs.wait()
        self._work = self._pumping = None

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

    # --- details ----------------------------------------------------------------------------------------------------

    @property
    def _working(self) -> Work:
        assert self._work is not None  # the engine has been ready
        return self._work

    def _capacity(self) -> PoolCapacity:
        """What is used of the engine: less than it has after it has died."""
        assert self.limits is not None
        return self._caution.capacity(self.limits.capacity, self._services.clock.now())

    def _end_waiting(self, fate: str, reason: Reason = Reason.ENGINE_NOT_READY) -> None:
        if self._work is not None:
            self._work.end_waiting(Refusal(reason, f"The model {self.model} {fate}.", RETRY_STARTING))

    def _stepped(self, report: StepReport) -> None:
        if self._work is not None:
            self._work.stepped(report)

    def _enter(self, state: PoolState, message: str = "", hint: str = "") -> None:
        self.state, self.message, self.hint = state, message, hint
        log.info("deployment", model=self.model, state=str(state), message=message, hint=hint)
        self._on_state(self)


def _same_engine(one: DeploymentSpec, other: DeploymentSpec) -> bool:
    return (one.engine, one.options) == (other.engine, other.options)
