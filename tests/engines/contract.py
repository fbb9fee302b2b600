"""What holds for every engine. A subclass named `Test…` gives a fixture `rig` and the hooks, and inherits the tests.

A rig that lives for a whole class must serve no tests but these: the last one closes its engine. Its engine should
have few slots (2 to 4): a test fills them all with answers of 200 tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from scheduler.clock import RealClock
from scheduler.core.types import StepReport
from scheduler.engines import create_engine
from scheduler.engines.base import (
    ChatPrompt,
    Delta,
    Engine,
    EngineDeadError,
    EngineEvent,
    EngineLimits,
    EngineRequest,
    EngineStartError,
    Finished,
    FinishReason,
    PromptTooLongError,
    Sampling,
)

TIMEOUT = 120.0  # seconds after which a condition that should come is a failure


class StepLog:
    """The step reports of an engine; give it to the engine as `on_step`."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self._changed = asyncio.Event()

    def __call__(self, report: StepReport) -> None:
        self.reports.append(report)
        self._changed.set()

    async def until(self, condition: Callable[[StepReport], bool], since: int = 0) -> StepReport:
        """The first report at or after index `since` that meets the condition."""
        async with asyncio.timeout(TIMEOUT):
            while True:
                for report in self.reports[since:]:
                    if condition(report):
                        return report
                since = len(self.reports)
                self._changed.clear()
                await self._changed.wait()


@dataclass
class Rig:
    """A started engine, what `start()` said, and its step reports."""

    engine: Engine
    limits: EngineLimits
    steps: StepLog


@dataclass
class Transcript:
    """Everything one request answered."""

    deltas: list[Delta]
    finished: Finished

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas) + self.finished.text


class EngineContract:
    """See the module text."""

    name: ClassVar[str]  # in scheduler.engines.ENGINES
    options: ClassVar[dict[str, Any]] = {}  # valid options for building one
    abort_lag: ClassVar[int] = 1  # step reports after an abort that may still count the aborted request

    def make_prompt(self, words: int) -> ChatPrompt:
        """A prompt of at least so many tokens."""
        raise NotImplementedError

    async def multibyte_request(self, engine: Engine) -> EngineRequest:
        """A request whose answer has characters outside ASCII."""
        raise NotImplementedError

    # --- helpers ------------------------------------------------------------------------------------------------

    async def request(
        self, engine: Engine, request_id: str, *, words: int = 8, max_tokens: int = 16, priority: int = 0, **more: Any
    ) -> EngineRequest:
        """A greedy request that goes on until `max_tokens` unless a stop string ends it."""
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)
        rendered = await engine.render(self.make_prompt(words), sampling)
        return EngineRequest(request_id, rendered, sampling, priority, arrival=0.0)

    async def transcript(self, engine: Engine, request: EngineRequest) -> Transcript:
        """Run a request to its end and hold it to the order of events."""
        async with asyncio.timeout(TIMEOUT):
            events = [event async for event in engine.generate(request)]
        *deltas, finished = events
        assert isinstance(finished, Finished)
        assert all(isinstance(delta, Delta) for delta in deltas)
        return Transcript(cast("list[Delta]", deltas), finished)

    @asynccontextmanager
    async def stream(self, engine: Engine, request: EngineRequest) -> AsyncIterator[AsyncGenerator[EngineEvent, None]]:
        """An open stream that has answered its first event; leaving closes it."""
        async with aclosing(cast("AsyncGenerator[EngineEvent, None]", engine.generate(request))) as events:
            async with asyncio.timeout(TIMEOUT):
                await anext(events)
            yield events

    # --- start and render ---------------------------------------------------------------------------------------

    async def test_start_answers_what_the_engine_can_hold(self, rig: Rig) -> None:
        capacity = rig.limits.capacity
        assert capacity.max_seqs >= 2
        assert capacity.step_tokens >= capacity.max_seqs
        assert capacity.block_size >= 1
        assert 1 < capacity.max_model_len <= capacity.kv_tokens
        assert rig.limits.vocab_size > 1

    async def test_render_counts_the_tokens_that_the_engine_reports(self, rig: Rig) -> None:
        request = await self.request(rig.engine, "counted", words=13)
        answer = await self.transcript(rig.engine, request)
        assert answer.finished.prompt_tokens == request.rendered.prompt_tokens
        assert request.rendered.prompt_tokens >= 13
        assert 0 < request.rendered.room <= rig.limits.capacity.max_model_len - request.rendered.prompt_tokens

    async def test_render_refuses_a_prompt_that_leaves_no_room(self, rig: Rig) -> None:
        limit = rig.limits.capacity.max_model_len
        with pytest.raises(PromptTooLongError) as refused:
            await rig.engine.render(self.make_prompt(limit), Sampling(max_tokens=1))
        assert refused.value.tokens >= limit
        assert refused.value.tokens > refused.value.limit > 0
        assert refused.value.param == "messages"

    # --- an answer ----------------------------------------------------------------------------------------------

    async def test_deltas_count_up_to_the_tokens_of_the_end(self, rig: Rig) -> None:
        answer = await self.transcript(rig.engine, await self.request(rig.engine, "counting", max_tokens=20))
        counts = [delta.tokens for delta in answer.deltas]
        assert counts == sorted(set(counts))
        assert counts[0] >= 1
        assert counts[-1] == answer.finished.completion_tokens == 20

    async def test_max_tokens_ends_an_answer(self, rig: Rig) -> None:
        for max_tokens in (1, 2, 7):
            request = await self.request(rig.engine, f"limited-{max_tokens}", max_tokens=max_tokens)
            answer = await self.transcript(rig.engine, request)
            assert answer.finished.completion_tokens == max_tokens
            assert answer.finished.reason is FinishReason.LENGTH

    async def test_a_stop_string_ends_an_answer_and_is_not_shown(self, rig: Rig) -> None:
        whole = (await self.transcript(rig.engine, await self.request(rig.engine, "whole", max_tokens=24))).text
        middle = len(whole) // 2
        for length in (1, 5, 9):
            stop = whole[middle : middle + length]
            request = await self.request(rig.engine, f"stopped-{length}", max_tokens=24, stop=(stop,))
            answer = await self.transcript(rig.engine, request)
            assert answer.text == whole[: whole.index(stop)]
            assert answer.finished.reason is FinishReason.STOP
            assert 0 < answer.finished.completion_tokens <= 24
            assert answer.deltas[-1].tokens == answer.finished.completion_tokens

    async def test_characters_are_never_split(self, rig: Rig) -> None:
        answer = await self.transcript(rig.engine, await self.multibyte_request(rig.engine))
        assert not answer.text.isascii()
        assert not any("\ufffd" in delta.text for delta in answer.deltas)

    # --- several answers, and what is told beside the text --------------------------------------------------------

    async def transcripts(self, engine: Engine, request: EngineRequest) -> list[Transcript]:
        """The same for each answer of a request, by index."""
        deltas: dict[int, list[Delta]] = {index: [] for index in range(request.sampling.n)}
        ends: dict[int, Finished] = {}
        async with asyncio.timeout(TIMEOUT):
            async for event in engine.generate(request):
                assert event.index not in ends, "an answer says nothing after its end"
                if isinstance(event, Finished):
                    ends[event.index] = event
                else:
                    deltas[event.index].append(event)
        return [Transcript(deltas[index], ends[index]) for index in deltas]

    async def test_every_answer_of_a_request_counts_and_ends_for_itself(self, rig: Rig) -> None:
        request = await self.request(rig.engine, "several", words=13, max_tokens=12, n=2)
        alone = await self.transcript(rig.engine, await self.request(rig.engine, "alone", words=13, max_tokens=12))
        for answer in await self.transcripts(rig.engine, request):
            counts = [delta.tokens for delta in answer.deltas]
            assert counts == sorted(set(counts))
            assert counts[-1] == answer.finished.completion_tokens == 12
            assert answer.finished.prompt_tokens == request.rendered.prompt_tokens
            assert answer.finished.reason is FinishReason.LENGTH
            assert answer.text == alone.text

    async def test_leaving_frees_the_slots_of_all_answers(self, rig: Rig) -> None:
        since = len(rig.steps.reports)
        request = await self.request(rig.engine, "all-leave", max_tokens=100, n=2)
        async with self.stream(rig.engine, request):
            await rig.steps.until(lambda report: report.running == 2, since)
            since = len(rig.steps.reports)
        again = await self.request(rig.engine, "after-all-left", max_tokens=8)
        await self.transcript(rig.engine, again)
        await rig.steps.until(lambda report: report.running == 0, since)
        assert all(report.running <= 1 for report in rig.steps.reports[since + self.abort_lag :])

    async def test_log_probabilities_spell_the_text_of_the_answer(self, rig: Rig) -> None:
        request = await self.request(rig.engine, "likely", max_tokens=12, logprobs=3)
        answer = await self.transcript(rig.engine, request)
        tokens = [one for delta in answer.deltas for one in delta.logprobs] + list(answer.finished.logprobs)
        assert len(tokens) == 12
        spelled = b"".join(bytes(one.chosen.bytes or ()) for one in tokens)
        assert spelled.decode(errors="ignore").startswith(answer.text[:-1])
        for one in tokens:
            ranked = [likely.logprob for likely in one.top]
            assert len(ranked) == 3
            assert ranked == sorted(ranked, reverse=True)
            assert one.chosen.logprob <= 0
        plain = await self.transcript(rig.engine, await self.request(rig.engine, "plain", max_tokens=2))
        assert all(delta.logprobs == () for delta in plain.deltas)

    async def test_a_stop_string_is_not_shown_as_tokens_either(self, rig: Rig) -> None:
        whole = (await self.transcript(rig.engine, await self.request(rig.engine, "uncut", max_tokens=24))).text
        stop = whole[len(whole) // 2 : len(whole) // 2 + 5]
        request = await self.request(rig.engine, "cut-tokens", max_tokens=24, stop=(stop,), logprobs=0)
        answer = await self.transcript(rig.engine, request)
        tokens = [one for delta in answer.deltas for one in delta.logprobs] + list(answer.finished.logprobs)
        assert answer.text == whole[: whole.index(stop)]
        told = "".join(one.chosen.token for one in tokens[:-1])
        assert answer.text.startswith(told)
        assert all(one.top == () for one in tokens)

    # --- many at once -------------------------------------------------------------------------------------------

    async def test_requests_at_the_same_time_share_steps(self, rig: Rig) -> None:
        many = min(rig.limits.capacity.max_seqs, 4)
        requests = [await self.request(rig.engine, f"shared-{index}", max_tokens=24) for index in range(many)]
        since = len(rig.steps.reports)
        answers = await asyncio.gather(*(self.transcript(rig.engine, request) for request in requests))
        assert [answer.finished.completion_tokens for answer in answers] == [24] * many
        reports = rig.steps.reports[since:]
        assert max(report.decode_seqs for report in reports) == many
        assert len(reports) < many * 24

    async def test_a_full_engine_takes_the_best_priority_next(self, rig: Rig) -> None:
        order: list[str] = []

        async def note_first_token(request: EngineRequest) -> None:
            async with self.stream(rig.engine, request):
                order.append(request.id)

        async with AsyncExitStack() as stack:
            seats = []
            for index in range(rig.limits.capacity.max_seqs):
                request = await self.request(rig.engine, f"seated-{index}", max_tokens=200)
                seats.append(await stack.enter_async_context(self.stream(rig.engine, request)))
            low = await self.request(rig.engine, "low", max_tokens=2, priority=9)
            high = await self.request(rig.engine, "high", max_tokens=2, priority=1)
            since = len(rig.steps.reports)
            waiters = [asyncio.create_task(note_first_token(request)) for request in (low, high)]
            await rig.steps.until(lambda report: report.waiting == 2, since)
            await seats[0].aclose()
            async with asyncio.timeout(TIMEOUT):
                await asyncio.gather(*waiters)
        assert order == ["high", "low"]

    # --- aborts -------------------------------------------------------------------------------------------------

    async def test_closing_the_stream_frees_the_slot(self, rig: Rig) -> None:
        stays = await self.request(rig.engine, "stays", max_tokens=100)
        leaves = await self.request(rig.engine, "leaves", max_tokens=100)
        async with self.stream(rig.engine, stays), self.stream(rig.engine, leaves) as leaving:
            await rig.steps.until(lambda report: report.running == 2)
            since = len(rig.steps.reports)
            await leaving.aclose()
            await rig.steps.until(lambda report: report.running == 1, since)
            seen = len(rig.steps.reports)
            await rig.steps.until(lambda report: True, seen)
        assert all(report.running <= 1 for report in rig.steps.reports[since + self.abort_lag :])

    async def test_abort_ends_the_stream_without_another_token(self, rig: Rig) -> None:
        request = await self.request(rig.engine, "aborted", max_tokens=100)
        async with self.stream(rig.engine, request) as events:
            await rig.engine.abort("aborted")
            async with asyncio.timeout(TIMEOUT):
                rest = [event async for event in events]
        assert not any(isinstance(event, Finished) for event in rest)
        assert all(isinstance(event, Delta) and event.tokens < 100 for event in rest)

    async def test_abort_ignores_what_it_does_not_know(self, rig: Rig) -> None:
        await rig.engine.abort("never-seen")
        request = await self.request(rig.engine, "ended", max_tokens=2)
        await self.transcript(rig.engine, request)
        await rig.engine.abort("ended")

    # --- going on -----------------------------------------------------------------------------------------------

    async def cut(self, engine: Engine, request: EngineRequest, after: int) -> list[Delta]:
        """Run a request until it has `after` tokens or more and its text is whole, then close it."""
        deltas: list[Delta] = []
        async with (
            asyncio.timeout(TIMEOUT),
            aclosing(cast("AsyncGenerator[EngineEvent, None]", engine.generate(request))) as events,
        ):
            async for event in events:
                assert isinstance(event, Delta)
                deltas.append(event)
                if event.tokens >= after and event.text:
                    break
        return deltas

    async def test_an_answer_that_was_cut_goes_on_without_a_token_repeated_or_lost(self, rig: Rig) -> None:
        assert rig.limits.resumes
        request = await self.request(rig.engine, "cut", words=20, max_tokens=24)
        whole = await self.transcript(rig.engine, request)
        for after in (1, 7, 23):
            first = await self.cut(rig.engine, request, after)
            produced = [token for delta in first for token in delta.token_ids]
            assert len(produced) == first[-1].tokens
            rest = await self.transcript(rig.engine, replace(request, produced=tuple(produced)))
            counts = [delta.tokens for delta in (*first, *rest.deltas)]
            assert counts == sorted(set(counts))
            assert "".join(delta.text for delta in first) + rest.text == whole.text
            assert rest.finished.completion_tokens == 24
            assert rest.finished.prompt_tokens == whole.finished.prompt_tokens
            assert rest.finished.reason is FinishReason.LENGTH

    async def test_an_answer_goes_on_between_any_two_whole_characters(self, rig: Rig) -> None:
        assert rig.limits.resumes
        request = await self.multibyte_request(rig.engine)
        whole = await self.transcript(rig.engine, request)
        for cut in whole.deltas[:-1]:
            first = await self.cut(rig.engine, request, cut.tokens)
            if first[-1].tokens == whole.finished.completion_tokens:
                break
            produced = tuple(token for delta in first for token in delta.token_ids)
            rest = await self.transcript(rig.engine, replace(request, produced=produced))
            assert "".join(delta.text for delta in first) + rest.text == whole.text

    # --- building and closing -----------------------------------------------------------------------------------

    async def test_an_unknown_option_is_refused_by_name(self, tmp_path: Path) -> None:
        with pytest.raises(EngineStartError, match="no_such_option"):
            create_engine(
                self.name,
                "refused",
                {**self.options, "no_such_option": 1},
                clock=RealClock(),
                on_step=StepLog(),
                data_dir=tmp_path,
            )

    async def test_the_end_of_the_engine_ends_streams_and_refuses_new_ones(self, rig: Rig) -> None:
        last = await self.request(rig.engine, "last", max_tokens=200)
        late = await self.request(rig.engine, "late")
        async with self.stream(rig.engine, last) as events:
            await rig.engine.aclose()
            await rig.engine.aclose()
            with pytest.raises(EngineDeadError):
                async with asyncio.timeout(TIMEOUT):
                    async for _ in events:
                        pass
        with pytest.raises(EngineDeadError):
            await self.transcript(rig.engine, late)
