"""The ends of a request. Every flight gets exactly one, whatever happens to it, and everything it holds goes back.

    rejected   the engine would not have it: answered like a refusal
    refused    it will not run: answered with a reason, nothing billed
    finished   it ended by itself
    failed     the engine or the request broke: what was delivered is billed
    aborted    its caller went away, or we shut down: what was delivered is billed

An end does, in this order: planner (its slot), admission (its reservation), settlement (its bill), outbox (the answer),
statistics. The outbox makes the bill durable before the answer leaves.
"""

from __future__ import annotations

import structlog

from scheduler.clock import Clock
from scheduler.core.admission import Admission
from scheduler.core.trace import TraceRecorder
from scheduler.core.types import Reason, Refusal
from scheduler.engines.base import Finished, PromptError
from scheduler.wire import messages
from scheduler.worker.attainment import OUR_REASONS, judge_cancelled, miss
from scheduler.worker.flight import Flight, Phase
from scheduler.worker.outbox import Event, Outbox
from scheduler.worker.settlement import Settlement
from scheduler.worker.spool import Ending, Intent, LimitCharge
from scheduler.worker.statistics import Statistics

log = structlog.get_logger(__name__)


class Endings:
    """See the module text. Calling any of them on a flight that has ended does nothing."""

    def __init__(
        self,
        clock: Clock,
        admission: Admission,
        settlement: Settlement,
        outbox: Outbox,
        statistics: Statistics,
        traces: TraceRecorder,
        epoch: int,
    ) -> None:
        self._clock = clock
        self._admission = admission
        self._settlement = settlement
        self._outbox = outbox
        self._statistics = statistics
        self._traces = traces
        self._epoch = epoch

    def refused(self, flight: Flight, refusal: Refusal, *, param: str | None = None) -> None:
        """It never reached the engine. The caller has taken it out of the planner's queue, if it was there."""
        if flight.phase is Phase.ENDED:
            return
        now = self._clock.now()
        self._admission.release(flight.id, now)
        limits = self._admission.headers(flight.limits, flight.submit.model, now)
        answer = messages.Refused(
            flight.id, str(refusal.reason), refusal.message, param, refusal.retry_after, limits, flight.degradation
        )
        self._leave(flight, answer)
        attained = False if refusal.reason in OUR_REASONS else None
        self._statistics.refused(flight, refusal.reason, attained, now)
        self._traces.ended(flight.id, "refused", str(refusal.reason), 0, now)
        log.info("refused", request_id=flight.id, tier=flight.tier_name, reason=str(refusal.reason))

    def cancelled_before_dispatch(self, flight: Flight) -> None:
        """Its caller went away while it was rendered or waited: nobody is told, nothing is billed."""
        if flight.phase is Phase.ENDED:
            return
        now = self._clock.now()
        self._admission.release(flight.id, now)
        self._leave(flight, None)
        attained, _ = judge_cancelled(flight, now)
        self._statistics.refused(flight, Reason.CLIENT_GONE, attained, now)
        self._traces.ended(flight.id, "cancelled", str(Reason.CLIENT_GONE), 0, now)
        log.info("cancelled while waiting", request_id=flight.id, tier=flight.tier_name)

    def answer_finished(self, flight: Flight, finished: Finished) -> None:
        """One of several answers ended by itself; others go on."""
        now = self._clock.now()
        self._count(flight, finished, now)
        flight.cached = min(flight.cached, finished.cached_tokens)
        self._settlement.moved(flight)
        answer = messages.Delta(
            flight.id, finished.text, flight.tokens, finished.index, str(finished.reason), finished.logprobs
        )
        self._outbox.put(flight.session, answer)

    def finished(self, flight: Flight, finished: Finished) -> None:
        """It ended by itself, with the engine's own counts; of several answers this is the last."""
        if flight.phase is Phase.ENDED:
            return
        now = self._clock.now()
        self._count(flight, finished, now)
        flight.cached = _cached_tokens(flight, finished)
        missed = miss(flight, now)
        self._bill(flight, now, "finished", str(finished.reason), None, not missed, missed)
        self._leave(
            flight,
            messages.Done(
                flight.id,
                str(finished.reason),
                flight.prompt_tokens,
                flight.tokens,
                flight.cached_tokens,
                self._batch_info(flight, now),
                finished.text,
                finished.index,
                finished.logprobs,
            ),
        )

    def failed(self, flight: Flight, reason: Reason, message: str) -> None:
        """It broke after dispatch; its caller is told so."""
        if flight.phase is Phase.ENDED:
            return
        self._bill(flight, self._clock.now(), "failed", "", reason, False, str(reason))
        self._leave(flight, messages.Failed(flight.id, str(reason), message, flight.tokens))

    def rejected(self, flight: Flight, error: PromptError) -> None:
        """The engine found, only when it was to run, that the request itself is wrong."""
        if flight.phase is Phase.ENDED:
            return
        reason = Reason.INVALID_PROMPT
        self._bill(flight, self._clock.now(), "failed", "", reason, None, "")
        self._leave(flight, messages.Refused(flight.id, str(reason), str(error), error.param))

    def aborted(self, flight: Flight) -> None:
        """It was stopped for `flight.stop_reason`; a caller that is still there is told so."""
        if flight.phase is Phase.ENDED:
            return
        now = self._clock.now()
        reason = flight.stop_reason or Reason.CLIENT_GONE
        if reason is Reason.CLIENT_GONE:
            attained, missed = judge_cancelled(flight, now)
            self._bill(flight, now, "aborted", "", reason, attained, missed)
            self._leave(flight, None)
        else:
            self._bill(flight, now, "aborted", "", reason, False, str(reason))
            self._leave(flight, messages.Failed(flight.id, str(reason), "The server is shutting down.", flight.tokens))

    def intent(self, flight: Flight) -> Intent:
        """What must be known to bill the flight even if this process dies."""
        caller, dispatch = flight.submit.caller, flight.dispatch
        assert dispatch is not None
        return Intent(
            request_id=flight.id,
            attempt=flight.submit.attempt,
            tenant_id=caller.tenant,
            tenant_slug=caller.tenant_slug,
            key_id=caller.key,
            key_name=caller.key_name,
            tier=caller.tier,
            model=flight.submit.model,
            deployment=flight.submit.model,
            stream=flight.submit.stream,
            prompt_tokens=flight.prompt_tokens,
            max_tokens=flight.output_bound,
            arrived_at=flight.arrived_at,
            dispatched_at=flight.unix(flight.dispatched),
            batch_id=dispatch.batch_id,
            policy_version=flight.policy_version,
            price=flight.price,
            limits=tuple(LimitCharge(one.scope, one.owner, one.model, one.kind, one.value) for one in flight.limits),
            project=flight.submit.project,
            leased=flight.leased,
            epoch=self._epoch,
        )

    # --- details ----------------------------------------------------------------------------------------------------

    def _bill(
        self,
        flight: Flight,
        now: float,
        status: str,
        finish_reason: str,
        reason: Reason | None,
        attained: bool | None,
        missed: str,
    ) -> None:
        """Slot, reservation, usage row, statistics of a request that was dispatched."""
        pool = flight.pool
        assert pool is not None
        pool.ended(flight, reason, now)
        counts = (flight.prompt_tokens, flight.cached_tokens, flight.tokens)
        money = 0 if flight.price is None else flight.price.charge(*counts)
        self._admission.settle(flight.id, flight.prompt_tokens + flight.tokens, now, money)
        ending = Ending(
            intent=self.intent(flight),
            status=status,
            finish_reason=finish_reason,
            reason="" if reason is None else str(reason),
            prompt_tokens=flight.prompt_tokens,
            cached_tokens=flight.cached_tokens,
            completion_tokens=flight.tokens,
            first_token_at=None if flight.first_token is None else flight.unix(flight.first_token),
            ended_at=flight.unix(now),
            batch_size=pool.tally.mean_since(flight.steps_before),
            attained=attained,
            miss_reason=missed,
            engine_seconds=flight.engine_seconds,
        )
        self._settlement.ended(flight, ending)
        self._outbox.touch()
        self._statistics.ended(flight, status, attained, now)
        self._traces.ended(flight.id, status, ending.reason, flight.tokens, now)
        log.info(
            "ended",
            request_id=flight.id,
            tier=flight.tier_name,
            model=flight.submit.model,
            status=status,
            reason=ending.reason,
            prompt_tokens=flight.prompt_tokens,
            completion_tokens=flight.tokens,
        )

    def _count(self, flight: Flight, finished: Finished, now: float) -> None:
        """Take the engine's count of an answer, which may be above what its deltas have told."""
        completion, told = self._checked_completion(flight, finished), flight.made.get(finished.index, 0)
        if completion > told or flight.first_token is None:  # the end carries the last tokens
            self._statistics.delivered(flight, completion - told, now)
            flight.advance(finished.index, completion, now)

    def _checked_completion(self, flight: Flight, finished: Finished) -> int:
        """The engine's count, held within what is possible: at least what was delivered, at most what was allowed."""
        told = flight.made.get(finished.index, 0)
        possible = min(max(finished.completion_tokens, told), flight.max_tokens)
        if possible != finished.completion_tokens or finished.prompt_tokens != flight.prompt_tokens:
            log.warning(
                "engine misreports usage",
                request_id=flight.id,
                reported=(finished.prompt_tokens, finished.completion_tokens),
                taken=(flight.prompt_tokens, possible),
            )
        return possible

    def _batch_info(self, flight: Flight, now: float) -> messages.BatchInfo:
        dispatch, pool = flight.dispatch, flight.pool
        assert dispatch is not None and pool is not None
        last = flight.last_token if flight.last_token is not None else now
        return messages.BatchInfo(
            batch_id=dispatch.batch_id,
            batch_size=pool.tally.mean_since(flight.steps_before),
            wait_time=flight.dispatched - flight.arrival,
            compute_time=last - flight.dispatched,
        )

    def _leave(self, flight: Flight, answer: Event | None) -> None:
        """The flight is over: nothing finds it any more, and its caller gets the last word."""
        flight.phase = Phase.ENDED
        flight.session.flights.pop(flight.id, None)
        if answer is not None:
            self._outbox.put(flight.session, answer)


def _cached_tokens(flight: Flight, finished: Finished) -> int:
    """What of the prompt was found cached, as reported: by the first run, and by that of its answers that found least.

    Later runs and the other answers find what the request itself has left there.
    """
    if flight.runs > 1:
        return flight.cached
    return finished.cached_tokens if flight.sequences == 1 else min(flight.cached, finished.cached_tokens)
