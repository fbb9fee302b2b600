"""Requests that are in the engine: one task each, from dispatch to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

import structlog

from scheduler.clock import Clock
from scheduler.core.types import Reason
from scheduler.engines.base import (
    Delta,
    Engine,
    EngineDeadError,
    EngineEvent,
    EngineRequest,
    Finished,
    PromptError,
    RequestFailedError,
    Sampling,
)
from scheduler.wire import messages
from scheduler.worker.endings import Endings
from scheduler.worker.flight import Flight
from scheduler.worker.outbox import Outbox
from scheduler.worker.settlement import Settlement
from scheduler.worker.statistics import Statistics

log = structlog.get_logger(__name__)


class Runs:
    """Carries events of one engine from `generate` to settlement, planner and outbox, and tells when it has died."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        settlement: Settlement,
        outbox: Outbox,
        endings: Endings,
        statistics: Statistics,
        cache_salt: Callable[[str], str],
        on_progress: Callable[[Flight, float], None],
        on_dead: Callable[[EngineDeadError], None],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._settlement = settlement
        self._outbox = outbox
        self._endings = endings
        self._statistics = statistics
        self._cache_salt = cache_salt
        self._on_progress = on_progress
        self._on_dead = on_dead
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
        for task, flight in self._tasks.items():
            flight.abort_reason = reason
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        # A task that is cancelled before its first step never enters `_run`: its flight still gets its end.
        self._endings.aborted(self._tasks.pop(task))

    async def _run(self, flight: Flight) -> None:
        try:
            finished = await self._deliver(flight)
        except RequestFailedError as error:
            self._endings.failed(flight, Reason.REQUEST_FAILED, str(error))
        except PromptError as error:
            self._endings.rejected(flight, error)
        except EngineDeadError as error:
            self._on_dead(error)
            self._endings.failed(flight, Reason.ENGINE_FAILED, "The engine failed while it ran this request.")
        except asyncio.CancelledError:
            self._endings.aborted(flight)  # cancelled by us, on purpose: the task ends here
        except Exception:  # the boundary of a request: a bug in an engine must not strand its caller
            log.exception("run failed", request_id=flight.id)
            self._endings.failed(flight, Reason.REQUEST_FAILED, "The engine could not run this request.")
        else:
            self._endings.finished(flight, finished)

    async def _deliver(self, flight: Flight) -> Finished:
        """Pass text on as it comes; answers the end."""
        # Every engine's `generate` is an async generator: closing it is how a request is aborted.
        stream = cast(AsyncGenerator[EngineEvent, None], self._engine.generate(self._request(flight)))
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return event
                self._delta(flight, event)
        raise RequestFailedError("The engine ended the answer without saying why.")

    def _delta(self, flight: Flight, delta: Delta) -> None:
        now = self._clock.now()
        self._statistics.delivered(flight, delta.tokens - flight.tokens, now)
        flight.advance(delta.tokens, now)
        self._settlement.moved(flight)
        self._on_progress(flight, now)
        self._outbox.put(flight.session, messages.Delta(flight.id, delta.text, delta.tokens))

    def _request(self, flight: Flight) -> EngineRequest:
        assert flight.rendered is not None and flight.dispatch is not None
        return EngineRequest(
            id=flight.id,
            rendered=flight.rendered,
            sampling=sampling_of(flight.submit, flight.max_tokens),
            priority=flight.dispatch.engine_priority,
            arrival=flight.arrival,
            # Prefix caches are shared within a tenant only: timing must not tell one tenant what another asked.
            cache_salt=self._cache_salt(flight.submit.caller.tenant),
            simulate=flight.submit.simulate,
        )


def sampling_of(submit: messages.Submit, max_tokens: int | None) -> Sampling:
    """The wire's sampling in the engine's words."""
    spec = submit.sampling
    return Sampling(
        max_tokens=max_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        stop=tuple(spec.stop),
        seed=spec.seed,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        logit_bias=dict(spec.logit_bias),
        ignore_eos=spec.ignore_eos,
    )
