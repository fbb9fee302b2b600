"""The planner of one pool: arrivals and reports go in, decisions come out.

Pure and synchronous; `now` is given. One writer: the pool's pump. The caller carries out what `decide` returns and
reports back with `finished`, exactly once for each dispatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from scheduler.core.batcher import Batcher
from scheduler.core.lifecycle import Lifecycle, State
from scheduler.core.policies import create_policy
from scheduler.core.queue import WaitingQueue
from scheduler.core.types import (
    Decision,
    Dispatch,
    Expire,
    Hold,
    Outcome,
    PolicyConfig,
    PoolCapacity,
    PoolSnapshot,
    Reason,
    Refusal,
    Request,
    TierSnapshot,
    TierSpec,
)

PRIORITY_LEVELS = ("high", "normal", "low")
RECENT_DISPATCHES = 64  # how many dispatches of a tier its drain rate is taken from
RETRY_AFTER_BOUNDS = (1.0, 60.0)  # seconds


class Planner:
    """Queue, batcher and policy of one pool."""

    def __init__(
        self, capacity: PoolCapacity, tiers: Mapping[str, TierSpec], policy: PolicyConfig, *, pool: str = "pool"
    ) -> None:
        self._pool = pool
        self._tiers = dict(tiers)
        self._config = policy
        self._policy = create_policy(policy.name)
        self._queue = WaitingQueue(self._policy.key)
        self._batcher = Batcher(capacity, policy.max_batch)
        self._lifecycle = Lifecycle()
        self._waiting: dict[str, Request] = {}
        self._dispatched: dict[str, deque[float]] = {}
        self._batches = 0
        self._changed = True  # something happened since the last decision that found nothing to do

    # --- configuration ----------------------------------------------------------------------------------------------

    def reconfigure(self, tiers: Mapping[str, TierSpec], policy: PolicyConfig, now: float) -> None:
        """Take a new version of the configuration. Nothing that waits or runs is lost.

        A tier that is gone keeps its last contract for the requests that are still here.
        """
        alive = {request.tier for request in self._waiting.values()}
        alive |= {flight.request.tier for flight in self._batcher.running()}
        retired = {name: spec for name, spec in self._tiers.items() if name in alive and name not in tiers}
        self._tiers = retired | dict(tiers)
        if policy.name != self._config.name:
            self._policy = create_policy(policy.name)
            self._queue.rekey(self._policy.key)
        self._config = policy
        self._batcher.resize(self._batcher.capacity, policy.max_batch)
        self._changed = True

    def resize(self, capacity: PoolCapacity, now: float) -> None:
        """The engine was rebuilt with other bounds."""
        self._batcher.resize(capacity, self._config.max_batch)
        self._changed = True

    def effective_tier(self, tier: str, priority: str | None) -> TierSpec:
        """The tier a request runs as: the worse of its key's tier and the level that it asks for.

        `high` names the best rank, `normal` the middle one, `low` the worst. Raises KeyError for an unknown tier.
        """
        own = self._tiers[tier]
        if priority is None:
            return own
        ranked = sorted(self._tiers.values(), key=lambda spec: (spec.rank, spec.name))
        position = {"high": 0, "normal": len(ranked) // 2, "low": len(ranked) - 1}[priority]
        asked = ranked[position]
        return asked if asked.rank > own.rank else own

    # --- what happens -----------------------------------------------------------------------------------------------

    def arrive(self, request: Request, now: float) -> Refusal | None:
        """Queue the request, or say why not. Raises IllegalTransition if its id is alive already."""
        refusal = self._refuse(request, now)
        if refusal is not None:
            return refusal
        self._lifecycle.queued(request.id)
        self._queue.push(request)
        self._waiting[request.id] = request
        self._changed = True
        return None

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        """A running request has delivered `tokens` so far."""
        self._batcher.progress(request_id, tokens)

    def finished(self, request_id: str, outcome: Outcome, now: float) -> None:
        """A dispatched request has left the engine. Raises IllegalTransition if it was not running."""
        self._lifecycle.left_engine(request_id)
        self._batcher.leave(request_id)
        self._changed = True

    def cancel(self, request_id: str, now: float) -> State:
        """The caller has gone. QUEUED: it waited and is removed. RUNNING: abort it in the engine, then `finished`."""
        state = self._lifecycle.state(request_id)
        if state is State.QUEUED:
            self._queue.remove(self._leave_queue(request_id))
            self._changed = True
        return state

    def drain(self, now: float) -> list[Request]:
        """Empty the queue (the pool goes away); the caller answers each request. What runs is not touched."""
        waiting = self._queue.clear()
        for request in waiting:
            self._leave_queue(request.id)
        return waiting

    # --- what to do -------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Decision]:
        """Everything to do at this instant: end what has waited too long, dispatch what the policy and memory allow.

        The dispatches of one call are one batch. A call without news since the last one returns at once.
        """
        decisions: list[Decision] = [
            Expire(self._leave_queue(request.id), Reason.QUEUE_TIMEOUT) for request in self._queue.pop_expired(now)
        ]
        if not self._changed and not decisions and not self._window_over(now):
            return decisions
        self._changed = False
        if hold := self._wait_window(now):
            return [*decisions, *hold]
        batch_id = f"{self._pool}-{self._batches + 1}"
        while heads := self._queue.heads():
            dispatch, holds = self._choose(heads, batch_id)
            if dispatch is None:
                decisions += holds
                break
            self._start(dispatch.request, now)
            decisions.append(dispatch)
        if any(isinstance(decision, Dispatch) for decision in decisions):
            self._batches += 1
        return decisions

    def next_wakeup(self, now: float) -> float | None:
        """The earliest instant at which time alone gives `decide` something to do."""
        instants = [self._queue.next_expiry(), self._window_end()]
        return min((instant for instant in instants if instant is not None), default=None)

    def snapshot(self, now: float) -> PoolSnapshot:
        """Counts per tier for status and telemetry; every configured tier has a row."""
        snapshot = PoolSnapshot(
            {name: TierSnapshot() for name in self._tiers},
            in_flight=len(self._batcher),
            cap=self._batcher.cap,
            kv_reserved=self._batcher.blocks / max(self._batcher.capacity.total_blocks, 1),
        )
        for name, tier in snapshot.tiers.items():
            tier.waiting = self._queue.length(name)
            oldest = self._queue.oldest_arrival(name)
            tier.oldest_wait = 0.0 if oldest is None else max(now - oldest, 0.0)
        for flight in self._batcher.running():
            snapshot.tiers[flight.request.tier].running += 1
        return snapshot

    # --- details ----------------------------------------------------------------------------------------------------

    def _refuse(self, request: Request, now: float) -> Refusal | None:
        reason = self._batcher.never_fits(request)
        if reason is not None:
            capacity = self._batcher.capacity
            limit = capacity.max_model_len if reason is Reason.CONTEXT_LENGTH else capacity.kv_tokens
            return Refusal(
                reason,
                f"The request needs {request.prompt_tokens} prompt tokens and up to {request.max_tokens} output "
                f"tokens; together at most {limit} are possible.",
            )
        tier = self._tiers[request.tier]
        waiting = self._queue.length(tier.name)
        if waiting >= tier.queue_max_length:
            return Refusal(
                Reason.QUEUE_FULL, f"{waiting} requests of this tier are waiting.", self._retry_after(tier.name, now)
            )
        return None

    def _retry_after(self, tier: str, now: float) -> float:
        """Seconds until half of the tier's queue has gone at its recent pace: later than one place, so no stampede."""
        low, high = RETRY_AFTER_BOUNDS
        recent = self._dispatched.get(tier)
        if not recent or len(recent) < 2:
            return high
        pace = (len(recent) - 1) / max(now - recent[0], 1e-3)
        return min(max(self._queue.length(tier) / 2 / pace, low), high)

    def _choose(self, heads: list[Request], batch_id: str) -> tuple[Dispatch | None, list[Decision]]:
        """The first ranked head that the batcher lets in, or why none was."""
        holds: list[Decision] = []
        for request, reason in self._policy.rank(heads, self._tiers):
            blocked = self._batcher.blocked(request)
            if blocked is None:
                return Dispatch(request, batch_id, reason, engine_priority=int(request.deadline * 1e6)), []
            holds.append(Hold(request, blocked))
        ranked = {hold.request.id for hold in holds}
        holds += [Hold(head, Reason.RANKED_BEHIND) for head in heads if head.id not in ranked]
        return None, holds

    def _start(self, request: Request, now: float) -> None:
        self._queue.remove(request)
        del self._waiting[request.id]
        self._lifecycle.running(request.id)
        self._batcher.enter(request)
        self._dispatched.setdefault(request.tier, deque(maxlen=RECENT_DISPATCHES)).append(now)

    def _leave_queue(self, request_id: str) -> Request:
        self._lifecycle.left_queue(request_id)
        return self._waiting.pop(request_id)

    # An idle engine may wait a moment for company; a busy one batches by itself, so that waiting would only hurt.

    def _window_end(self) -> float | None:
        if self._config.max_wait_ms <= 0 or len(self._batcher) or not 0 < len(self._queue) < self._batcher.cap:
            return None
        oldest = [self._queue.oldest_arrival(tier) for tier in self._queue.tiers()]
        return min(arrival for arrival in oldest if arrival is not None) + self._config.max_wait_ms / 1000

    def _window_over(self, now: float) -> bool:
        end = self._window_end()
        return end is not None and now >= end

    def _wait_window(self, now: float) -> list[Decision]:
        end = self._window_end()
        if end is None or now >= end:
            return []
        return [Hold(head, Reason.WAIT_WINDOW) for head in self._queue.heads()]
