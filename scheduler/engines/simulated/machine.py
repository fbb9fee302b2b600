"""The step machine: a continuous-batching engine as arithmetic. No loop, no clock: instants come in as arguments.

One step is `begin(now)` … `finish(now)`; `begin` answers the step's cost in seconds. In between, whoever drives the
machine lets that much time pass. The rules are those of an engine with chunked prefill and paged KV memory:

    begin    1. rested and new sequences come     2. decoders that cross a block border get one block more
             3. running prefills get what is left of the step's tokens, in order of admission
             4. waiting sequences are admitted, best (priority, arrival) first, until one does not fit
    finish   1. aborted sequences leave, without the token of this step
             2. every decoder and every completed prefill makes one token
             3. what has reached its target ends

A pipelined machine schedules a step while the one before it runs, as vLLM does: what comes during a step misses the
next one too, unless the machine is empty.

A full pool preempts the running sequence with the worst (priority, arrival): its blocks are freed and its tokens so
far become part of the prompt that it prefills again. A step that preempts admits nobody.

Decoders advance in lockstep, so nothing is done per decoder and step: a decoder's tokens are `offset + round`, and
two calendars say in which round it needs a block or reaches its target. A replay of long traces rests on that.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum, auto

from scheduler.core.types import PoolCapacity


class Place(StrEnum):
    """Where a sequence is. Only WAITING and GONE hold no slot."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    RESTING = auto()  # paced: not before `ready_at`
    HUNG = auto()  # holds its slot and blocks until it is aborted
    GONE = auto()


class End(StrEnum):
    """What happens when a sequence has made `target` tokens. All but HANG free the slot."""

    STOP = auto()
    LENGTH = auto()
    FAIL = auto()
    HANG = auto()
    CRASH = auto()
    OOM = auto()


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds: per step, per prefilled token, per decoding sequence, and per token of the decoders' context."""

    base: float = 0.0
    prefill_token: float = 0.0
    decode_seq: float = 0.0
    kv_token: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the machine. Fields after `pace` belong to the machine."""

    id: str
    prompt_tokens: int  # at least 1
    target: int  # tokens after which `end` happens; 0 only for faults
    end: End
    priority: int = 0  # smaller first
    arrival: float = 0.0
    pace: float = 0.0  # seconds to rest before each token

    place: Place = Place.WAITING
    order: int = 0
    made: int = 0  # tokens made; while decoding `Machine.tokens` knows, this is stale
    offset: int = 0  # while decoding: tokens = offset + round
    computed: int = 0  # tokens of the current prefill whose KV is there
    chunk: int = 0  # prefill tokens of the running step
    blocks: int = 0
    grow_round: int = 0  # while decoding: the round that needs one more block
    reach_round: int = 0  # while decoding: the round after which it leaves the lockstep
    ready_at: float = 0.0
    started_at: float | None = None

    @property
    def rank(self) -> tuple[int, float, int]:
        """Smaller is served first and preempted last."""
        return self.priority, self.arrival, self.order

    @property
    def context(self) -> int:
        """Tokens whose KV the next token needs; right while not decoding."""
        return self.prompt_tokens + self.made


@dataclass(slots=True)
class StepResult:
    """What one step did. `started`: first admissions; `ended`: reached the target; `freed`: aborted ones."""

    number: int
    prefill_tokens: int = 0
    decode_seqs: int = 0
    decode_context: int = 0  # tokens of context of the decoders
    preemptions: int = 0
    started: list[Sequence] = field(default_factory=list)
    first_tokens: list[Sequence] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    freed: list[Sequence] = field(default_factory=list)


class Machine:
    """See the module text. Sequences in a slot are `running`; `number` counts finished steps."""

    def __init__(self, capacity: PoolCapacity, cost: StepCost, pipelined: bool = False) -> None:
        self.capacity = capacity
        self.cost = cost
        self._pipelined = pipelined
        self.number = 0
        self.running: dict[str, Sequence] = {}
        self.waiting: dict[str, Sequence] = {}
        self._seats = min(capacity.max_seqs, capacity.step_tokens)  # each running sequence needs a token of the step
        self._free = capacity.total_blocks
        self._order = itertools.count()
        self._queue: list[tuple[tuple[int, float, int], Sequence]] = []
        self._coming: deque[tuple[int, Sequence]] = deque()  # pipelined: (first step that can have it, sequence)
        self._prefills: dict[str, Sequence] = {}
        self._decoders: dict[str, Sequence] = {}
        self._context = 0  # tokens of context of all decoders
        self._round = 0
        self._grow: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._reach: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._resting: list[tuple[float, int, Sequence]] = []
        self._aborting: dict[str, Sequence] = {}
        self._step = StepResult(1)  # the running step, or what has already happened before the next one
        self._stepping = False

    # --- in and out ---------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue it. ValueError if its id is in use or if it could never fit alone."""
        if sequence.id in self.running or sequence.id in self.waiting:
            raise ValueError(f"sequence {sequence.id} is already in the machine")
        if self.capacity.blocks(sequence.prompt_tokens + sequence.target) > self.capacity.total_blocks:
            raise ValueError(f"sequence {sequence.id} is larger than the KV pool")
        sequence.order = next(self._order)
        self._await_step(sequence)
        if self._pipelined:
            self._coming.append((self._step.number + (2 if self._stepping else 1), sequence))
        else:
            self._enqueue(sequence)

    def abort(self, sequence_id: str) -> Sequence | None:
        """Take it out: now if it waits or no step runs, else at the end of the running step.

        Answers the sequence if it has left by now; None if it leaves later or is unknown.
        """
        sequence = self.waiting.pop(sequence_id, None)
        if sequence is None:
            sequence = self.running.get(sequence_id)
            if sequence is None:
                return None
            if self._stepping:
                self._aborting[sequence_id] = sequence
                return None
            self._release(sequence, Place.GONE)
            if sequence in self._step.started:  # it had a slot between two steps and never ran
                self._step.started.remove(sequence)
        sequence.place = Place.GONE
        return sequence

    def tokens(self, sequence: Sequence) -> int:
        """Tokens that it has made so far."""
        return sequence.offset + self._round if sequence.place is Place.DECODE else sequence.made

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0..1."""
        return 1.0 - self._free / self.capacity.total_blocks

    def next_ready(self) -> float | None:
        """The instant at which the next paced sequence can go on; None without one."""
        while self._resting:
            ready_at, _, sequence = self._resting[0]
            if self._rests(sequence, ready_at):
                return ready_at
            heapq.heappop(self._resting)
        return None

    def producers(self) -> Iterator[Sequence]:
        """Between `begin` and `finish`: the sequences whose token this step makes."""
        for sequence in itertools.chain(self._decoders.values(), self._prefills.values()):
            if sequence.id not in self._aborting and (sequence.place is Place.DECODE or self._completes(sequence)):
                yield sequence

    # --- a step -------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        """Schedule one step. Answers its cost in seconds, or None when there is nothing to do."""
        step = self._step
        preemptions = step.preemptions
        self._wake_rested(now)
        self._receive(step.number)
        self._grow_decoders(step)
        budget = self._continue_prefills(step, self.capacity.step_tokens - len(self._decoders))
        if step.preemptions == preemptions:
            self._admit(step, budget, now)
        step.decode_seqs = len(self._decoders)
        step.decode_context = self._context
        step.prefill_tokens = sum(sequence.chunk for sequence in self._prefills.values())
        if not step.decode_seqs and not step.prefill_tokens:
            return None
        self._stepping = True
        return (
            self.cost.base
            + self.cost.prefill_token * step.prefill_tokens
            + self.cost.decode_seq * step.decode_seqs
            + self.cost.kv_token * self._context
        )

    def finish(self, now: float) -> StepResult:
        """End the step that `begin` scheduled."""
        assert self._stepping, "finish() without begin()"
        step, self._step, self._stepping = self._step, StepResult(self._step.number + 1), False
        self.number = step.number
        for sequence in self._aborting.values():
            self._release(sequence, Place.GONE)
            step.freed.append(sequence)
        self._aborting.clear()
        self._round += 1
        self._context += len(self._decoders)
        for sequence in self._reach.pop(self._round, ()):
            # An entry is stale if its sequence left the lockstep since; one that came back has a newer entry.
            if sequence.place is Place.DECODE and sequence.reach_round == self._round:
                self._pause(sequence)
                self._after_token(sequence, step, now)
        for sequence in [sequence for sequence in self._prefills.values() if sequence.chunk]:
            self._finish_chunk(sequence, step, now)
        return step

    # --- the parts of begin ---------------------------------------------------------------------------------------

    def _wake_rested(self, now: float) -> None:
        while self._resting and self._resting[0][0] <= now:
            ready_at, _, sequence = heapq.heappop(self._resting)
            if self._rests(sequence, ready_at):
                self._go_on(sequence)

    def _receive(self, number: int) -> None:
        while self._coming and (self._coming[0][0] <= number or not self.running):
            sequence = self._coming.popleft()[1]
            if self.waiting.get(sequence.id) is sequence:
                self._enqueue(sequence)

    def _grow_decoders(self, step: StepResult) -> None:
        for sequence in self._grow.pop(self._round, ()):
            if sequence.place is Place.DECODE and sequence.grow_round == self._round and self._take(sequence, 1, step):
                self._plan_growth(sequence)

    def _continue_prefills(self, step: StepResult, budget: int) -> int:
        for sequence in list(self._prefills.values()):
            chunk = min(sequence.context - sequence.computed, budget)
            needed = self.capacity.blocks(sequence.computed + chunk) - sequence.blocks
            if sequence.place is Place.PREFILL and self._take(sequence, needed, step):
                sequence.chunk = chunk
                budget -= chunk
        return budget

    def _admit(self, step: StepResult, budget: int, now: float) -> None:
        while budget > 0 and len(self.running) < self._seats and self._queue:
            sequence = self._queue[0][1]
            if self.waiting.get(sequence.id) is not sequence:  # aborted while it waited
                heapq.heappop(self._queue)
                continue
            chunk = min(sequence.context, budget)
            needed = self.capacity.blocks(chunk)
            if needed > self._free:
                return
            heapq.heappop(self._queue)
            self._seat(sequence, step, now)
            if sequence.pace and not sequence.made:
                self._rest(sequence, now)
                continue
            self._go_on(sequence)
            self._free -= needed
            sequence.blocks = needed
            sequence.chunk = chunk
            budget -= chunk

    def _seat(self, sequence: Sequence, step: StepResult, now: float) -> None:
        del self.waiting[sequence.id]
        self.running[sequence.id] = sequence
        if sequence.started_at is None:
            sequence.started_at = now
            step.started.append(sequence)

    # --- the parts of finish --------------------------------------------------------------------------------------

    def _completes(self, sequence: Sequence) -> bool:
        """True if the running step ends its prefill with a token (a fault at 0 comes in place of the first one)."""
        return sequence.computed + sequence.chunk == sequence.context and sequence.made < sequence.target

    def _finish_chunk(self, sequence: Sequence, step: StepResult, now: float) -> None:
        makes_token = self._completes(sequence)
        sequence.computed += sequence.chunk
        sequence.chunk = 0
        if sequence.computed < sequence.context:
            return
        self._pause(sequence)
        if makes_token:
            sequence.made += 1
            if sequence.made == 1:
                step.first_tokens.append(sequence)
        self._after_token(sequence, step, now)

    def _after_token(self, sequence: Sequence, step: StepResult, now: float) -> None:
        """Where a paused sequence belongs now that it has made a token."""
        if sequence.made < sequence.target:
            if sequence.pace:
                self._rest(sequence, now)
            else:
                self._go_on(sequence)
        elif sequence.end is End.HANG:
            sequence.place = Place.HUNG
        else:
            self._release(sequence, Place.GONE)
            step.ended.append(sequence)

    # --- places and blocks ----------------------------------------------------------------------------------------

    def _await_step(self, sequence: Sequence) -> None:
        sequence.place = Place.WAITING
        self.waiting[sequence.id] = sequence

    def _enqueue(self, sequence: Sequence) -> None:
        heapq.heappush(self._queue, (sequence.rank, sequence))

    def _go_on(self, sequence: Sequence) -> None:
        """Back into the steps: prefill first, and decode once something is computed."""
        if not sequence.computed:
            sequence.place = Place.PREFILL
            self._prefills[sequence.id] = sequence
            return
        sequence.place = Place.DECODE
        self._decoders[sequence.id] = sequence
        self._context += sequence.context
        sequence.offset = sequence.made - self._round
        sequence.reach_round = self._round + 1 if sequence.pace else sequence.target - sequence.offset
        self._reach[sequence.reach_round].append(sequence)
        self._plan_growth(sequence)

    def _pause(self, sequence: Sequence) -> None:
        """Out of the steps, still in its slot."""
        if sequence.place is Place.DECODE:
            sequence.made = sequence.offset + self._round
            self._context -= sequence.context
            del self._decoders[sequence.id]
        elif sequence.place is Place.PREFILL:
            del self._prefills[sequence.id]
        sequence.place = Place.RESTING

    def _rest(self, sequence: Sequence, now: float) -> None:
        sequence.place = Place.RESTING
        sequence.ready_at = now + sequence.pace
        heapq.heappush(self._resting, (sequence.ready_at, next(self._order), sequence))

    def _rests(self, sequence: Sequence, ready_at: float) -> bool:
        """False if the entry of the resting heap is stale: aborted or preempted since."""
        return sequence.place is Place.RESTING and sequence.ready_at == ready_at

    def _release(self, sequence: Sequence, place: Place) -> None:
        """Free its slot and its blocks."""
        self._pause(sequence)
        del self.running[sequence.id]
        self._free += sequence.blocks
        sequence.blocks = sequence.chunk = sequence.computed = 0
        sequence.place = place

    def _plan_growth(self, sequence: Sequence) -> None:
        held = sequence.blocks * self.capacity.block_size
        sequence.grow_round = held - sequence.prompt_tokens - sequence.offset + 1
        if sequence.grow_round < sequence.reach_round:
            self._grow[sequence.grow_round].append(sequence)

    def _take(self, sequence: Sequence, blocks: int, step: StepResult) -> bool:
        """Give it `blocks` more, preempting the worst as long as it takes; False if that is itself."""
        while self._free < blocks:
            victim = max(self._victims(sequence), key=lambda one: one.rank)
            self._release(victim, Place.WAITING)
            self._await_step(victim)
            self._enqueue(victim)
            step.preemptions += 1
            if victim is sequence:
                return False
        self._free -= blocks
        sequence.blocks += blocks
        return True

    def _victims(self, sequence: Sequence) -> Iterator[Sequence]:
        """What can be preempted for `sequence`, itself included: all that hold blocks and are not stuck with them."""
        for one in self.running.values():
            if one is sequence or (one.blocks and one.place is not Place.HUNG):
                yield one
