"""The asynchronous engine around the step machine: streams, the step loop, and how it dies.

Under the real clock a step takes its cost, under a manual clock the engine is a discrete-event simulation. A step
that costs nothing still yields to the loop once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from scheduler.clock import Clock
from scheduler.core.types import StepReport
from scheduler.engines.base import (
    ChatPrompt,
    Delta,
    EngineDeadError,
    EngineError,
    EngineEvent,
    EngineLimits,
    EngineRequest,
    EngineStartError,
    Finished,
    PromptError,
    PromptTooLongError,
    Rendered,
    RequestFailedError,
    Sampling,
    StepListener,
    compact,
)
from scheduler.engines.logprobs import LogprobTail
from scheduler.engines.simulated.machine import End, Machine, Sequence, StepResult
from scheduler.engines.simulated.options import Options, parse_options
from scheduler.engines.simulated.record import Record, record_path
from scheduler.engines.simulated.script import (
    VOCABULARY,
    Answer,
    Teller,
    Usage,
    compose,
    likely,
    parse_simulate,
    token_ids,
)

LARGE_PROMPT = 100_000  # bytes of prompt from which on rendering goes to a thread
HEARTBEAT = 5.0  # seconds: a paced request is no silence
CATCH_UP = 0.02  # seconds: timers that fire late are made up for by shorter sleeps, up to this much

_FATAL: dict[End, tuple[str, Exception | None]] = {
    End.CRASH: ("The engine crashed, as a request had asked.", None),
    End.OOM: ("The engine ran out of memory, as a request had asked.", MemoryError("out of KV memory")),
}


class _Stream:
    """One open `generate` call. `put` ends it with an error or, after an abort, with None.

    `answers`: those that have not ended, by their sequence in the machine. `leaving`: aborted while a step runs, its
    places are free when that ends; `gone` is set then.
    """

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.answers: dict[str, _Answer] = {}
        self.started = False
        self.leaving = False
        self.gone = asyncio.Event()
        # Bounded by max_tokens, which bounds what one request can ever put into it.
        self._events: asyncio.Queue[EngineEvent | EngineError | None] = asyncio.Queue()
        self.put = self._events.put_nowait
        self.get = self._events.get

    def left(self) -> Iterator[EngineEvent | EngineError]:
        """What has been put and not been taken, up to the end of the stream."""
        while not self._events.empty() and (event := self._events.get_nowait()) is not None:
            yield event


class _Answer:
    """One answer of a stream."""

    def __init__(self, stream: _Stream, index: int, request: EngineRequest, answer: Answer, usage: Usage) -> None:
        self.stream = stream
        self._index = index
        self._answer = answer
        self._teller = Teller(answer, len(request.produced))
        self._alternatives = request.sampling.logprobs
        self._logprobs = LogprobTail(bool(request.sampling.stop))
        self._prompt_tokens = request.rendered.prompt_tokens
        self._usage = usage

    def token(self) -> None:
        number = self._teller.tokens
        text, call = self._teller.next(), self._answer.call(number)
        made = self._answer.text(number)
        chosen = [] if self._alternatives is None or call else [likely(made, self._alternatives)]
        delta = Delta(
            text,
            self._teller.tokens,
            (number % VOCABULARY,),  # tokens are numbered words
            self._usage.cached_tokens or 0,
            self._index,
            self._logprobs.told(chosen, text),
            () if call is None else (call,),
        )
        self.stream.put(delta)

    def finish(self) -> None:
        """The end, with the numbers that the request wants misreported, if any."""
        usage, rest = self._usage, self._teller.rest()
        self.stream.put(
            Finished(
                self._answer.reason,
                self._prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens,
                self._teller.tokens if usage.completion_tokens is None else usage.completion_tokens,
                usage.cached_tokens or 0,
                rest,
                self._index,
                self._logprobs.rest(rest, cut=self._answer.cut is not None),
            )
        )


class SimulatedEngine:
    """An `Engine` (`scheduler/engines/base.py`). `epoch`: Unix seconds at the clock's zero, for the record."""

    def __init__(
        self, model: str, options: Options, *, clock: Clock, on_step: StepListener, data_dir: Path, epoch: float = 0.0
    ) -> None:
        self._model = model
        self._options = options
        self._capacity = options.capacity
        self._machine = Machine(self._capacity, options.cost, options.pipelined)
        self._clock = clock
        self._on_step = on_step
        self._record_path = record_path(data_dir, model)
        self._epoch = epoch
        self._record: Record | None = None
        self._streams: dict[str, _Stream] = {}
        self._answers: dict[str, _Answer] = {}  # of all streams, by sequence
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._dead: str | None = "The engine has not been started."
        self._late = 0.0  # seconds by which the last step, if the next one follows at once, took too long

    # --- the Engine protocol ------------------------------------------------------------------------------------

    async def start(self) -> EngineLimits:
        if self._task is not None:
            raise EngineStartError("The engine was started before.", hint="Build a new one.")
        if self._options.start_seconds:
            await self._clock.sleep(self._options.start_seconds)
        try:
            self._record = Record(self._record_path, self._model, self._now())
        except OSError as error:
            raise EngineStartError(
                f"The record {self._record_path} cannot be written: {error.strerror}.",
                hint="Make the data directory writable.",
            ) from error
        self._dead = None
        self._task = asyncio.create_task(self._run(), name=f"simulated engine {self._model}")
        return EngineLimits(self._capacity, VOCABULARY, resumes=True)

    async def render(self, prompt: ChatPrompt, sampling: Sampling) -> Rendered:
        simulate = parse_simulate(prompt.simulate)
        if any(not 0 <= token < VOCABULARY for token in sampling.logit_bias):
            raise PromptError(f"Token ids of this model are below {VOCABULARY}.", param="logit_bias")
        compose(msgspec.structs.replace(sampling, max_tokens=1), simulate)  # refuses what describes nothing
        large = sum(len(str(message.get("content"))) for message in prompt.messages) > LARGE_PROMPT
        tokens = await asyncio.to_thread(token_ids, prompt) if large else token_ids(prompt)
        room = self._capacity.max_model_len - max(len(tokens), 1)
        if room < 1:
            raise PromptTooLongError(len(tokens), self._capacity.max_model_len - 1, param="messages")
        return Rendered(len(tokens), room, compact(tokens))

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        last = self._streams.get(request.id)
        if last is not None and last.leaving:
            await last.gone.wait()
        stream, left = self._admit(request), request.sampling.n
        over = False
        try:
            while not over:
                event = await stream.get()
                if event is None:
                    over = True
                elif isinstance(event, EngineError):
                    over = True
                    raise event
                else:
                    left -= isinstance(event, Finished)
                    over = not left
                    yield event
        except asyncio.CancelledError:
            over = True
            self._abort(request.id)
            for event in stream.left():  # made before the abort, so the record counts it and the listener gets it
                if isinstance(event, EngineError):
                    raise event from None
                yield event
            raise
        finally:
            if not over:
                self._abort(request.id)

    async def abort(self, request_id: str) -> None:
        self._abort(request_id)

    async def aclose(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._die("The engine has been closed.")
        if self._record is not None:
            self._record.close()

    # --- requests in and out ------------------------------------------------------------------------------------

    def _admit(self, request: EngineRequest) -> _Stream:
        """Check the request and queue its answers in the machine."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        simulate = parse_simulate(request.simulate)
        if request.sampling.max_tokens is None or not 1 <= request.sampling.max_tokens <= request.rendered.room:
            raise PromptError(f"max_tokens must be 1 to {request.rendered.room}.", param="max_tokens")
        if request.id in self._streams:
            raise RequestFailedError(f"A request with the id {request.id} runs already.")
        stream, produced = _Stream(request.id), len(request.produced)
        for index in range(request.sampling.n):
            answer = compose(request.sampling, simulate, f"{request.id}/{index}")
            sequence = Sequence(
                id=f"{request.id}/{index}",
                # An empty prompt still takes one step to read.
                prompt_tokens=max(request.rendered.prompt_tokens + produced, 1),
                target=max(answer.tokens - produced, 0),
                end=answer.end,
                priority=request.priority,
                arrival=request.arrival,
                pace=simulate.pace,
            )
            try:
                self._machine.add(sequence)
            except ValueError as error:
                raise RequestFailedError(str(error)) from error
            stream.answers[sequence.id] = _Answer(stream, index, request, answer, simulate.usage)
        self._streams[request.id] = stream
        self._answers |= stream.answers
        self._log.received(request.id, self._now(), self._machine.number, produced)
        self._work.set()
        return stream

    def _abort(self, request_id: str) -> None:
        """Slots and blocks are free, and the stream ends, when the running step ends; at once if none runs."""
        stream = self._streams.get(request_id)
        if stream is None or stream.leaving:
            return
        stream.leaving = True
        self._log.aborted(request_id, self._now(), self._machine.number)
        for sequence_id in list(stream.answers):
            if self._machine.abort(sequence_id) is not None:
                self._leave(sequence_id)
        self._log.flush()
        self._work.set()

    def _leave(self, sequence_id: str) -> None:
        """An aborted answer is out of the machine; with the last one the stream ends."""
        stream = self._answers.pop(sequence_id).stream
        del stream.answers[sequence_id]
        if stream.answers or self._streams.get(stream.id) is not stream:
            return
        del self._streams[stream.id]
        stream.put(None)
        stream.gone.set()
        self._log.ended(stream.id, self._now(), self._machine.number, "aborted")

    # --- the step loop ------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Step until cancelled or dead."""
        try:
            while self._dead is None:
                begun = self._clock.now()
                cost = self._machine.begin(begun)
                if cost is None:
                    self._late = 0.0
                    await self._wait_for_work()
                    continue
                await self._spend(cost)
                elapsed = self._clock.now() - begun
                self._late = min(max(self._late + elapsed - cost, 0.0), CATCH_UP)
                self._finish_step(begun + elapsed, elapsed)
        except Exception as error:  # noqa: BLE001 - the engine's own task: whatever ends it must end its streams too
            self._die(f"The engine failed: {error!r}", error)

    async def _wait_for_work(self) -> None:
        """Until a request comes or goes, or a paced one has rested; a long rest is reported as a step of nothing."""
        self._work.clear()
        ready_at = self._machine.next_ready()
        waiters: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._work.wait())]
        if ready_at is not None:
            rest = ready_at - self._clock.now()
            waiters.append(asyncio.ensure_future(self._clock.sleep(min(rest, HEARTBEAT))))
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        now = self._clock.now()
        if ready_at is not None and now < ready_at and not self._work.is_set():
            self._on_step(self._report(StepResult(self._machine.number), now, 0.0))

    async def _spend(self, cost: float) -> None:
        """Let a step's cost pass, less what the step before it was late."""
        rest = cost - self._late
        await (self._clock.sleep(rest) if rest > 0 else asyncio.sleep(0))

    def _finish_step(self, now: float, elapsed: float) -> None:
        producers = list(self._machine.producers())
        result = self._machine.finish(now)
        for sequence in result.started:
            assert sequence.started_at is not None
            self._started(self._answers[sequence.id].stream, sequence.started_at, result.number)
        answers = [self._answers[sequence.id] for sequence in producers]
        for answer in answers:
            answer.token()
        self._log.made((answer.stream.id for answer in answers), now + self._epoch, result.number)
        for sequence in result.freed:
            if sequence.id in self._answers:  # else its request has failed with another answer
                self._leave(sequence.id)
        for sequence in result.ended:
            self._end(sequence)
        # When whoever reads the streams has taken the step's tokens: of a process that is killed, the record has what
        # was delivered.
        asyncio.get_running_loop().call_soon(self._log.flush)
        self._on_step(self._report(result, now, elapsed))

    def _started(self, stream: _Stream, at: float, step: int) -> None:
        """One of its answers has a slot."""
        if not stream.started:
            stream.started = True
            self._log.started(stream.id, at + self._epoch, step)

    def _report(self, result: StepResult, now: float, elapsed: float) -> StepReport:
        return StepReport(
            at=now,
            elapsed=elapsed,
            prefill_tokens=result.prefill_tokens,
            decode_seqs=result.decode_seqs,
            running=len(self._machine.running),
            waiting=len(self._machine.waiting),
            kv_usage=self._machine.kv_usage,
            preemptions=result.preemptions,
            decode_context=result.decode_context,
        )

    # --- ends ---------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence) -> None:
        """It has reached its target: tell its stream, or take the whole engine down with it."""
        answer = self._answers.get(sequence.id)
        if answer is None:  # the engine or its request died of another one in this step
            return
        if sequence.end in _FATAL:
            self._die(*_FATAL[sequence.end])
            return
        stream = answer.stream
        del stream.answers[sequence.id], self._answers[sequence.id]
        if sequence.end is End.FAIL:
            self._fail(stream, f"The request failed after {sequence.made} tokens, as it had asked.")
        else:
            answer.finish()
        if not stream.answers:
            del self._streams[stream.id]
            self._log.ended(stream.id, self._now(), self._machine.number, sequence.end.value)

    def _fail(self, stream: _Stream, message: str) -> None:
        """The whole request fails with one of its answers."""
        stream.put(RequestFailedError(message))
        for sequence_id in list(stream.answers):
            self._machine.abort(sequence_id)
            del stream.answers[sequence_id], self._answers[sequence_id]

    def _die(self, message: str, cause: Exception | None = None) -> None:
        """Every stream ends with EngineDeadError, and so does every later call. The first cause stays."""
        self._dead = self._dead or message
        for request_id, stream in self._streams.items():
            error = EngineDeadError(message)
            error.__cause__ = cause
            stream.put(error)
            stream.gone.set()
            self._log.ended(request_id, self._now(), self._machine.number, "engine_dead")
        self._streams.clear()
        self._answers.clear()

    # --- small things ---------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Unix seconds, for the record."""
        return self._clock.now() + self._epoch

    @property
    def _log(self) -> Record:
        assert self._record is not None, "a started engine has a record"
        return self._record


def create(
    model: str, options: Mapping[str, Any], *, clock: Clock, on_step: StepListener, data_dir: Path
) -> SimulatedEngine:
    """Build (not start) the engine of a deployment. EngineStartError names a bad option."""
    epoch = time.time() - clock.now()
    return SimulatedEngine(model, parse_options(options), clock=clock, on_step=on_step, data_dir=data_dir, epoch=epoch)
