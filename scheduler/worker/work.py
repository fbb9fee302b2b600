"""The work of one pool: what waits and what runs, the planner that decides about it, and who carries that out.

    enqueue ──► planner ──► decide: Dispatch ──► a run in the engine ──► its end (`Endings`)
                   ▲        Expire   ──► an answer         │
                   │        Preempt  ──► the run is cut    │
                   └──── returned, to go on later ─────────┘   preempted, or the engine died under it

It outlives the engine: while there is none (`suspend`), what waits goes on waiting, and waiting still ends in time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from scheduler.core.controller import CapChange
from scheduler.core.degradation import LevelChange
from scheduler.core.guard import PolicyReplaced
from scheduler.core.planner import Planner
from scheduler.core.types import (
    Decision,
    Dispatch,
    Expire,
    Hold,
    Outcome,
    PoolCapacity,
    Preempt,
    Reason,
    Refusal,
    Request,
    StepReport,
)
from scheduler.dead_letters import Cause
from scheduler.engines.base import Engine, EngineDeadError
from scheduler.worker.engine_watch import EngineWatch
from scheduler.worker.flight import Flight, Phase, StepTally, sequences_in
from scheduler.worker.pump import Bell, Pump
from scheduler.worker.runs import Runs
from scheduler.worker.services import Services
from scheduler.worker.spool import SpoolError

log = structlog.get_logger(__name__)

RETRY_STARTING = 5.0  # seconds: what a caller is told while the engine is not there
RETRY_EXPIRED = 1.0  # seconds: what a caller is told whose waiting has ended, where the planner has no advice
HELD_TICK = 0.05  # seconds between two looks while nothing may be dispatched
DEATHS = 2  # engines that may die under a request; then it is a dead letter


class Work:
    """See the module text. `on_dead` hears, once for each engine, that it has died."""

    def __init__(
        self,
        model: str,
        label: str,
        capacity: PoolCapacity,
        services: Services,
        on_dead: Callable[[EngineDeadError], None],
    ) -> None:
        configuration = services.configuration
        self.planner = Planner(
            capacity, configuration.tiers, configuration.policy, pool=label, cpu_clock=services.garbage.cpu
        )
        self.flights: dict[str, Flight] = {}  # queued and running
        self.tally = StepTally()
        self.watch = EngineWatch()
        self.bell = Bell(services.clock)
        self.pump = Pump(services.clock, self.bell, self.decide)
        self.broken = False  # the planner has raised: it is not asked any more
        self.runs: Runs | None = None
        self._model = model
        self._services = services
        self._on_dead = on_dead
        self._flight_gone = asyncio.Event()
        self._seconds_decided = services.statistics.metrics.decision.labels(model).observe

    # --- the engine -------------------------------------------------------------------------------------------------

    def resume(self, engine: Engine, capacity: PoolCapacity) -> Runs:
        """An engine is there, perhaps again: dispatch to it."""
        now = self._services.clock.now()
        self.watch = EngineWatch()
        self.planner.resize(capacity, now)
        self.planner.engine_recovered(now)
        self.runs = Runs(engine, self._services, self)
        self.bell.ring()
        return self.runs

    def engine_failed(self, cause: str) -> None:
        """The engine is gone: nothing is dispatched from this moment on, and the planner knows why."""
        self.suspend()
        if not self.broken:
            now = self._services.clock.now()
            self.planner.engine_failed(now, cause)
            self._tell(now)

    def suspend(self) -> None:
        """Dispatch nothing until `resume`. What runs goes on to its end, or comes back."""
        self.runs = None

    def resize(self, capacity: PoolCapacity) -> None:
        """Another part of the engine may be used from now on."""
        self.planner.resize(capacity, self._services.clock.now())
        self.bell.ring()

    def stepped(self, report: StepReport) -> None:
        """The engine has made a step. One that does not know the context of its decoders gets ours."""
        self.tally.add(sequences_in(report))
        self._services.statistics.step(self._model, report, self._services.clock.now())
        if self.watch.stepped(report):
            log.error("the engine's own queue does not empty; nothing is dispatched", model=self._model)
            self._services.statistics.metrics.engine_queue_alarms.labels(self._model).inc()
        if report.shaper_failure is not None:
            log.error("the engine's step shaper has failed and is off", model=self._model, cause=report.shaper_failure)
            self._services.statistics.metrics.shaper_failures.labels(self._model).inc()
        if report.decode_seqs and not report.decode_context:
            report = replace(report, decode_context=self.planner.books.batcher.context)
        if not self.broken:
            self.planner.step(report)
        self.bell.ring()

    def stalled(self, now: float) -> float | None:
        """Seconds without a sign of life from an engine that has something to do; None if that is no reason to worry.

        `engine_watch.py` has the rule.
        """
        books = self.planner.books
        if not len(books.batcher):
            self.watch.idle()
            return None
        chunk = min(books.service.remaining_prefill(), books.capacity.step_tokens)
        return self.watch.silence(now, books.step_time(chunk))

    # --- requests in and out ----------------------------------------------------------------------------------------

    def enqueue(self, flight: Flight, request: Request, now: float) -> Refusal | None:
        """Hand the request to the planner; answers its refusal."""
        refusal = self.planner.arrive(request, now)
        if refusal is None:
            flight.phase = Phase.QUEUED
            flight.resumable = request.resumable
            self.flights[flight.id] = flight
            self._services.traces.queued(flight.id, request.tier, str(request.lane), now)
            self.bell.ring()
        return refusal

    def cancel(self, flight: Flight) -> None:
        """The caller of a queued or running flight has gone."""
        if flight.phase is Phase.RUNNING:
            flight.stop(Reason.CLIENT_GONE)
            return
        if not self.broken:
            self.planner.cancel(flight.id, self._services.clock.now())
        if flight.dispatch is None:
            del self.flights[flight.id]
            self._services.endings.cancelled_before_dispatch(flight)
        else:
            flight.stop_reason = Reason.CLIENT_GONE
            self._services.endings.aborted(flight)
        self.bell.ring()

    def ended(self, flight: Flight, reason: Reason | None, now: float) -> None:
        """A flight that has been dispatched is over. Called exactly once for each, by `Endings`."""
        if flight.phase is Phase.RUNNING and not self.broken:
            flight.end_run()
            self.planner.finished(flight.id, Outcome(flight.run_tokens, reason), now)
        del self.flights[flight.id]
        self._flight_gone.set()
        self.bell.ring()

    async def emptied(self) -> None:
        """Until nothing waits and nothing runs."""
        while self.flights:
            self._flight_gone.clear()
            await self._flight_gone.wait()

    def end_waiting(self, refusal: Refusal) -> None:
        """End everything that waits: there is no engine that it could wait for."""
        now = self._services.clock.now()
        waiting = [one for one in self.flights.values() if one.phase is Phase.QUEUED]
        if not self.broken:
            self.planner.drain(now)
        for flight in waiting:
            if flight.dispatch is None:
                del self.flights[flight.id]
                self._services.endings.refused(flight, refusal)
            elif refusal.reason is Reason.DRAINING:
                flight.stop_reason = Reason.SHUTDOWN
                self._services.endings.aborted(flight)
            else:
                self._bury(flight, Cause.NOT_RESUMABLE, refusal.message)

    def reconfigure(self) -> None:
        """Tiers or policy have changed."""
        configuration = self._services.configuration
        self.planner.reconfigure(configuration.tiers, configuration.policy, self._services.clock.now())
        self.bell.ring()

    # --- deciding and acting ----------------------------------------------------------------------------------------

    def decide(self, now: float) -> float | None:
        """One round, as the pump asks for it."""
        started = time.perf_counter()
        free = self.runs is not None and not self.watch.crowded
        decisions = self.planner.decide(now) if free else self.planner.overdue(now)
        self._seconds_decided(time.perf_counter() - started)
        self._act(decisions, now)
        self._tell(now)
        return self.planner.next_wakeup(now) if free else now + HELD_TICK

    def _act(self, decisions: Sequence[Decision], now: float) -> None:
        dispatches = [one for one in decisions if isinstance(one, Dispatch)]
        for decision in decisions:
            if isinstance(decision, Expire):
                self._expire(decision, now)
            elif isinstance(decision, Hold):
                self._hold(decision, now)
            elif isinstance(decision, Preempt):
                self._preempt(decision, now)
        if dispatches:
            self._dispatch([self._prepare(one, len(dispatches) - 1, now) for one in dispatches], now)

    def _prepare(self, dispatch: Dispatch, mates: int, now: float) -> Flight:
        flight = self.flights[dispatch.request.id]
        self._services.traces.dispatched(flight.id, str(dispatch.reason), dispatch.batch_id, mates, now)
        flight.phase = Phase.RUNNING
        flight.engine_priority = dispatch.engine_priority
        flight.runs += 1
        flight.charged = self.planner.meter(flight.id)
        flight.stop_reason = None
        if flight.dispatch is None:
            flight.dispatch = dispatch
            flight.dispatched = now
            flight.max_tokens = dispatch.request.max_tokens  # a degraded service may give less than was asked
            flight.steps_before = self.tally.copy()
            flight.policy_version = self._services.configuration.policy.version
        return flight

    def _dispatch(self, flights: Sequence[Flight], now: float) -> None:
        """Intents first: what is not in the spool does not run. A flight that goes on has its intent."""
        assert self.runs is not None
        services = self._services
        fresh = [flight for flight in flights if not flight.serial]
        try:
            services.settlement.begin([(flight, services.endings.intent(flight)) for flight in fresh])
        except SpoolError:
            for flight in fresh:
                self.ended(flight, Reason.SPOOL_UNAVAILABLE, now)
                services.endings.refused(flight, spool_refusal())
            flights = [flight for flight in flights if flight.serial]
        else:
            for flight in fresh:
                services.statistics.dispatched(flight)
        for flight in flights:
            self.runs.start(flight)

    def _expire(self, expire: Expire, now: float) -> None:
        flight = self.flights.pop(expire.request.id)
        message = expire.message or f"The request waited {now - flight.arrival:.1f} s without getting its turn."
        wait = RETRY_EXPIRED if expire.retry_after is None else expire.retry_after
        if expire.reason is Reason.QUEUE_TIMEOUT:
            self._services.dead_letters.put(flight, Cause.WAITED_TOO_LONG, message)
        self._services.endings.refused(flight, Refusal(expire.reason, message, wait))

    def _hold(self, hold: Hold, now: float) -> None:
        self._services.traces.held(hold.request.id, str(hold.reason), now)
        self._services.statistics.held(hold.request.tier, hold.reason)

    def _preempt(self, preempt: Preempt, now: float) -> None:
        """Have the victim leave the engine, at the next place where its text is whole."""
        flight = self.flights[preempt.request.id]
        self._services.traces.preempted(flight.id, preempt.beneficiary.id, flight.tokens, now)
        self._services.statistics.metrics.preemptions.labels(flight.tier_name).inc()
        flight.preempting = True
        if flight.whole:
            flight.stop(Reason.PREEMPTED)

    def _tell(self, now: float) -> None:
        """What has happened to policy, level and batch cap: to the log, the console and the metrics."""
        for event in self.planner.take_events():
            self._services.statistics.event(now, self._model, *_describe(event))

    # --- what runs say (`RunOwner`) ---------------------------------------------------------------------------------

    def progressed(self, flight: Flight, now: float) -> None:
        self.watch.alive(now)
        if not self.broken:
            self.planner.progress(flight.id, flight.run_tokens, now)

    def engine_died(self, error: EngineDeadError) -> None:
        self._on_dead(error)

    def left(self, flight: Flight) -> None:
        """It was preempted: it waits again, for the rest of its answer."""
        if self.broken:
            self._bury(flight, Cause.NOT_RESUMABLE, "The scheduler of this model failed.")
        else:
            self._return(flight, Reason.PREEMPTED)

    def stranded(self, flight: Flight) -> None:
        """Its engine has died: it goes on with the next one if it can, once."""
        flight.deaths += 1
        if flight.deaths >= DEATHS:
            self._bury(flight, Cause.CRASHED_ENGINE_TWICE, "The engine failed twice while it ran this request.")
        elif self.broken or not flight.can_go_on:
            self._bury(flight, Cause.NOT_RESUMABLE, "The engine failed while it ran this request.")
        else:
            self._return(flight, Reason.ENGINE_FAILED)

    def _return(self, flight: Flight, reason: Reason) -> None:
        now = self._services.clock.now()
        flight.end_run()
        self.planner.evicted(flight.id, now)
        flight.phase = Phase.QUEUED
        flight.task = None
        flight.preempting = False
        flight.tokens_before = flight.tokens
        self._services.traces.returned(flight.id, str(reason), flight.tokens, now)
        self.bell.ring()

    def _bury(self, flight: Flight, cause: Cause, message: str) -> None:
        """It cannot go on. What it has delivered is billed."""
        self._services.dead_letters.put(flight, cause, message)
        self._services.endings.failed(flight, Reason.ENGINE_FAILED, message)


def spool_refusal() -> Refusal:
    """What callers are told while nothing can be billed."""
    return Refusal(Reason.SPOOL_UNAVAILABLE, "Usage cannot be recorded at the moment.", RETRY_STARTING)


def _describe(event: PolicyReplaced | LevelChange | CapChange) -> tuple[str, str]:
    """Kind and sentence of an event, for the operator."""
    match event:
        case PolicyReplaced():
            return "policy", f"{event.name} failed and {event.replacement} works in its place: {event.cause}"
        case LevelChange():
            return "level", f"degradation level {event.before} to {event.after}: {event.cause}"
        case CapChange():
            return "cap", f"at most {event.after} requests run, not {event.before}: {event.cause}"
