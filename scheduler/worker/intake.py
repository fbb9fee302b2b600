"""From Submit to the queue: one task per request, so that rendering one prompt never delays another.

The order of `_take` is that of the life of a request (`docs/architecture.md`, lines 3 to 5). From the reservation to
the answer nothing is awaited: a cancellation either comes before (nothing is held yet) or finds the flight queued.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import structlog

from scheduler.core.types import Limit, Reason, Refusal, Request, TierSpec
from scheduler.engines.base import ChatPrompt, Engine, EngineDeadError, PromptError, PromptTooLongError, Rendered
from scheduler.wire import messages
from scheduler.worker.flight import Flight, Phase
from scheduler.worker.leases import LeaseError, Leases
from scheduler.worker.outbox import Session
from scheduler.worker.pool import Pool
from scheduler.worker.runs import is_resumable
from scheduler.worker.services import Services
from scheduler.worker.spending import budgets_of, limits_of, spending_of
from scheduler.worker.work import spool_refusal
from tenants.periods import Calendar

log = structlog.get_logger(__name__)

DEFAULT_QUEUE_TIMEOUT = 60.0  # seconds
# A prompt this many times longer in characters than the model is in tokens is refused without being tokenised.
ABSURD_CHARS_PER_TOKEN = 64
ABSURD_CHARS_MINIMUM = 65_536
RETRY_LEASE = 5.0  # seconds
CALLERS_KEPT = 10_000
TOKEN_BYTES = 4  # of a token id in a prompt that waits
RETRY_BUDGET = 5.0  # seconds
ENTITLED = ("priority", "scale", "fast")  # service tiers that only keys of the best rank may ask for


class RefusedError(Exception):
    """The request will not run; `param` names the field at fault."""

    def __init__(self, refusal: Refusal, param: str | None = None) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.param = param


class Intake:
    """Takes requests in, and takes them back. `lease_admits`: this process still owns its pools.

    `refresh` loads the configuration anew; `leases` are those of budgets."""

    def __init__(
        self,
        services: Services,
        pools: Mapping[str, Pool],
        lease_admits: Callable[[], bool],
        refresh: Callable[[], Awaitable[None]],
        leases: Leases,
    ) -> None:
        self._services = services
        self._pools = pools
        self._lease_admits = lease_admits
        self._refresh = refresh
        self._leases = leases
        self._calendar = Calendar()
        self._on_their_way: dict[str, int] = {}  # by tier: counts against the bound of the queue
        self._callers: dict[str, tuple[messages.Caller, tuple[Limit, ...]]] = {}  # by key, as it came last
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed: Refusal | None = None  # why nothing is taken in at all

    def submit(self, session: Session, submit: messages.Submit) -> None:
        """Start taking a request in; the answer goes to the session."""
        now, age = self._services.clock.now(), max(submit.age, 0.0)
        submit.caller, limits = self._known(submit.caller)
        flight = Flight(submit, session, now - age, self._services.wall() - age, limits)
        if submit.id in session.flights:
            log.error("request id in use", request_id=submit.id)  # a fault of the peer: the first one keeps it
            return
        session.flights[submit.id] = flight
        self._services.traces.opened(
            submit.id, submit.caller.tenant, submit.caller.tier, submit.model, flight.arrival, flight.arrived_at
        )
        flight.task = asyncio.create_task(self._run(flight), name=f"intake-{submit.id}")
        self._tasks.add(flight.task)
        flight.task.add_done_callback(self._tasks.discard)

    def _known(self, caller: messages.Caller) -> tuple[messages.Caller, tuple[Limit, ...]]:
        """The caller and its limits, the same objects for all its requests: many may wait."""
        known = self._callers.get(caller.key)
        if known is None or known[0] != caller:
            if len(self._callers) >= CALLERS_KEPT:
                self._callers.clear()
            known = self._callers[caller.key] = (caller, limits_of(caller))
        return known

    def cancel(self, session: Session, request_id: str) -> None:
        """The caller has gone. Unknown ids (it has just ended) are ignored."""
        flight = session.flights.get(request_id)
        if flight is None:
            return
        if flight.phase is Phase.RENDERING:
            if flight.task is not None:
                flight.task.cancel()
            self._services.endings.cancelled_before_dispatch(flight)
        elif flight.pool is not None:
            flight.pool.cancel(flight)

    def hang_up(self, session: Session) -> None:
        """The connection is gone, and with it all its callers."""
        session.open = False
        for request_id in list(session.flights):
            self.cancel(session, request_id)

    async def close(self, refusal: Refusal) -> None:
        """Take nothing in any more; what is being rendered is refused."""
        self.closed = refusal
        for task in set(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, flight: Flight) -> None:
        try:
            await self._take(flight)
        except RefusedError as error:
            self._services.endings.refused(flight, error.refusal, param=error.param)
        except asyncio.CancelledError:
            if self.closed is not None:
                self._services.endings.refused(flight, self.closed)
            raise
        except Exception:  # the boundary of a request: its caller must get an answer
            log.exception("intake failed", request_id=flight.id)
            message = "The request could not be taken in."
            self._services.endings.refused(flight, Refusal(Reason.ENGINE_NOT_READY, message, 1.0))
        finally:
            flight.task = None  # a task that has ended weighs as much as all else that is known of a request

    async def _take(self, flight: Flight) -> None:
        pool = self._find_pool(flight)
        tier = await self._find_tier(flight, pool)
        self._check_early(flight, pool, tier)
        flight.rendered = await self._render(flight, pool, tier)
        flight.max_tokens = self._output_bound(flight, pool, tier, flight.rendered)
        self._price(flight, pool)
        await self._cover(flight, pool, tier)
        request = self._request(flight, pool, tier)
        self._reserve(flight, request)
        self._enqueue(flight, pool, request)
        self._accept(flight)

    # --- the steps, in order ----------------------------------------------------------------------------------------

    def _find_pool(self, flight: Flight) -> Pool:
        pool = self._pools.get(flight.submit.model)
        if pool is None:
            message = f"The model {flight.submit.model!r} is not served here."
            raise RefusedError(Refusal(Reason.MODEL_NOT_SERVED, message), "model")
        flight.pool = pool
        self._check_open(pool)
        return pool

    async def _find_tier(self, flight: Flight, pool: Pool) -> TierSpec:
        """The tier it runs as. A tier that was made a moment ago is loaded now."""
        caller = flight.submit.caller
        if caller.tier not in self._services.configuration.tiers:
            await self._refresh()
            self._check_open(pool)
        assert pool.planner is not None  # it is ready
        try:
            tier = pool.planner.effective_tier(caller.tier, _priority(flight.submit))
        except KeyError:
            message = f"The tier {caller.tier!r} is not known to the scheduler yet."
            raise RefusedError(Refusal(Reason.ENGINE_NOT_READY, message, 1.0)) from None
        flight.tier = tier
        flight.service_tier = pool.planner.service_tier(tier)
        if flight.submit.service_tier in ENTITLED and flight.service_tier != "priority":
            message = f"The service tier {flight.submit.service_tier!r} is not open to this key."
            raise RefusedError(Refusal(Reason.TIER_NOT_ALLOWED, message), "service_tier")
        if flight.submit.slo_threshold is not None:
            flight.slo = tier.slo_threshold(flight.submit.stream, flight.submit.slo_threshold)
        return tier

    def _check_early(self, flight: Flight, pool: Pool, tier: TierSpec) -> None:
        """What can be refused without rendering: no work is done for a request that has no place."""
        assert pool.planner is not None and pool.limits is not None
        now = self._services.clock.now()
        snapshot = pool.planner.snapshot(now).tiers.get(tier.name)
        waiting = (snapshot.waiting if snapshot is not None else 0) + self._on_their_way.get(tier.name, 0)
        if waiting >= tier.queue_max_length:
            raise RefusedError(Refusal(Reason.QUEUE_FULL, f"{waiting} requests of this tier are waiting.", 1.0))
        seats = pool.limits.capacity.max_seqs
        if flight.sequences > seats:
            message = f"{flight.sequences} answers are asked for; this model makes at most {seats} at a time."
            raise RefusedError(Refusal(Reason.NEVER_FITS, message), "n")
        chars = sum(map(len, _texts(flight.submit)))
        bound = max(pool.limits.capacity.max_model_len * ABSURD_CHARS_PER_TOKEN, ABSURD_CHARS_MINIMUM)
        if chars > bound:
            message = (
                f"The messages have {chars} characters; the model takes at most "
                f"{pool.limits.capacity.max_model_len} tokens."
            )
            raise RefusedError(Refusal(Reason.CONTEXT_LENGTH, message), "messages")

    async def _render(self, flight: Flight, pool: Pool, tier: TierSpec) -> Rendered:
        submit, engine = flight.submit, pool.engine
        assert engine is not None  # it is ready
        try:
            with self._on_its_way(tier):
                rendered = await engine.render(ChatPrompt(tuple(submit.messages), submit.simulate), submit.sampling)
        except PromptTooLongError as error:
            raise _over_context(pool, error.count, submit.sampling.max_tokens) from error
        except PromptError as error:
            raise RefusedError(Refusal(Reason.INVALID_PROMPT, str(error)), error.param) from error
        except EngineDeadError as error:
            pool.died(error)
            message = f"The model {pool.model} is being restarted."
            raise RefusedError(Refusal(Reason.ENGINE_NOT_READY, message, 5.0)) from error
        self._check_still(pool, engine)
        return rendered

    def _output_bound(self, flight: Flight, pool: Pool, tier: TierSpec, rendered: Rendered) -> int:
        """The most tokens that each of its answers may have: what it asks for, or all that model and tier have room
        for."""
        asked, answers = flight.submit.sampling.max_tokens, flight.sequences
        if rendered.room < 1 or (asked is not None and asked > rendered.room):
            raise _over_context(pool, str(rendered.prompt_tokens), asked)
        if asked is not None and asked > tier.max_tokens:
            message = f"max_tokens is {asked}; the tier {tier.name!r} allows at most {tier.max_tokens}."
            raise RefusedError(Refusal(Reason.LIMIT_TOO_LARGE, message), "max_tokens")
        if answers * (asked or 1) > tier.max_tokens:
            message = (
                f"{answers} answers of {asked or 1} tokens are asked for; the tier {tier.name!r} allows at most "
                f"{tier.max_tokens} tokens together."
            )
            raise RefusedError(Refusal(Reason.LIMIT_TOO_LARGE, message), "n")
        return min(rendered.room, tier.max_tokens // answers) if asked is None else asked

    def _price(self, flight: Flight, pool: Pool) -> None:
        """What it may cost at most, at the price of its arrival, and the budgets that pay for it."""
        caller, at = flight.submit.caller, flight.arrived_at
        flight.price = self._services.configuration.price(pool.model, caller.tier, caller.tenant, at)
        budgets = budgets_of(caller, pool.model, at, self._calendar)
        spending = spending_of(budgets, flight.price, flight.prompt_tokens, flight.output_bound, at)
        if isinstance(spending, Refusal):
            raise RefusedError(spending, "model")
        flight.spending = spending

    async def _cover(self, flight: Flight, pool: Pool, tier: TierSpec) -> None:
        """Get a lease of what this process has not got of its budgets; hardly ever is anything to be waited for."""
        engine, now = pool.engine, self._services.clock.now()
        if not self._services.admission.budgets.short(flight.spending, now):
            return
        try:
            with self._on_its_way(tier):
                await self._leases.cover(flight.spending)
        except LeaseError as error:
            raise RefusedError(Refusal(Reason.BUDGET_UNAVAILABLE, str(error), RETRY_BUDGET)) from error
        self._check_still(pool, engine)

    def _request(self, flight: Flight, pool: Pool, tier: TierSpec) -> Request:
        submit = flight.submit
        assert pool.limits is not None  # it is ready
        flight.deadline = tier.deadline(flight.arrival, submit.stream, flight.max_tokens, flight.slo)
        patience = min(submit.queue_timeout or DEFAULT_QUEUE_TIMEOUT, tier.queue_max_wait)
        return Request(
            id=flight.id,
            tenant=submit.caller.tenant,
            tier=tier.name,
            arrival=flight.arrival,
            prompt_tokens=flight.prompt_tokens,
            max_tokens=flight.max_tokens,
            stream=submit.stream,
            deadline=flight.deadline,
            queue_deadline=flight.arrival + patience,
            attempt=submit.attempt,
            resumable=pool.limits.resumes and is_resumable(submit),
            prompt_bytes=sum(map(sys.getsizeof, _texts(submit))) + TOKEN_BYTES * flight.prompt_tokens,
            sequences=flight.sequences,
        )

    def _reserve(self, flight: Flight, request: Request) -> None:
        refusal = self._services.admission.reserve(
            flight.id,
            flight.limits,
            flight.submit.model,
            request.worst_case_tokens,
            self._services.clock.now(),
            flight.spending,
        )
        if refusal is not None:
            raise RefusedError(refusal, "max_tokens" if refusal.reason is Reason.LIMIT_TOO_LARGE else None)
        flight.leased = self._services.admission.leased(flight.id)

    def _enqueue(self, flight: Flight, pool: Pool, request: Request) -> None:
        refusal = pool.enqueue(flight, request, self._services.clock.now())
        if refusal is not None:  # `Endings.refused` gives the reservation back
            never = refusal.reason in (Reason.CONTEXT_LENGTH, Reason.NEVER_FITS)
            param = "n" if flight.sequences > 1 else "messages"
            raise RefusedError(refusal, param if never else None)

    def _accept(self, flight: Flight) -> None:
        limits = self._services.admission.headers(flight.limits, flight.submit.model, self._services.clock.now())
        answer = messages.Accepted(
            flight.id, flight.tier_name, flight.prompt_tokens, limits, flight.degradation, flight.service_tier
        )
        self._services.outbox.put(flight.session, answer)

    @contextmanager
    def _on_its_way(self, tier: TierSpec) -> Iterator[None]:
        """Something is waited for before the queue."""
        self._on_their_way[tier.name] = self._on_their_way.get(tier.name, 0) + 1
        try:
            yield
        finally:
            self._on_their_way[tier.name] -= 1

    def _check_still(self, pool: Pool, engine: Engine | None) -> None:
        """After having waited: a rendered prompt belongs to its engine."""
        self._check_open(pool)
        if pool.engine is not engine:
            raise RefusedError(Refusal(Reason.ENGINE_NOT_READY, f"The model {pool.model} was restarted.", 1.0))

    def _check_open(self, pool: Pool) -> None:
        refusal = self.closed or pool.unavailable()
        if refusal is None and not self._services.settlement.available:
            refusal = spool_refusal()
        if refusal is None and not self._lease_admits():
            refusal = Refusal(Reason.DRAINING, "The scheduler cannot reach its database.", RETRY_LEASE)
        if refusal is not None:
            raise RefusedError(refusal)


def _priority(submit: messages.Submit) -> str | None:
    """The level that it asks for; `flex` is the lowest."""
    return "low" if submit.service_tier == "flex" else submit.priority


def _over_context(pool: Pool, prompt: str, asked: int | None) -> RefusedError:
    """More than the model can hold: how much that is, and how much prompt and answer would be."""
    assert pool.limits is not None  # it is ready
    answer = "" if asked is None else f" and {asked} are asked for as an answer"
    message = (
        f"The model takes at most {pool.limits.capacity.max_model_len} tokens, prompt and answer together; "
        f"the prompt has {prompt}{answer}."
    )
    return RefusedError(Refusal(Reason.CONTEXT_LENGTH, message), "messages")


def _texts(submit: messages.Submit) -> Iterator[str]:
    """The texts of its messages and its tools; a message's content is a string or a list of text parts."""
    if submit.sampling.tools is not None:
        yield submit.sampling.tools.functions
    for message in submit.messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else (content,):
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text
        for call in message.get("tool_calls", ()):
            yield call["function"]["arguments"]
