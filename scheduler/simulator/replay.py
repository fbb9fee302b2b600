"""Requests in, records out: planner and step machine under virtual time.

    next event   a step ends | a request arrives | a client goes away | the planner wants to wake
                 (in this order at one instant)
    then         what happened goes to the planner; it decides if anything waits; its decisions are carried out
    then         the next step begins, if none runs

As in the serving process, a dispatch reaches the engine at once and is admitted when its next step begins.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.core.books import Books
from scheduler.core.lifecycle import State
from scheduler.core.planner import Planner
from scheduler.core.types import Dispatch, Expire, Outcome, PolicyConfig, Preempt, Reason, Request, StepReport, TierSpec
from scheduler.engines.simulated.machine import End, Machine, Sequence, StepResult
from scheduler.simulator.profiles import Profile
from scheduler.simulator.timeline import Timeline
from scheduler.simulator.workload import Workload

TIMELINE_SLICES = 400  # over the arrival span
PROGRESS_EVERY = 1000  # arrivals
FLOORS_UNTIL_LEVEL = 2  # of degradation
STALL_DECISIONS = 100_000  # decisions at one instant, after which the planner is taken to be stuck

OnProgress = Callable[[int, int], None]  # arrived so far, of how many


class ReplayError(Exception):
    """The planner left requests waiting for ever: a bug in a policy."""


@dataclass(slots=True)
class Record:
    """What became of one request. Instants are None until they happen; `service` is in engine-seconds.

    `output`: tokens that it makes; None: all that it may. `cancelled`: when its client went away, if it had not ended.
    """

    request: Request
    cost: float  # engine-seconds at full batch
    output: int | None = None
    cancelled: float | None = None
    refusal: Reason | None = None
    first_token: float | None = None
    last_token: float | None = None
    service: float = 0.0


@dataclass(slots=True)
class Replay:
    """A finished run.

    `preemptions`: the engine's own for want of memory, and those that the planner decided. `decision_ns`: CPU time of
    each call of `decide`. `floor_debt`: by tier, the most engine-seconds by which it fell behind its floor over any
    interval in which it waited without a break.
    """

    policy: str
    workload: Workload
    profile: Profile
    records: list[Record]
    timeline: Timeline
    steps: int = 0
    preemptions: int = 0
    busy: float = 0.0
    ended_at: float = 0.0
    floor_debt: dict[str, float] = field(default_factory=dict)
    decision_ns: array[int] = field(default_factory=lambda: array("q"))


class FloorWatch:
    """How far tiers fall behind their floors.

    With D = service - floor x busy of a tier that waits without a break, that is how far D has fallen from its highest
    point. While floors are suspended (from level 3 on) nothing counts.
    """

    def __init__(self, tiers: Mapping[str, TierSpec]) -> None:
        self._floors = {name: tier.floor for name, tier in tiers.items() if tier.floor}
        self._highest: dict[str, float] = {}
        self.debt = dict.fromkeys(self._floors, 0.0)

    def look(self, books: Books) -> None:
        """After each step."""
        for name, floor in self._floors.items():
            if not books.queue.length(name) or books.level > FLOORS_UNTIL_LEVEL:
                self._highest.pop(name, None)
                continue
            ahead = books.service.tiers[name].own.meter.read() - floor * books.service.busy
            highest = self._highest[name] = max(self._highest.get(name, ahead), ahead)
            self.debt[name] = max(self.debt[name], highest - ahead)


def replay(
    workload: Workload, profile: Profile, policy: PolicyConfig, on_progress: OnProgress = lambda done, total: None
) -> Replay:
    """Run the whole workload to its end. Raises ReplayError."""
    return _Run(workload, profile, policy, on_progress).run()


class _Run:
    """The state of one replay."""

    def __init__(self, workload: Workload, profile: Profile, policy: PolicyConfig, on_progress: OnProgress) -> None:
        self._requests = workload.requests
        self._outputs = workload.outputs
        self._records = [
            Record(*each) for each in zip(workload.requests, workload.costs, workload.outputs, strict=True)
        ]
        self._cancels = workload.cancels
        self._cancelled = 0  # how many of them have come
        timeline = Timeline(workload.span / TIMELINE_SLICES)
        self._result = Replay(policy.name, workload, profile, self._records, timeline)
        self._floors = FloorWatch(workload.tiers)
        self._planner = Planner(profile.capacity, workload.tiers, policy, pool=profile.name)
        self._machine = Machine(profile.capacity, profile.cost, profile.pipelined)
        self._on_progress = on_progress
        self._cost = profile.cost
        self._now = 0.0
        self._arrived = 0
        self._wake = math.inf
        self._step_begun = 0.0
        self._step_end: float | None = None
        self._running_in_step = 0
        self._kv_in_step = 0.0
        self._news = False  # tokens were made that the planner has not heard of
        self._fixed = 0.0  # base cost of all steps so far, per sequence that ran in them
        self._fixed_at_start: dict[str, float] = {}
        self._decisions_now = 0

    def run(self) -> Replay:
        while True:
            self._begin_step()
            arrival = self._requests[self._arrived].arrival if self._arrived < len(self._requests) else math.inf
            cancel = self._cancels[self._cancelled][0] if self._cancelled < len(self._cancels) else math.inf
            step_end = math.inf if self._step_end is None else self._step_end
            if step_end == math.inf == arrival and not self._planner.waiting():
                break
            instant = max(min(step_end, arrival, cancel, self._wake), self._now)
            if instant == math.inf:
                raise ReplayError(f"{self._planner.waiting()} requests wait, and nothing would ever wake the planner.")
            self._advance(instant)
            if step_end <= instant:
                self._end_step()
            elif arrival <= instant:
                self._arrive()
            elif cancel <= instant:
                self._cancel()
            if self._planner.waiting() or instant >= self._wake:
                self._decide()
        if self._planner.policy != self._result.policy:
            raise ReplayError(f"The policy failed and was replaced: {self._planner.take_events()}")
        self._result.floor_debt = self._floors.debt
        self._result.ended_at = self._now
        self._result.steps = self._machine.number
        self._on_progress(self._arrived, len(self._requests))
        return self._result

    def _advance(self, instant: float) -> None:
        if instant > self._now:
            self._now = instant
            self._decisions_now = 0

    # --- the engine -----------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        if self._step_end is not None:
            return
        cost = self._machine.begin(self._now)
        if cost is not None:
            self._step_begun = self._now
            self._step_end = self._now + cost
            self._running_in_step = len(self._machine.running)
            self._kv_in_step = self._machine.kv_usage

    def _end_step(self) -> None:
        now, machine = self._now, self._machine
        step = machine.finish(now)
        elapsed = now - self._step_begun
        self._step_end = None
        self._news = True
        for sequence in step.started:
            self._fixed_at_start[sequence.id] = self._fixed
        self._fixed += self._cost.base / self._running_in_step
        self._observe(step, elapsed)
        self._planner.step(
            StepReport(
                at=now,
                elapsed=elapsed,
                prefill_tokens=step.prefill_tokens,
                decode_seqs=step.decode_seqs,
                running=len(machine.running),
                waiting=len(machine.waiting),
                kv_usage=machine.kv_usage,
                preemptions=step.preemptions,
                decode_context=step.decode_context,
            )
        )
        for sequence in step.first_tokens:
            record = self._records[int(sequence.id)]
            if record.first_token is None:
                record.first_token = now
            self._planner.progress(sequence.id, sequence.made, now)
        for sequence in step.freed:
            self._left(sequence, decoded=sequence.made)  # the token of this step is lost, but it was computed
        for sequence in step.ended:
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        record = self._records[int(sequence.id)]
        record.last_token = self._now
        record.output = sequence.made + sequence.prompt_tokens - record.request.prompt_tokens
        record.service += self._service(sequence, decoded=sequence.made - 1)
        self._planner.finished(sequence.id, Outcome(sequence.made), self._now)

    def _left(self, sequence: Sequence, decoded: int) -> None:
        """It was aborted: its client is gone, or it waits again with what it has made as part of its prompt."""
        record = self._records[int(sequence.id)]
        record.service += self._service(sequence, decoded)
        self._planner.progress(sequence.id, sequence.made, self._now)
        if record.cancelled is not None:
            self._planner.finished(sequence.id, Outcome(sequence.made, Reason.CLIENT_GONE), self._now)
            return
        self._result.preemptions += 1
        self._planner.evicted(sequence.id, self._now)

    def _service(self, sequence: Sequence, decoded: int) -> float:
        """Engine-seconds of its prefill, of `decoded` decode steps, and of its part of each step's base by head count.

        Prefill that came to nothing (evicted before the first token, computed again) is charged to nobody.
        """
        cost, prompt = self._cost, sequence.prompt_tokens
        fixed = self._fixed - self._fixed_at_start.pop(sequence.id, self._fixed)
        if not sequence.made:
            return fixed
        context = decoded * prompt + decoded * (decoded + 1) / 2
        return fixed + prompt * cost.prefill_token + decoded * cost.decode_seq + context * cost.kv_token

    def _observe(self, step: StepResult, elapsed: float) -> None:
        result = self._result
        result.busy += elapsed
        result.preemptions += step.preemptions
        running, kv_usage = self._running_in_step, self._kv_in_step
        result.timeline.add(self._step_begun, self._now, running, kv_usage, self._planner.waiting())
        self._floors.look(self._planner.books)

    # --- the planner ----------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        request = self._requests[self._arrived]
        refusal = self._planner.arrive(request, self._now)
        if refusal is not None:
            self._records[self._arrived].refusal = refusal.reason
        self._arrived += 1
        if self._arrived % PROGRESS_EVERY == 0 and self._arrived < len(self._requests):
            self._on_progress(self._arrived, len(self._requests))

    def _cancel(self) -> None:
        """A client goes away: what waits is forgotten, what runs is aborted."""
        instant, number = self._cancels[self._cancelled]
        self._cancelled += 1
        record = self._records[number]
        state = self._planner.cancel(record.request.id, instant)
        if state is not State.UNKNOWN:
            record.cancelled = instant
        if state is State.RUNNING and (sequence := self._machine.abort(record.request.id)) is not None:
            self._left(sequence, decoded=sequence.made - 1)

    def _decide(self) -> None:
        """Decide and carry out, again if that made room at once (an eviction between two steps)."""
        again = True
        while again:
            self._report_progress()
            before = time.process_time_ns()
            decisions = self._planner.decide(self._now)
            self._result.decision_ns.append(time.process_time_ns() - before)
            again = False
            for decision in decisions:
                if isinstance(decision, Dispatch):
                    self._dispatch(decision)
                elif isinstance(decision, Expire):
                    self._records[int(decision.request.id)].refusal = decision.reason
                elif isinstance(decision, Preempt):
                    again |= self._preempt(decision)
            self._decisions_now += 1
            if self._decisions_now > STALL_DECISIONS:
                raise ReplayError(f"The planner wakes at {self._now:.3f} s again and again, without anything to do.")
        self._wake = self._planner.next_wakeup(self._now) or math.inf

    def _report_progress(self) -> None:
        """Tell the planner how far everything is. Only before it decides: nothing else asks."""
        if not self._news:
            return
        self._news = False
        progress, tokens, now = self._planner.progress, self._machine.tokens, self._now
        for sequence in self._machine.running.values():
            progress(sequence.id, tokens(sequence), now)

    def _dispatch(self, decision: Dispatch) -> None:
        request = decision.request
        output, asked = self._outputs[int(request.id)], self._requests[int(request.id)]
        produced = request.prompt_tokens - asked.prompt_tokens  # before it was evicted
        self._machine.add(
            Sequence(
                request.id,
                request.prompt_tokens,
                min(output - produced, request.max_tokens),
                End.LENGTH,
                priority=decision.engine_priority,
                arrival=request.arrival,
            )
        )

    def _preempt(self, decision: Preempt) -> bool:
        """Abort it in the engine. True if it has left already, False if it leaves when the running step ends."""
        sequence = self._machine.abort(decision.request.id)
        if sequence is not None:
            self._left(sequence, decoded=sequence.made - 1)
        return sequence is not None
