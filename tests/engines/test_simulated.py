"""The simulated engine: the contract, its timing, its faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from scheduler.clock import ManualClock, RealClock
from scheduler.engines import create_engine
from scheduler.engines.base import (
    ChatPrompt,
    Delta,
    Engine,
    EngineDeadError,
    EngineEvent,
    EngineRequest,
    EngineStartError,
    Finished,
    FinishReason,
    JsonFormat,
    PromptError,
    RequestFailedError,
    Sampling,
    StepListener,
    Tools,
)
from scheduler.engines.simulated import read_record
from tests.engines.contract import EngineContract, Rig, StepLog

STEP = 0.25  # exact in binary, so that sums of steps compare exactly


def words(count: int) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": " ".join(["word"] * count)},))


class Bench:
    """A simulated engine under a manual clock, or the real one."""

    def __init__(
        self,
        data_dir: Path,
        options: dict[str, Any],
        clock: ManualClock | RealClock | None = None,
        on_step: StepListener | None = None,
    ) -> None:
        self.clock = clock or ManualClock()
        self.steps = StepLog()
        self.data_dir = data_dir
        self._listeners: list[Listener] = []
        self.engine = create_engine(
            "simulated", "sim", options, clock=self.clock, on_step=on_step or self.steps, data_dir=data_dir
        )

    async def request(
        self, request_id: str, *, prompt: int = 4, max_tokens: int = 8, simulate: dict[str, Any] | None = None
    ) -> EngineRequest:
        sampling = Sampling(max_tokens=max_tokens)
        rendered = await self.engine.render(words(prompt), sampling)
        return EngineRequest(request_id, rendered, sampling, priority=0, arrival=0.0, simulate=simulate)

    async def open(self, request_id: str, **more: Any) -> Listener:
        """A request whose events are collected as they come."""
        listener = Listener(self.engine, await self.request(request_id, **more))
        self._listeners.append(listener)
        await asyncio.sleep(0)
        return listener

    async def aclose(self) -> None:
        await self.engine.aclose()
        await asyncio.gather(*(listener.task for listener in self._listeners), return_exceptions=True)

    async def pass_time(self, seconds: float) -> None:
        assert isinstance(self.clock, ManualClock)
        await self.clock.advance(seconds)

    def record(self, request_id: str) -> dict[str, Any]:
        record = read_record(self.data_dir, request_id)
        assert record is not None
        return record


class Listener:
    """Collects the events of one request; `task` ends with it and raises its error."""

    def __init__(self, engine: Engine, request: EngineRequest) -> None:
        self.events: list[EngineEvent] = []
        self.task = asyncio.create_task(self._listen(engine, request))

    async def _listen(self, engine: Engine, request: EngineRequest) -> None:
        async for event in engine.generate(request):
            self.events.append(event)

    @property
    def tokens(self) -> int:
        return max((event.tokens for event in self.events if isinstance(event, Delta)), default=0)

    @property
    def texts(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Delta)]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished)
        return self.events[-1]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """An engine with steps of STEP seconds, whatever they do."""
    bench = Bench(tmp_path, {"step": {"base": STEP}, "max_seqs": 4, "step_tokens": 16, "kv_tokens": 4096})
    await bench.engine.start()
    yield bench
    await bench.aclose()


@pytest.fixture
async def free_bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """An engine whose steps take no time."""
    bench = Bench(tmp_path, {"step": {}, "max_seqs": 4, "kv_tokens": 4096})
    await bench.engine.start()
    yield bench
    await bench.aclose()


class TestContract(EngineContract):
    name = "simulated"
    options = {
        "step": {"base": 0.01, "prefill_token": 0.001, "decode_seq": 0.001},
        "max_seqs": 3,
        "step_tokens": 64,
        "max_model_len": 512,
    }
    abort_lag = 0  # the step that runs at the abort is the last that counts it, and reports after freeing it

    @pytest.fixture
    async def rig(self, tmp_path: Path) -> AsyncIterator[Rig]:
        clock, steps = ManualClock(), StepLog()
        engine = create_engine("simulated", "sim", self.options, clock=clock, on_step=steps, data_dir=tmp_path)

        async def pass_time() -> None:
            while True:
                await clock.advance(0.01)

        ticking = asyncio.create_task(pass_time())
        yield Rig(engine, await engine.start(), steps)
        await engine.aclose()
        ticking.cancel()

    def make_prompt(self, words_: int) -> ChatPrompt:
        return words(words_)

    async def multibyte_request(self, engine: Engine) -> EngineRequest:
        request = await self.request(engine, "multibyte")
        return EngineRequest(
            request.id, request.rendered, request.sampling, 0, 0.0, simulate={"text": ["漢", "字 é", "🙂"]}
        )


# --- text -------------------------------------------------------------------------------------------------------


async def test_answers_numbered_words_until_max_tokens(bench: Bench) -> None:
    heard = await bench.open("words", max_tokens=3)
    await bench.pass_time(3 * STEP)
    assert heard.texts == ["w0", " w1", " w2"]
    assert heard.finished == Finished(FinishReason.LENGTH, prompt_tokens=4, completion_tokens=3)


async def test_simulated_text_comes_delta_by_delta(bench: Bench) -> None:
    heard = await bench.open("text", simulate={"text": ["ab", "漢", ""]})
    await bench.pass_time(3 * STEP)
    assert heard.texts == ["ab", "漢", ""]
    assert heard.finished.reason is FinishReason.STOP
    assert heard.finished.completion_tokens == 3


async def test_a_prompt_is_its_words_across_messages_and_parts(bench: Bench) -> None:
    prompt = ChatPrompt(
        (
            {"role": "system", "content": " be  brief\n"},
            {"role": "user", "content": [{"type": "text", "text": "你好 world"}, {"type": "text", "text": "again"}]},
            {"role": "assistant", "content": None},
        )
    )
    assert (await bench.engine.render(prompt, Sampling())).prompt_tokens == 5


async def test_the_same_word_is_the_same_token_and_ids_stay_in_the_vocabulary(bench: Bench) -> None:
    rendered = await bench.engine.render(ChatPrompt(({"content": "yes no yes"},)), Sampling())
    first, second, third = rendered.payload
    assert first == third != second
    assert all(0 <= token < 32_000 for token in rendered.payload)


async def test_a_prompt_that_waits_takes_four_bytes_a_token(bench: Bench) -> None:
    rendered = await bench.engine.render(ChatPrompt(({"content": " ".join(map(str, range(3000)))},)), Sampling())
    assert rendered.prompt_tokens == len(rendered.payload) == 3000
    assert rendered.payload.itemsize == 4


async def test_a_large_prompt_is_counted_off_the_loop(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"max_model_len": 100_000})
    assert (await bench.engine.render(words(60_000), Sampling())).prompt_tokens == 60_000


async def test_content_that_is_not_text_is_refused_by_its_place(bench: Bench) -> None:
    image = ChatPrompt(({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},))
    with pytest.raises(PromptError) as refused:
        await bench.engine.render(image, Sampling())
    assert refused.value.param == "messages[0].content"


async def test_a_bias_outside_the_vocabulary_is_refused(bench: Bench) -> None:
    with pytest.raises(PromptError) as refused:
        await bench.engine.render(words(1), Sampling(logit_bias={32_000: 1.0}))
    assert refused.value.param == "logit_bias"


async def test_an_empty_prompt_has_no_tokens_and_is_answered(bench: Bench) -> None:
    heard = await bench.open("empty", prompt=0, max_tokens=1)
    await bench.pass_time(STEP)
    assert heard.finished.prompt_tokens == 0


# --- time -------------------------------------------------------------------------------------------------------


async def test_a_step_takes_its_cost(tmp_path: Path) -> None:
    cost = {"base": 1.0, "prefill_token": 0.25, "decode_seq": 0.125, "kv_token": 0.0625}
    bench = Bench(tmp_path, {"step": cost, "step_tokens": 3, "max_seqs": 2})
    await bench.engine.start()
    await bench.open("timed", prompt=4, max_tokens=3)
    await bench.pass_time(10.0)
    elapsed = [report.elapsed for report in bench.steps.reports]
    decode = 1.0 + 0.125
    assert elapsed == pytest.approx([1.0 + 3 * 0.25, 1.0 + 1 * 0.25, decode + 5 * 0.0625, decode + 6 * 0.0625])
    assert [report.prefill_tokens for report in bench.steps.reports] == [3, 1, 0, 0]
    assert [report.decode_seqs for report in bench.steps.reports] == [0, 0, 1, 1]
    await bench.aclose()


async def test_steps_without_cost_answer_without_time_passing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"step": {}})
    await bench.engine.start()
    heard = await bench.open("at once", max_tokens=100)
    async with asyncio.timeout(10):
        await heard.task
    assert heard.finished.completion_tokens == 100
    assert bench.clock.now() == 0.0
    await bench.aclose()


async def test_the_real_clock_is_slept_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"step": {"base": 0.002}}, RealClock())
    await bench.engine.start()
    before = bench.clock.now()
    async with asyncio.timeout(10):
        await (await bench.open("slept", max_tokens=5)).task
    # The last sleep may be short by what the sleeps before it were late.
    assert bench.clock.now() - before >= 5 * 0.002 - 0.001
    await bench.aclose()


async def test_pace_is_added_to_each_token_and_slows_nobody_else(bench: Bench) -> None:
    paced = await bench.open("paced", simulate={"pace": 4 * STEP})
    plain = await bench.open("plain", max_tokens=4)
    await bench.pass_time(4 * STEP)
    assert plain.finished.completion_tokens == 4
    assert paced.tokens == 0
    for tokens in (1, 2, 3):
        await bench.pass_time(5 * STEP if tokens > 1 else STEP)
        assert paced.tokens == tokens


async def test_start_takes_as_long_as_the_deployment_says(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"start_seconds": 5.0})
    starting = asyncio.create_task(bench.engine.start())
    await bench.pass_time(4.0)
    assert not starting.done()
    await bench.pass_time(1.0)
    assert (await starting).capacity.max_seqs == 256
    await bench.aclose()


# --- faults -----------------------------------------------------------------------------------------------------


async def test_fail_at_fails_the_request_after_its_tokens_and_no_other(bench: Bench) -> None:
    failing = await bench.open("failing", simulate={"fail_at": 2})
    other = await bench.open("other")
    await bench.pass_time(20 * STEP)
    with pytest.raises(RequestFailedError):
        await failing.task
    assert failing.tokens == 2
    assert other.finished.completion_tokens == 8


async def test_fail_at_zero_fails_before_the_first_token(bench: Bench) -> None:
    failing = await bench.open("failing", simulate={"fail_at": 0})
    await bench.pass_time(STEP)
    with pytest.raises(RequestFailedError):
        await failing.task
    assert failing.events == []


async def test_a_fault_after_the_last_token_comes_in_place_of_the_end(bench: Bench) -> None:
    failing = await bench.open("failing", simulate={"tokens": 2, "fail_at": 2})
    await bench.pass_time(5 * STEP)
    with pytest.raises(RequestFailedError):
        await failing.task
    assert failing.tokens == 2


async def test_hang_at_holds_its_slot_until_it_is_aborted(bench: Bench) -> None:
    hanging = await bench.open("hanging", simulate={"hang_at": 1})
    await bench.pass_time(100 * STEP)
    assert hanging.tokens == 1
    assert not hanging.task.done()
    assert bench.steps.reports[-1].running == 1
    await bench.engine.abort("hanging")
    await hanging.task
    assert bench.record("hanging")["outcome"] == "aborted"


async def test_crash_at_ends_every_stream_and_every_later_call(bench: Bench) -> None:
    crashing = await bench.open("crashing", simulate={"crash_at": 1})
    other = await bench.open("other")
    await bench.pass_time(STEP)
    for listener in (crashing, other):
        with pytest.raises(EngineDeadError):
            await listener.task
        assert listener.tokens == 1
    with pytest.raises(EngineDeadError):
        await (await bench.open("late")).task
    assert bench.record("other")["outcome"] == "engine_dead"


async def test_what_would_have_ended_in_the_step_of_the_crash_dies_with_it(bench: Bench) -> None:
    await bench.open("crashing", simulate={"crash_at": 1})
    other = await bench.open("other", max_tokens=1)
    await bench.pass_time(STEP)
    with pytest.raises(EngineDeadError):
        await other.task
    assert other.tokens == 1


async def test_oom_at_names_memory_as_the_cause(bench: Bench) -> None:
    listener = await bench.open("greedy", simulate={"oom_at": 1})
    await bench.pass_time(STEP)
    with pytest.raises(EngineDeadError, match="out of memory") as died:
        await listener.task
    assert isinstance(died.value.__cause__, MemoryError)


async def test_a_listener_that_raises_kills_the_engine_and_nothing_hangs(tmp_path: Path) -> None:
    def on_step(report: object) -> None:
        raise LookupError("broken listener")

    bench = Bench(tmp_path, {"step": {}})
    engine = create_engine("simulated", "sim", {"step": {}}, clock=bench.clock, on_step=on_step, data_dir=tmp_path)
    await engine.start()
    listener = Listener(engine, await bench.request("unlucky"))
    async with asyncio.timeout(10):
        with pytest.raises(EngineDeadError, match="broken listener"):
            await listener.task
    await engine.aclose()


async def test_usage_is_misreported_as_asked(bench: Bench) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 999, "cached_tokens": 7}
    heard = await bench.open("lying", max_tokens=2, simulate={"usage": usage})
    await bench.pass_time(2 * STEP)
    assert heard.tokens == 2
    assert heard.finished == Finished(FinishReason.LENGTH, 1, 999, 7)


@pytest.mark.parametrize(
    ("simulate", "named"),
    [
        ({"nope": 1}, "nope"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": "3"}, "tokens"),
        ({"text": []}, "text"),
        ({"pace": -1}, "pace"),
        ({"fail_at": -1}, "fail_at"),
        ({"usage": {"total": 1}}, "total"),
    ],
)
async def test_a_bad_simulate_field_is_refused_by_name(bench: Bench, simulate: dict[str, Any], named: str) -> None:
    prompt = ChatPrompt(words(1).messages, simulate=simulate)
    with pytest.raises(PromptError, match=named) as refused:
        await bench.engine.render(prompt, Sampling())
    assert refused.value.param == "simulate"
    with pytest.raises(PromptError, match=named):
        await (await bench.open("bad", simulate=simulate)).task


# --- requests that cannot be ------------------------------------------------------------------------------------


async def test_max_tokens_over_the_room_is_refused(bench: Bench) -> None:
    with pytest.raises(PromptError) as refused:
        await (await bench.open("long", max_tokens=4096)).task
    assert refused.value.param == "max_tokens"


async def test_an_id_in_use_is_refused(bench: Bench) -> None:
    await bench.open("twice")
    with pytest.raises(RequestFailedError):
        await (await bench.open("twice")).task


async def test_an_engine_that_was_not_started_answers_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {})
    with pytest.raises(EngineDeadError):
        await (await bench.open("early")).task


async def test_an_engine_starts_once(bench: Bench) -> None:
    with pytest.raises(EngineStartError):
        await bench.engine.start()


async def test_a_folder_that_cannot_be_written_is_a_start_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "simulated").write_text("a file where the folder should be")
    with pytest.raises(EngineStartError) as refused:
        await Bench(tmp_path, {}).engine.start()
    assert refused.value.hint


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"step": {"bass": 1}}, "bass"),
        ({"max_seqs": 0}, "max_seqs"),
        ({"kv_tokens": "many"}, "kv_tokens"),
        ({"kv_tokens": 8}, "kv_tokens"),
    ],
)
def test_a_bad_option_is_refused_by_name(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(EngineStartError, match=named):
        Bench(tmp_path, options)


def test_an_unknown_engine_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError) as refused:
        create_engine("steam", "m", {}, clock=ManualClock(), on_step=lambda report: None, data_dir=tmp_path)
    assert "simulated" in refused.value.hint


# --- aborts and the record --------------------------------------------------------------------------------------


async def test_an_abort_frees_within_the_running_step_and_its_token_is_not_delivered(bench: Bench) -> None:
    aborted = await bench.open("aborted")
    await bench.pass_time(2.5 * STEP)
    await bench.engine.abort("aborted")
    assert not aborted.task.done()
    await bench.pass_time(STEP)
    await aborted.task
    assert aborted.tokens == 2
    record = bench.record("aborted")
    assert record["tokens"] == 2
    assert record["ended_step"] - record["aborted_step"] == 1
    assert bench.steps.reports[-1].running == 0
    assert bench.steps.reports[-1].kv_usage == 0.0


async def test_a_cancelled_listener_is_an_abort(bench: Bench) -> None:
    listener = await bench.open("left")
    await bench.pass_time(STEP)
    listener.task.cancel()
    await bench.pass_time(STEP)
    assert bench.record("left")["outcome"] == "aborted"


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_a_token_made_before_its_listener_is_cancelled_is_delivered(tmp_path: Path, max_tokens: int) -> None:
    def leave(report: object) -> None:
        listener.task.cancel()  # in the same turn of the loop as the token: the listener has not run in between

    bench = Bench(tmp_path, {"step": {"base": STEP}}, on_step=leave)
    await bench.engine.start()
    listener = await bench.open("left", max_tokens=max_tokens)
    await bench.pass_time(2 * STEP)
    await bench.aclose()
    assert listener.tokens == bench.record("left")["tokens"] == 1


async def test_a_waiting_request_leaves_at_once(bench: Bench) -> None:
    for index in range(4):
        await bench.open(f"seated-{index}", max_tokens=100)
    waiting = await bench.open("waiting")
    await bench.pass_time(2 * STEP)
    await bench.engine.abort("waiting")
    await waiting.task
    record = bench.record("waiting")
    assert record["started"] is None
    assert record["ended"] is not None


async def test_the_record_tells_the_life_of_a_request(bench: Bench) -> None:
    heard = await bench.open("told", max_tokens=2)
    await bench.pass_time(10 * STEP)
    record = bench.record("told")
    assert heard.finished.completion_tokens == record["tokens"] == 2
    assert record["model"] == "sim"
    assert record["outcome"] == "length"
    assert record["aborted"] is None
    assert record["ended"] - record["received"] == pytest.approx(2 * STEP)
    assert (record["received_step"], record["started_step"], record["ended_step"]) == (0, 1, 2)


async def test_a_paced_request_that_leaves_before_its_first_step_harms_nobody(bench: Bench) -> None:
    paced = await bench.open("paced", simulate={"pace": 100.0})
    await bench.pass_time(STEP)
    await bench.engine.abort("paced")
    await paced.task
    other = await bench.open("other", max_tokens=1)
    await bench.pass_time(STEP)
    assert other.finished.completion_tokens == 1


# --- several answers, formats and tools -----------------------------------------------------------------------------

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
TOOLS = json.dumps([{"type": "function", "function": {"name": "now"}}, ADD])


async def events_of(bench: Bench, sampling: Sampling, simulate: dict[str, Any] | None = None) -> list[EngineEvent]:
    prompt = ChatPrompt(words(4).messages, simulate)
    rendered = await bench.engine.render(prompt, sampling)
    request = EngineRequest("asked", rendered, sampling, priority=0, arrival=0.0, simulate=simulate)
    return [event async for event in bench.engine.generate(request)]


def calls_of(events: list[EngineEvent]) -> list[tuple[str, Any]]:
    """Name and arguments of each call, put together from its parts."""
    calls: dict[int, list[str]] = {}
    for event in events:
        for part in event.tool_calls if isinstance(event, Delta) else ():
            if part.id:
                calls[part.index] = [part.name, ""]
            calls[part.index][1] += part.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize(
    ("choice", "expected"), [("required", ("now", {})), ("named:add", ("add", {"x": 0})), ("auto", None)]
)
async def test_a_tool_that_must_be_called_is_called(free_bench: Bench, choice: str, expected: Any) -> None:
    events = await events_of(free_bench, Sampling(max_tokens=50, tools=Tools(TOOLS, choice)))
    assert calls_of(events) == ([] if expected is None else [expected])
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is (FinishReason.LENGTH if expected is None else FinishReason.TOOL_CALLS)


async def test_simulate_says_which_calls_and_how_they_are_cut(free_bench: Bench) -> None:
    """FR-036: two calls, one of them cut inside a character's escape."""
    calls = [{"name": "add", "arguments": ['{"x"', ": 1}"]}, {"name": "now", "arguments": ['{"y": "\\u', '00fc"}']}]
    sampling = Sampling(max_tokens=50, tools=Tools(TOOLS))
    events = await events_of(free_bench, sampling, {"text": ["Let me see."], "tool_calls": calls})
    assert calls_of(events) == [("add", {"x": 1}), ("now", {"y": "ü"})]
    assert "".join(event.text for event in events) == "Let me see."
    ids = [part.id for event in events if isinstance(event, Delta) for part in event.tool_calls if part.id]
    assert len(set(ids)) == 2
    single = Sampling(max_tokens=50, tools=Tools(TOOLS, parallel=False))
    assert len(calls_of(await events_of(free_bench, single, {"tool_calls": calls}))) == 1


async def test_a_format_is_answered_with_a_document_of_it(free_bench: Bench) -> None:
    schema = json.dumps(ADD["function"]["parameters"])  # type: ignore[index]
    for wanted, document in ((JsonFormat(), {}), (JsonFormat(schema), {"x": 0})):
        events = await events_of(free_bench, Sampling(max_tokens=50, format=wanted))
        assert json.loads("".join(event.text for event in events)) == document
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.STOP


async def test_a_schema_without_a_document_is_refused_before_it_waits(free_bench: Bench) -> None:
    with pytest.raises(PromptError, match="without an end") as refused:
        await free_bench.engine.render(words(1), Sampling(format=JsonFormat('{"$ref": "#"}')))
    assert refused.value.param == "response_format"
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}])
    with pytest.raises(PromptError) as refused:
        await free_bench.engine.render(words(1), Sampling(tools=Tools(tools, "required")))
    assert refused.value.param == "tools"


async def test_a_request_of_several_answers_is_one_in_the_record(free_bench: Bench) -> None:
    await events_of(free_bench, Sampling(max_tokens=5, n=3))
    await asyncio.sleep(0)  # the record is written when the step has been told
    record = free_bench.record("asked")
    assert (record["tokens"], record["outcome"]) == (15, "length")


async def test_one_answer_that_fails_takes_the_others_along(free_bench: Bench) -> None:
    with pytest.raises(RequestFailedError, match="after 2 tokens"):
        await events_of(free_bench, Sampling(max_tokens=5, n=3), {"fail_at": 2})
    await asyncio.sleep(0)
    assert free_bench.record("asked")["outcome"] == "fail"
    assert len(await events_of(free_bench, Sampling(max_tokens=1))) == 2
