"""The asynchronous engine: requests wait by priority, run in padded batches, and get their tokens step by step.

    wait ──► admitted into free rows ──► composed into batches of similar lengths ──► a batch steps ──► events
                                              several batches take turns, one step each

A row that has ended stays in its batch as padding until the batch ends or somebody waits for its place; an aborted one
leaves at the end of the step. Steps run on one thread; everything else happens on the event loop between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from scheduler.clock import Clock
from scheduler.core.types import PoolCapacity, StepReport
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
    FinishReason,
    PromptError,
    PromptTooLongError,
    Rendered,
    RequestFailedError,
    Sampling,
    StepListener,
    compact,
)
from scheduler.engines.chat import characters
from scheduler.engines.transformers.batch import PaddedBatch, Row, compose
from scheduler.engines.transformers.model import LoadedModel
from scheduler.engines.transformers.options import Options
from scheduler.engines.transformers.sampling import Picker, SamplingDefaults, check_sampling
from scheduler.engines.transformers.text import TextStream


@dataclass(slots=True, eq=False)
class _Stream:
    """One open `generate` call. `put` ends it with an error or, after an abort, with None."""

    request: EngineRequest
    row: Row
    text: TextStream
    # Bounded by max_tokens, which bounds what one request can ever put into it.
    events: asyncio.Queue[EngineEvent | EngineError | None] = field(default_factory=asyncio.Queue)
    aborted: bool = False

    def token(self, token: int, ends: frozenset[int]) -> bool:
        """Tell the next token; answers whether it was the last."""
        self.row.made += 1
        sampling = self.request.sampling
        own_end = token in ends and not sampling.ignore_eos
        text, stopped = ("", False) if own_end else self.text.push(token)
        self.events.put_nowait(Delta(text, self.row.made))
        if not (own_end or stopped or self.row.made == sampling.max_tokens):
            return False
        reason = FinishReason.STOP if own_end or stopped else FinishReason.LENGTH
        rest = "" if stopped else self.text.rest()
        self.events.put_nowait(Finished(reason, len(self.row.prompt), self.row.made, text=rest))
        return True


class TransformersEngine:
    """An `Engine` (`scheduler/engines/base.py`)."""

    def __init__(self, name: str, options: Options, *, clock: Clock, on_step: StepListener) -> None:
        self._name = name
        self._options = options
        self._clock = clock
        self._on_step = on_step
        self._model: LoadedModel | None = None
        self._started = False
        self._dead: str | None = "The engine has not been started."
        self._streams: dict[str, _Stream] = {}
        self._waiting: list[tuple[int, float, int, _Stream]] = []  # a heap: priority, arrival, order
        self._order = itertools.count()
        self._batches: deque[PaddedBatch] = deque()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="transformers-steps")
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="transformers-rendering")

    # --- the Engine protocol ------------------------------------------------------------------------------------

    async def start(self) -> EngineLimits:
        if self._started:
            raise EngineStartError("The engine was started before.", hint="Build a new one.")
        self._started = True
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(self._steps, LoadedModel, self._options)
        await loop.run_in_executor(self._steps, _warm_up, model)
        self._model = model
        self._dead = None
        self._task = asyncio.create_task(self._run(), name=f"transformers engine {self._name}")
        return EngineLimits(self._capacity(model), model.vocabulary)

    async def render(self, prompt: ChatPrompt, sampling: Sampling) -> Rendered:
        model = self._alive()
        if prompt.simulate is not None:
            raise PromptError("Only the simulated engine takes `simulate`.", param="simulate")
        check_sampling(sampling, model.vocabulary)
        limit = model.max_model_len - 1  # one token of output must fit
        length = characters(prompt.messages)
        if length > model.longest_token * limit:  # tokenising it would take seconds to learn the same
            raise PromptTooLongError(-(-length // model.longest_token), limit, param="messages", at_least=True)
        loop = asyncio.get_running_loop()
        tokens = await loop.run_in_executor(self._rendering, model.tokens, prompt.messages)
        if len(tokens) > limit:
            raise PromptTooLongError(len(tokens), limit, param="messages")
        return Rendered(len(tokens), limit + 1 - len(tokens), compact(tokens))

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        stream = self._enqueue(request)
        over = False
        try:
            while not over:
                event = await stream.events.get()
                over = not isinstance(event, Delta)
                if isinstance(event, EngineError):
                    raise event
                if event is not None:
                    yield event
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
        for thread in (self._steps, self._rendering):
            # A step ends soon and is waited for; a model that is still loading is not.
            await asyncio.to_thread(thread.shutdown, wait=self._model is not None, cancel_futures=True)
        self._model = None

    # --- requests in and out ------------------------------------------------------------------------------------

    def _alive(self) -> LoadedModel:
        if self._dead is not None or self._model is None:
            raise EngineDeadError(self._dead or "The engine is not running.")
        return self._model

    def _capacity(self, model: LoadedModel) -> PoolCapacity:
        """Memory is not paged: each row may take a whole context, and one step reads all prompts of a batch."""
        tokens = self._options.max_seqs * model.max_model_len
        return PoolCapacity(self._options.max_seqs, tokens, tokens, 1, model.max_model_len)

    def _enqueue(self, request: EngineRequest) -> _Stream:
        model = self._alive()
        if request.id in self._streams:
            raise RequestFailedError(f"A request with the id {request.id} runs already.")
        sampling = request.sampling
        if sampling.max_tokens is None or not 1 <= sampling.max_tokens <= request.rendered.room:
            raise PromptError(f"max_tokens must be 1 to {request.rendered.room}.", param="max_tokens")
        row = Row(request.id, list(request.rendered.payload), Picker(sampling, model.defaults))
        stream = self._streams[request.id] = _Stream(request, row, TextStream(model.text, sampling.stop))
        heapq.heappush(self._waiting, (request.priority, request.arrival, next(self._order), stream))
        self._work.set()
        return stream

    def _abort(self, request_id: str) -> None:
        """A waiting request ends at once, a running one when the step does."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.aborted = True
        waiting = [entry for entry in self._waiting if not entry[-1].aborted]
        if len(waiting) < len(self._waiting):
            self._waiting = waiting
            heapq.heapify(waiting)
            self._streams.pop(request_id).events.put_nowait(None)

    # --- the step loop ------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Step until cancelled or dead."""
        loop = asyncio.get_running_loop()
        try:
            while self._dead is None:
                self._admit()
                if not self._batches:
                    self._work.clear()
                    await self._work.wait()
                    continue
                batch = self._batches[0]
                self._batches.rotate(-1)
                padded, started, begun = batch.padded_tokens(), batch.started, self._clock.now()
                tokens = await loop.run_in_executor(self._steps, batch.step)
                now = self._clock.now()
                self._deliver(tokens)
                self._sweep()
                self._on_step(self._report(tokens, started, padded, now, now - begun))
        except Exception as error:  # noqa: BLE001 - the engine's own task: whatever ends it must end its streams too
            self._die(f"The engine failed: {error!r}", error)

    def _admit(self) -> None:
        """Give free rows to the best of those that wait; what enters together is one batch, if lengths allow."""
        if not self._waiting:
            return
        rows = sum(map(len, self._batches))
        if rows + len(self._waiting) > self._options.max_seqs:
            for batch in self._batches:
                batch.keep(batch.alive)
            rows = sum(map(len, self._batches))
        room = min(self._options.max_seqs - rows, len(self._waiting))
        entering = [heapq.heappop(self._waiting)[-1].row for _ in range(room)]
        model = self._alive()
        for together in reversed(compose(entering, self._options.max_padding)):
            self._batches.appendleft(PaddedBatch(model.network, together))

    def _deliver(self, tokens: list[tuple[Row, int]]) -> None:
        ends = self._alive().ends
        for row, token in tokens:
            stream = self._streams[row.id]
            if not stream.aborted and stream.token(token, ends):
                row.alive = False
                del self._streams[row.id]

    def _sweep(self) -> None:
        """Let aborted rows go, and batches in which nobody is alive."""
        for batch in list(self._batches):
            aborted = [row for row in batch.alive if self._streams[row.id].aborted]
            for row in aborted:
                row.alive = False
                self._streams.pop(row.id).events.put_nowait(None)
            if not batch.alive:
                self._batches.remove(batch)
            elif aborted:
                gone = set(map(id, aborted))
                batch.keep([row for row in batch.rows if id(row) not in gone])

    def _report(
        self, tokens: list[tuple[Row, int]], started: bool, padded: int, now: float, elapsed: float
    ) -> StepReport:
        """`tokens`: what the step made; `started`: it was not the first of its batch, which reads the prompts."""
        capacity = self._options.max_seqs * self._alive().max_model_len
        return StepReport(
            at=now,
            elapsed=elapsed,
            prefill_tokens=0 if started else sum(len(row.prompt) for row, _ in tokens),
            decode_seqs=len(tokens) if started else 0,
            running=sum(len(batch.alive) for batch in self._batches),
            waiting=len(self._waiting),
            kv_usage=min(sum(len(batch) * batch.width for batch in self._batches) / capacity, 1.0),
            decode_context=sum(len(row.prompt) + row.made for row, _ in tokens) if started else 0,
            padded_tokens=padded,
        )

    def _die(self, message: str, cause: Exception | None = None) -> None:
        """Every stream ends with EngineDeadError, and so does every later call. The first cause stays."""
        self._dead = self._dead or message
        for stream in self._streams.values():
            error = EngineDeadError(message)
            error.__cause__ = cause
            stream.events.put_nowait(error)
        self._streams.clear()
        self._waiting.clear()
        self._batches.clear()


def _warm_up(model: LoadedModel) -> None:
    """One token: the first pass takes a second more than others."""
    PaddedBatch(model.network, [Row("warm-up", [0], Picker(Sampling(temperature=0.0), SamplingDefaults()))]).step()
