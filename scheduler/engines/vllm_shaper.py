"""The step shaper: which running requests stand back for one step of vLLM, so that a more urgent prompt gets it.

vLLM gives the tokens of a step to what runs, in order of admission, and what is left to what waits. So a long prompt of
a worse rank takes whole steps while an urgent one waits behind it, and streams that are far ahead of their pace take
part in steps that could hold more of a prompt. Before a step, if an urgent prompt is pressed for time:

    running        [long prompt, rank 3] [stream, ahead] [stream]            waiting  [urgent prompt, rank 1]
    shown to vLLM  [stream]                                                  waiting  [urgent prompt, rank 1]
    afterwards     [long prompt, rank 3] [stream, ahead] [stream] [urgent prompt, rank 1]

A prompt is pressed while its deadline is ahead, but by less than twice the time that all prompts together will take.
Who is of a worse rank and has a later deadline stands back for it: that of the contract for a prompt (one that has
missed it stands behind all), the instant at which the next token is due for a stream. What stands back for a running
prompt is moved to the end, where it takes what is left of the step; what stands back for the one that waits is left
out, because vLLM serves all that runs before it. No prompt stands back for more than 50 steps of its life, and nothing
does while KV memory is scarce: slower requests hold theirs longer.

vLLM's own `schedule()` is called, never copied; to skip what runs is legal for it. An exception ends the shaping of the
engine for good: what vLLM had let in is taken back, and the step is scheduled plainly.

This module is imported by vLLM's engine process. Its clock is the scheduler's (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from scheduler.engines.vllm_options import SHAPER_FAILURE, SHAPER_TERMS

KV_SCARCE = 0.8  # share of the KV cache that is used, with the prompts that are still to be computed
SPARE = 2.0  # a prompt is not pressed if it has so many times the time that it needs
AHEAD_STEPS = 3.0  # a stream that skips one step must have its next token in time even if the one after it is slow
RECENT_STEPS = 8  # the longest of which is what a step may take
MOST_YIELDS = 50  # steps for which a prompt may stand back

log = logging.getLogger(f"vllm.{__name__}")  # the engine's log takes what is below `vllm`


@dataclass(slots=True)
class Seat:
    """What is known of a request. `deadline`: of its first token, or of its last one if `whole`; seconds."""

    rank: int
    deadline: float
    tpot: float
    whole: bool
    first_token: float | None = None
    yields: int = 0

    def due(self, request: Any) -> float:
        """When its next token is due. The pace is a mean: every token that came early gives the later ones time."""
        tokens: int = request.num_output_tokens
        if self.whole:
            left: int = request.max_tokens - tokens
            return self.deadline - (left - 1) * self.tpot
        assert self.first_token is not None
        return min(self.first_token, self.deadline) + tokens * self.tpot


@dataclass(frozen=True, slots=True)
class Shape:
    """What vLLM is to see as running in a step, and what it is not. `head`: the waiting request that is to get in."""

    shown: list[Any]
    held: list[Any]
    head: Any | None


class StepShaper:
    """Who stands back in the next step of one engine. Remembers paces and how often each prompt did."""

    def __init__(self) -> None:
        self._seats: WeakKeyDictionary[Any, Seat] = WeakKeyDictionary()
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last: float | None = None  # the last call, if something ran after it
        self._in_vain: str | None = None  # the waiting request that was not let in when others stood back for it

    def choose(self, engine: Any, now: float) -> Shape | None:
        """None if vLLM may do as it likes. `engine`: its scheduler."""
        running = engine.running
        self._note_step(bool(running), now)
        prompts = [request for request in running if request.is_prefill_chunk]
        streams = [request for request in running if not request.is_prefill_chunk]
        for request in streams:
            seat = self._seat(request)
            if seat is not None and seat.first_token is None and request.num_output_tokens:
                seat.first_token = now
        head = self._head(engine)
        room = engine.max_num_scheduled_tokens - len(streams)
        asked = sum(map(_left, prompts)) + (_left(head) if head is not None else 0)
        if asked <= room or self._scarce(engine, asked):
            return None

        until = now + SPARE * math.ceil(asked / max(room, 1)) * max(self._steps, default=math.inf)
        urgent = {request: seat for request in prompts if (seat := self._pressed(request, now, until))}
        moved = [request for request in prompts if self._stands_back(request, urgent.values(), now)]
        held: list[Any] = []
        if head is not None and (seat := self._pressed(head, now, until)):
            held = [request for request in prompts if self._stands_back(request, [seat], now)]
            if sum(map(_left, prompts)) - sum(map(_left, held)) < room:
                urgent[head] = seat
            else:  # it would get nothing of this step all the same
                held = []
        for request in {*held, *moved}:
            self._seats[request].yields += 1

        short = sum(map(_left, urgent)) - room
        ahead = [request for request in streams if self._stands_back(request, urgent.values(), now)]
        ahead.sort(key=lambda request: self._needed(request, now), reverse=True)
        held += ahead[: max(short, 0)]
        moved = [request for request in moved if request not in held]
        away = {*held, *moved}
        shown = [request for request in running if request not in away] + moved
        return Shape(shown, held, head if head in urgent else None) if away else None

    def scheduled(self, shape: Shape) -> None:
        """The step has been made up as `shape` says."""
        if shape.held and shape.head is not None and shape.head.status != RequestStatus.RUNNING:
            self._in_vain = shape.head.request_id

    # --- details --------------------------------------------------------------------------------------------------

    def _note_step(self, busy: bool, now: float) -> None:
        if busy and self._last is not None:
            self._steps.append(now - self._last)
        self._last = now

    def _seat(self, request: Any) -> Seat | None:
        """None if the request came without terms: it does not stand back, nor does anybody for it."""
        seat = self._seats.get(request)
        if seat is None and (terms := (request.sampling_params.extra_args or {}).get(SHAPER_TERMS)):
            rank, tpot, whole = terms
            seat = self._seats[request] = Seat(rank, request.priority / 1e6, tpot, whole)
        return seat

    def _pressed(self, request: Any, now: float, until: float) -> Seat | None:
        """The seat of a request whose deadline is ahead, but not by much."""
        seat = self._seat(request)
        return seat if seat is not None and now < seat.deadline < until else None

    def _head(self, engine: Any) -> Any | None:
        """The waiting request that vLLM would let in next, if it can."""
        if engine.kv_holding_waiting or not engine.waiting or engine._pause_state != PauseState.UNPAUSED:
            return None
        head = engine.waiting.peek_request()
        full = len(engine.running) + engine.num_waiting_for_streaming_input >= engine.max_num_active_reqs
        blocked = head.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        return None if full or blocked or head.request_id == self._in_vain else head

    @staticmethod
    def _scarce(engine: Any, asked: int) -> bool:
        pool = engine.cache_config.num_gpu_blocks * engine.block_size
        return bool(engine.get_kv_cache_usage() + asked / pool > KV_SCARCE)

    def _stands_back(self, request: Any, urgent: Iterable[Seat], now: float) -> bool:
        seat = self._seat(request)
        if seat is None or seat.yields >= MOST_YIELDS:
            return False
        needed = self._needed(request, now)
        return any(other.rank < seat.rank and other.deadline < needed for other in urgent)

    def _needed(self, request: Any, now: float) -> float:
        """The deadline that one of another request must be earlier than."""
        seat = self._seat(request)
        assert seat is not None
        if request.is_prefill_chunk:
            return seat.deadline if seat.deadline > now else math.inf
        if not self._steps or (seat.first_token is None and not seat.whole):
            return -math.inf
        due = seat.due(request)
        return due if due >= now + AHEAD_STEPS * max(self._steps) else -math.inf


def _left(request: Any) -> int:
    """Tokens of the request that are not computed yet."""
    left: int = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
    return left


def shaped(base: Any, clock: Callable[[], float] = time.monotonic) -> Any:
    """vLLM's scheduler `base` with a step shaper around its `schedule()`."""

    class Shaped(base):  # type: ignore[misc]  # its type is unknown here
        running: list[Any]

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._shaper: StepShaper | None = StepShaper()
            self._failure: str | None = None  # to be reported

        def schedule(self, throttle_prefills: bool = False) -> Any:
            before, output = self.running, None
            try:
                shape = self._shaper.choose(self, clock()) if self._shaper is not None else None
                if self._shaper is not None and shape is not None:
                    output = self._schedule_as(shape, throttle_prefills)
                    self._shaper.scheduled(shape)
            except Exception as error:
                log.exception("The step shaper is switched off.")
                self._shaper = None
                self._failure = f"{type(error).__name__}: {error}"
                if output is None:
                    self._withdraw(before)
            return super().schedule(throttle_prefills) if output is None else output

        def _schedule_as(self, shape: Shape, throttle_prefills: bool) -> Any:
            """A step in which what is held does not run but keeps its place."""
            before = self.running
            self.running = list(shape.shown)
            self.max_num_active_reqs -= len(shape.held)
            try:
                return super().schedule(throttle_prefills)
            finally:
                self.max_num_active_reqs += len(shape.held)
                stay = {*shape.held, *self.running}
                known = set(before)
                new = [request for request in self.running if request not in known]
                self.running = [request for request in before if request in stay] + new

        def _withdraw(self, before: list[Any]) -> None:
            """Put back what a step that was not made has let in: the workers have not heard of it."""
            known = set(before)
            for request in [request for request in self.running if request not in known]:
                self.running.remove(request)
                self._preempt_request(request, clock())
                request.num_preemptions -= 1
                if not request.num_preemptions:
                    request.status = RequestStatus.WAITING
                    self.reset_preempted_req_ids.discard(request.request_id)

        def make_stats(self, *args: Any, **kwargs: Any) -> Any:
            stats = super().make_stats(*args, **kwargs)
            if stats is not None and self._failure is not None:
                stats.kv_connector_stats = {SHAPER_FAILURE: self._failure}
                self._failure = None
            return stats

    return Shaped


ShapedScheduler = shaped(Scheduler)
ShapedAsyncScheduler = shaped(AsyncScheduler)
