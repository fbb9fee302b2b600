"""Requests that are in the engine: one task each, from dispatch to the end of the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol, cast

import msgspec
import structlog

from scheduler.core.types import Contract, Reason
from scheduler.engines.base import (
    Delta,
    Engine,
    EngineDeadError,
    EngineEvent,
    EngineRequest,
    Finished,
    PromptError,
    RequestFailedError,
    Terms,
)
from scheduler.wire import messages
from scheduler.worker.flight import Flight, Phase
from scheduler.worker.services import Services, cache_salt

log = structlog.get_logger(__name__)


class RunOwner(Protocol):
    """Who hears how runs go."""

    def progressed(self, flight: Flight, now: float) -> None:
        """It has delivered tokens."""

    def engine_died(self, error: EngineDeadError) -> None:
        """A run has found the engine dead. Every run that does says so."""

    def left(self, flight: Flight) -> None:
        """A preempted flight is out of the engine."""

    def stranded(self, flight: Flight) -> None:
        """The engine of the flight is gone."""


class Runs:
    """Carries events of one engine from `generate` to settlement, owner and outbox, until the run has an end."""

    def __init__(self, engine: Engine, services: Services, owner: RunOwner) -> None:
        self._engine = engine
        self._services = services
        self._owner = owner
        self._tasks: dict[asyncio.Task[None], Flight] = {}

    def start(self, flight: Flight) -> None:
        """Hand the flight to the engine, in a task of its own."""
        flight.task = asyncio.create_task(self._run(flight), name=f"run-{flight.id}")
        self._tasks[flight.task] = flight
        flight.task.add_done_callback(self._done)

    async def wait(self) -> None:
        """Until all that run have ended."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def stop(self, reason: Reason) -> None:
        """Abort all that run; `wait` then returns soon."""
        for flight in self._tasks.values():
            flight.stop(reason)

    def _done(self, task: asyncio.Task[None]) -> None:
        # A task that is cancelled before its first step never enters `_run`: its flight still gets its end. One that
        # has ended its run may be running again by now, in another task.
        flight = self._tasks.pop(task)
        if flight.task is task and flight.phase is Phase.RUNNING:
            self._stopped(flight)

    async def _run(self, flight: Flight) -> None:
        endings = self._services.endings
        try:
            finished = await self._deliver(flight)
        except RequestFailedError as error:
            endings.failed(flight, Reason.REQUEST_FAILED, str(error))
        except PromptError as error:
            endings.rejected(flight, error)
        except EngineDeadError as error:
            self._owner.engine_died(error)
            flight.stop_reason = flight.stronger(Reason.ENGINE_FAILED)
            self._stopped(flight)
        except asyncio.CancelledError:
            self._stopped(flight)  # cancelled by us, on purpose: the task ends here
        except Exception:  # the boundary of a request: a bug in an engine must not strand its caller
            log.exception("run failed", request_id=flight.id)
            endings.failed(flight, Reason.REQUEST_FAILED, "The engine could not run this request.")
        else:
            endings.finished(flight, finished)

    def _stopped(self, flight: Flight) -> None:
        """The run was cut short."""
        if flight.stop_reason is Reason.PREEMPTED:
            self._owner.left(flight)
        elif flight.stop_reason is Reason.ENGINE_FAILED:
            self._owner.stranded(flight)
        else:
            self._services.endings.aborted(flight)

    async def _deliver(self, flight: Flight) -> Finished:
        """Pass text on as it comes; answers the end."""
        # Every engine's `generate` is an async generator: closing it is how a request is aborted.
        stream = cast(AsyncGenerator[EngineEvent, None], self._engine.generate(self._request(flight)))
        left = flight.sequences
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Delta):
                    self._delta(flight, event)
                    continue
                left -= 1
                if not left:
                    return event
                self._services.endings.answer_finished(flight, event)
        raise RequestFailedError("The engine ended the answer without saying why.")

    def _delta(self, flight: Flight, delta: Delta) -> None:
        services = self._services
        now = services.clock.now()
        services.statistics.delivered(flight, delta.tokens - flight.made.get(delta.index, 0), now)
        if flight.first_token is None:
            flight.cached = delta.cached_tokens
            services.traces.first_token(flight.id, now)
        flight.advance(delta.index, delta.tokens, now)
        flight.whole = bool(delta.text)
        if flight.resumable:
            flight.produced += delta.token_ids
        services.settlement.moved(flight)
        self._owner.progressed(flight, now)
        services.outbox.put(
            flight.session,
            messages.Delta(flight.id, delta.text, flight.tokens, delta.index, "", delta.logprobs, delta.tool_calls),
        )
        if flight.preempting and flight.whole:
            flight.stop(Reason.PREEMPTED)

    def _request(self, flight: Flight) -> EngineRequest:
        assert flight.rendered is not None
        return EngineRequest(
            id=flight.id,
            rendered=flight.rendered,
            sampling=msgspec.structs.replace(flight.submit.sampling, max_tokens=flight.max_tokens),
            priority=flight.engine_priority,
            arrival=flight.arrival,
            cache_salt=cache_salt(self._services.salt_secret, flight.submit.caller.tenant),
            simulate=flight.submit.simulate,
            produced=tuple(flight.produced),
            terms=_terms(flight),
        )


def _terms(flight: Flight) -> Terms:
    tier = flight.tier
    assert tier is not None
    return Terms(tier.rank, tier.tpot, whole=tier.contract is Contract.E2E_TOTAL or not flight.submit.stream)


def is_resumable(submit: messages.Submit) -> bool:
    """Whether the rest of an answer is independent of where it was cut.

    Not so with several answers, with a seed, with penalties over what was produced, with stop strings that may begin
    before the cut, with a format or tool calls, whose reading begins at the first token, and with the faults of the
    simulated engine, which count tokens of one run.
    """
    spec, simulate = submit.sampling, submit.simulate or {}
    history = spec.seed is not None or spec.presence_penalty or spec.frequency_penalty or spec.stop
    read = spec.format is not None or spec.tools is not None
    return not (spec.n > 1 or history or read or any(name.endswith("_at") for name in simulate))
