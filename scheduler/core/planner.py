"""The planner of one pool: arrivals and reports go in, decisions come out.

Pure and synchronous; `now` is given. One writer: the pool's pump. The caller carries out what `decide` returns and
reports back with `finished`, exactly once for each dispatch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from scheduler.core.batcher import Batcher, InFlight
from scheduler.core.books import Books, tier_table
from scheduler.core.controller import CapChange
from scheduler.core.degradation import LevelChange
from scheduler.core.guard import CpuClock, PolicyGuard, PolicyReplaced
from scheduler.core.lifecycle import Lifecycle, State
from scheduler.core.policies import Blocked, Evict
from scheduler.core.step_model import Coefficients, StepLoad, StepModel
from scheduler.core.types import (
    Decision,
    Dispatch,
    Expire,
    Hold,
    Lane,
    Outcome,
    PolicyConfig,
    PoolCapacity,
    PoolSnapshot,
    Preempt,
    Reason,
    Refusal,
    Request,
    StepReport,
    TierSnapshot,
    TierSpec,
    retry_advice,
)

# What a step may clear: it computes prompts, moves streams on, and brings running requests nearer to their ends.
STEP_REASONS = frozenset(
    {Reason.PREFILL_BUDGET, Reason.STREAM_PACE, Reason.LONG_LANE, Reason.KV_FULL, Reason.RESERVATION}
)
QUEUE_BYTES = 512 * 1024 * 1024  # of prompts that wait in one tier
RECENT_DISPATCHES = 64  # how many dispatches of a tier its drain rate is taken from
FIRST_GUESS: Coefficients = (0.02, 2e-4, 0.0, 5e-4, 0.0)  # a small engine; a few steps correct it


class Planner:
    """Queue, batcher and policy of one pool.

    `step_cost`: what is known of the engine's step time beforehand. `cpu_clock`: CPU seconds of this thread, by which a
    policy that is too slow is replaced (None: time is no reason); `guard.py` has the rule.
    """

    def __init__(
        self,
        capacity: PoolCapacity,
        tiers: Mapping[str, TierSpec],
        policy: PolicyConfig,
        *,
        pool: str = "pool",
        step_cost: Coefficients = FIRST_GUESS,
        cpu_clock: CpuClock | None = None,
    ) -> None:
        self._pool = pool
        self._books = Books(capacity, dict(tiers), policy, Batcher(capacity, policy.max_batch), StepModel(step_cost))
        self._queue = self._books.queue
        self._batcher = self._books.batcher
        self._lifecycle = Lifecycle()
        self._dispatched: dict[str, deque[float]] = {}
        self._batches = 0
        self._changed = True  # something happened since the last decision that found nothing to do
        self._step_matters = False  # what held a head back may be over after the next step
        self._policy = PolicyGuard(self._books, cpu_clock, self._adopt_policy)
        self._policy.use(policy.name)

    @property
    def books(self) -> Books:
        """What the planner knows, to be read."""
        return self._books

    @property
    def policy(self) -> str:
        """The policy in use: the configured one, unless it has failed."""
        return self._policy.name

    def take_events(self) -> Sequence[PolicyReplaced | LevelChange | CapChange]:
        """What has happened to the policy, to the degradation level and to the batch cap since this was asked last."""
        events = [*self._policy.events, *self._books.changes]
        self._policy.events.clear()
        self._books.changes.clear()
        return events

    # --- configuration ----------------------------------------------------------------------------------------------

    def reconfigure(self, tiers: Mapping[str, TierSpec], policy: PolicyConfig, now: float) -> None:
        """Take a new version of the configuration. Nothing that waits or runs is lost.

        A tier that is gone keeps its last contract for the requests that are still here.
        """
        books = self._books
        retired = {
            name: spec
            for name, spec in books.tiers.items()
            if name not in tiers and (self._queue.length(name) or self._batcher.count(name))
        }
        books.tiers = retired | dict(tiers)
        books.config = policy
        books.service.configure(tier_table(books.tiers))
        self._batcher.resize(self._batcher.capacity, policy.max_batch)
        self._policy.use(policy.name)

    def resize(self, capacity: PoolCapacity, now: float) -> None:
        """The engine was rebuilt with other bounds."""
        self._books.capacity = capacity
        self._batcher.resize(capacity, self._books.config.max_batch)
        self._changed = True

    def effective_tier(self, tier: str, priority: str | None) -> TierSpec:
        """The tier a request runs as: the worse of its key's tier and the level that it asks for.

        `high` names the best rank, `normal` the middle one, `low` the worst. Raises KeyError for an unknown tier.
        """
        own = self._books.tiers[tier]
        if priority is None:
            return own
        ranked = sorted(self._books.tiers.values(), key=lambda spec: (spec.rank, spec.name))
        position = {"high": 0, "normal": len(ranked) // 2, "low": len(ranked) - 1}[priority]
        asked = ranked[position]
        return asked if asked.rank > own.rank else own

    def service_tier(self, tier: TierSpec) -> str:
        """A tier in OpenAI's words: the best rank is `priority`, the worst `flex`, any other `default`."""
        ranks = {spec.rank for spec in self._books.tiers.values()}
        if len(ranks) < 2 or min(ranks) < tier.rank < max(ranks):
            return "default"
        return "priority" if tier.rank == min(ranks) else "flex"

    # --- what happens -----------------------------------------------------------------------------------------------

    def arrive(self, request: Request, now: float) -> Refusal | None:
        """Queue the request, or say why not. Raises IllegalTransition if its id is alive already."""
        admitted = self._refuse(request, now) or self._policy.admit(request, now)
        if isinstance(admitted, Refusal):
            return admitted
        self._lifecycle.queued(request.id)
        self._queue.push(admitted, self._books.cost(admitted), self._due(admitted))
        self._books.service.arrived(request.tier, request.tenant)
        self._changed = True
        return None

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        """A running request has delivered `tokens` so far."""
        if self._batcher.progress(request_id, tokens, now):
            flight = self._batcher.get(request_id)
            assert flight is not None
            self._books.service.started(request_id, flight.request.prompt_tokens + flight.tokens)
            self._changed = True

    def step(self, report: StepReport) -> None:
        """The engine has made a step."""
        books = self._books
        if report.steps == 1 and report.elapsed > 0:
            load = StepLoad(report.prefill_tokens, report.decode_seqs, report.decode_context)
            books.steps.learn(load, report.elapsed)
        books.service.step(report.elapsed, report.prefill_tokens, books.steps.coefficients, report.steps)
        chunk = min(books.service.remaining_prefill(), books.capacity.step_tokens)
        books.step_end = report.at + books.step_time(chunk)
        self._policy.stepped(report)
        self._changed = self._changed or self._step_matters

    def meter(self, request_id: str) -> Callable[[], float]:
        """Tells the engine time that a running request has been charged so far, since it was dispatched."""
        return self._books.service.meter(request_id).read

    def finished(self, request_id: str, outcome: Outcome, now: float) -> None:
        """A dispatched request has left the engine. Raises IllegalTransition if it was not running."""
        self._lifecycle.left_engine(request_id)
        flight = self._leave_engine(request_id)
        request = flight.request
        if outcome.reason is None:
            length = request.per_sequence(outcome.completion_tokens)
            self._books.lengths.observe(request.tenant, request.tier, request.max_tokens, length)
        self._policy.ended(flight, outcome, now)
        self._changed = True

    def evicted(self, request_id: str, now: float) -> Request:
        """A preempted request has left the engine: it waits again, at the head of its tier, for the rest of its answer.

        What it has produced becomes part of its prompt. Answers the request as it waits.
        """
        self._lifecycle.requeued(request_id)
        flight = self._leave_engine(request_id)
        request, produced = flight.request, flight.tokens
        tier = self._books.tier(request)
        first = flight.first_token
        resumed = replace(
            request,
            prompt_tokens=request.prompt_tokens + produced,
            max_tokens=request.max_tokens - produced,
            deadline=request.deadline if first is None else first + produced * tier.tpot,
            queue_deadline=math.inf,
            lane=Lane.SHORT,
            evictions=request.evictions + 1,
        )
        self._queue.push(resumed, self._books.cost(resumed))
        self._books.service.arrived(request.tier, request.tenant)
        self._changed = True
        return resumed

    def engine_failed(self, now: float, cause: str) -> None:
        """The engine is gone: nothing is dispatched until it is back. The caller ends or evicts what ran."""
        self._policy.engine_failed(now, cause)

    def engine_recovered(self, now: float) -> None:
        """An engine is there again."""
        self._policy.engine_recovered(now)
        self._changed = True

    def cancel(self, request_id: str, now: float) -> State:
        """The caller has gone. QUEUED: it waited and is removed. RUNNING: abort it in the engine, then `finished`."""
        state = self._lifecycle.state(request_id)
        if state is State.QUEUED:
            self._leave_queue(request_id)
            self._changed = True
        return state

    def drain(self, now: float) -> list[Request]:
        """Empty the queue (the pool goes away); the caller answers each request. What runs is not touched."""
        return [self._leave_queue(request.id) for request in self._queue]

    # --- what to do -------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """Everything to do at this instant: end what has waited too long, dispatch what the policy and memory allow.

        The dispatches of one call are one batch. A call without news since the last one returns at once.
        """
        decisions: list[Decision] = self.overdue(now)
        if not self._changed and not decisions and not self._woken(now):
            return decisions
        self._changed = False
        self._policy.deciding(now)
        if hold := self._wait_window(now):
            return [*decisions, *hold]
        batch_id = f"{self._pool}-{self._batches + 1}"
        dispatched = False
        while len(self._queue):
            dispatch, others = self._choose(batch_id, now)
            decisions += others
            if dispatch is None:
                break
            self._start(dispatch.request, now)
            decisions.append(dispatch)
            dispatched = True
        self._batches += dispatched
        return decisions

    def overdue(self, now: float) -> list[Decision]:
        """End, or move to another lane, the waiting requests whose instant has come.

        A part of `decide`, for a time in which nothing can be dispatched.
        """
        ends: list[Decision] = []
        for request in self._queue.pop_due(now):
            if request.queue_deadline <= now:
                ends.append(Expire(self._leave_queue(request.id), Reason.QUEUE_TIMEOUT))
                continue
            verdict = self._policy.overdue(request, now)
            if isinstance(verdict, Refusal):
                ends.append(Expire(self._leave_queue(request.id), verdict.reason, verdict.retry_after, verdict.message))
            elif verdict is not None:
                self._queue.move(request.id, verdict.lane)
                self._changed = True
            else:
                self._queue.remind(request.id, max(self._due(request), now + 1e-3))
        return ends

    def next_wakeup(self, now: float) -> float | None:
        """The earliest instant at which time alone gives `decide` something to do."""
        instants = [self._queue.next_due(), self._policy.window_end(), self._policy.next_wakeup(now)]
        return min((instant for instant in instants if instant is not None and instant < math.inf), default=None)

    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def expected_wait(self, tier: str, now: float) -> float | None:
        """Seconds until those of the tier that wait have all been dispatched, at its recent pace; None: not known yet.

        The pace is that since the oldest of them came, so that a pause before does not count; while none has gone
        since, that of before.
        """
        oldest, recent = self._queue.oldest_arrival(tier), self._dispatched.get(tier)
        if oldest is None:
            return 0.0
        if not recent:
            return None
        since = max(oldest, recent[0])
        dispatched = sum(1 for at in recent if at > since)
        if not dispatched:
            since, dispatched = recent[0], len(recent) - 1
        return self._queue.length(tier) * (now - since) / dispatched if dispatched else None

    def snapshot(self, now: float) -> PoolSnapshot:
        """Counts per tier for status and telemetry; every configured tier has a row."""
        snapshot = PoolSnapshot(
            {name: TierSnapshot() for name in self._books.tiers},
            in_flight=self._batcher.sequences,
            cap=self._batcher.cap,
            level=self._books.level,
            kv_reserved=self._batcher.blocks / max(self._batcher.capacity.total_blocks, 1),
        )
        for name, tier in snapshot.tiers.items():
            tier.waiting = self._queue.length(name)
            oldest = self._queue.oldest_arrival(name)
            tier.oldest_wait = 0.0 if oldest is None else max(now - oldest, 0.0)
            tier.running = self._batcher.count(name)
        return snapshot

    # --- details ----------------------------------------------------------------------------------------------------

    def _refuse(self, request: Request, now: float) -> Refusal | None:
        reason = self._batcher.never_fits(request)
        if reason is not None:
            capacity = self._batcher.capacity
            limit = capacity.max_model_len if reason is Reason.CONTEXT_LENGTH else capacity.kv_tokens
            answers = f" for each of {request.sequences} answers" if request.sequences > 1 else ""
            return Refusal(
                reason,
                f"The request needs {request.prompt_tokens} prompt tokens and up to {request.max_tokens} output tokens"
                f"{answers}; at most {limit} tokens and {capacity.max_seqs} answers at a time are possible.",
            )
        tier = self._books.tiers[request.tier]
        waiting = self._queue.length(tier.name)
        if waiting >= tier.queue_max_length:
            message = f"{waiting} requests of this tier are waiting."
        elif waiting and self._queue.prompt_bytes(tier.name) + request.prompt_bytes > QUEUE_BYTES:
            message = f"The prompts of the {waiting} requests of this tier that wait take all the memory they may."
        else:
            return None
        return Refusal(Reason.QUEUE_FULL, message, self._retry_after(tier.name, now))

    def _retry_after(self, tier: str, now: float) -> float:
        """Seconds until half of the tier's queue has gone at its recent pace: later than one place, so no stampede."""
        wait = self.expected_wait(tier, now)
        return retry_advice(math.inf if wait is None else wait / 2)

    def _choose(self, batch_id: str, now: float) -> tuple[Dispatch | None, list[Decision]]:
        """The first candidate that the batcher lets in, or why none was; and in either case who is to make place."""
        held: dict[str, tuple[Request, Reason]] = {}
        preempts: list[Decision] = []
        self._step_matters = False
        for candidate in self._policy.candidates(now):
            request = candidate.request
            if isinstance(candidate, Evict):
                self._books.evicting = candidate.victim.id
                preempts.append(Preempt(candidate.victim, request))
                continue
            blocked = candidate.reason if isinstance(candidate, Blocked) else self._batcher.blocked(request)
            if blocked is None:
                dispatch = Dispatch(request, batch_id, candidate.reason, engine_priority=int(request.deadline * 1e6))
                return dispatch, preempts
            held[request.id] = request, blocked
            self._step_matters = self._step_matters or blocked in STEP_REASONS
        holds: list[Decision] = [Hold(*one) for one in held.values()]
        holds += [Hold(head, Reason.RANKED_BEHIND) for head in self._queue.heads() if head.id not in held]
        return None, holds + preempts

    def _start(self, request: Request, now: float) -> None:
        books = self._books
        self._queue.remove(request.id)
        self._lifecycle.running(request.id)
        if not len(self._batcher):
            books.step_end = now
        self._batcher.enter(request, now)
        books.service.left_queue(request.tier, request.tenant)
        books.service.dispatched(request, books.cost(request))
        self._dispatched.setdefault(request.tier, deque(maxlen=RECENT_DISPATCHES)).append(now)
        self._policy.dispatched(request, now)

    def _leave_engine(self, request_id: str) -> InFlight:
        flight = self._batcher.leave(request_id)
        self._books.service.ended(request_id)
        if self._books.evicting == request_id:
            self._books.evicting = None
        return flight

    def _leave_queue(self, request_id: str) -> Request:
        self._lifecycle.left_queue(request_id)
        request = self._queue.remove(request_id)
        self._books.service.left_queue(request.tier, request.tenant)
        return request

    def _due(self, request: Request) -> float:
        """When to look at a waiting request again. What is late already only waits for its turn, or for its end."""
        return request.queue_deadline if request.lane is Lane.LATE else self._policy.due(request)

    def _adopt_policy(self) -> None:
        """Another policy is in use: what waits is ordered and due as it says."""
        self._queue.rekey(self._policy.key)
        self._queue.reschedule(self._due)
        self._changed = True

    def _woken(self, now: float) -> bool:
        instants = (self._policy.window_end(), self._policy.next_wakeup(now))
        return any(instant is not None and instant <= now for instant in instants)

    def _wait_window(self, now: float) -> list[Decision]:
        end = self._policy.window_end()
        if end is None or now >= end:
            return []
        return [Hold(head, Reason.WAIT_WINDOW) for head in self._queue.heads()]
