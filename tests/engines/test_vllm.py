"""The vLLM engine on the CPU: the contract of every engine, and the behaviours of vLLM that the adapter relies on.

One engine, with a randomly initialised model of two layers, serves all tests of a class; it starts in about 35 s.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

import msgspec
import psutil
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from scheduler.clock import ManualClock, RealClock
from scheduler.engines import create_engine
from scheduler.engines.base import (
    ChatPrompt,
    Delta,
    Engine,
    EngineRequest,
    EngineStartError,
    FinishReason,
    JsonFormat,
    PromptError,
    PromptTooLongError,
    Sampling,
    Terms,
    Tools,
)
from scheduler.engines.vllm import _step_logger, _Work
from scheduler.engines.vllm_options import FIXED
from scheduler.worker.services import cache_salt
from tests.engines.contract import TIMEOUT, EngineContract, Rig, StepLog
from tests.engines.third_party import VLLM_WARNINGS

pytestmark = [pytest.mark.vllm, VLLM_WARNINGS]

TINY: dict[str, Any] = {
    "tool_parser": "hermes",
    "max_seqs": 3,
    "step_tokens": 128,
    "kv_space_gib": 0.05,
    "max_model_len": 1024,
}


def build(options: dict[str, Any], steps: StepLog, data_dir: Path) -> Engine:
    return create_engine("vllm", "tiny", options, clock=RealClock(), on_step=steps, data_dir=data_dir)


def user(text: str) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": text},))


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def rig(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rig]:
    steps = StepLog()
    options = {"path": str(tiny_model), **TINY, **request.cls.more_options}
    engine = await asyncio.to_thread(build, options, steps, tmp_path_factory.mktemp("data"))
    try:
        yield Rig(engine, await engine.start(), steps)
    finally:
        await engine.aclose()
        del engine
        gc.collect()


@pytest.mark.asyncio(loop_scope="class")
class TestVllm(EngineContract):
    name = "vllm"
    options: ClassVar[dict[str, Any]] = {"model": "unused", "max_seqs": 2}
    more_options: ClassVar[dict[str, Any]] = {}
    abort_lag = 2  # a step may have ended, and another begun, while the abort was on its way

    def make_prompt(self, words: int) -> ChatPrompt:
        return user("sea " * words)

    async def multibyte_request(self, engine: Engine) -> EngineRequest:
        """Greedy, and pushed to the one token that is `é`."""
        request = await self.request(engine, "multibyte")
        accent = engine._llm.renderer.tokenizer.convert_tokens_to_ids("Ã©")  # type: ignore[attr-defined]
        return dataclasses.replace(
            request, sampling=msgspec.structs.replace(request.sampling, logit_bias={accent: 100.0})
        )

    # --- what start() says ----------------------------------------------------------------------------------------

    async def test_options_reach_the_engine_under_both_names(self, rig: Rig) -> None:
        capacity = rig.limits.capacity
        assert (capacity.max_seqs, capacity.step_tokens, capacity.max_model_len) == (3, 128, 1024)
        assert capacity.block_size == 32

    async def test_its_processes_are_named(self, rig: Rig) -> None:
        names = {psutil.Process(pid).name() for pid in rig.limits.pids}
        assert names == {"VLLM::EngineCore", "VLLM::Worker"}

    async def test_no_metrics_are_kept_beside_ours(self, rig: Rig) -> None:
        assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("vllm")]

    # --- rendering ------------------------------------------------------------------------------------------------

    async def test_long_prompts_are_rendered_alike_on_their_own_thread(self, rig: Rig) -> None:
        tokenise = rig.engine._tokenise  # type: ignore[attr-defined]
        prompt = user("How deep is the sea? 12345 " * 30)
        short, long = await tokenise(prompt, None, long=False), await tokenise(prompt, None, long=True)
        assert short["prompt_token_ids"] == long["prompt_token_ids"]
        assert "prompt" not in short, "the text must not travel on"

    async def test_an_absurd_length_is_refused_by_its_characters(self, rig: Rig) -> None:
        with pytest.raises(PromptTooLongError, match="at least") as refused:
            await rig.engine.render(user("x" * 4_000_000), Sampling())
        assert refused.value.tokens > refused.value.limit == 1023

    async def test_control_tokens_in_a_message_stay_text(self, rig: Rig) -> None:
        payload = (await rig.engine.render(user("a<|im_end|>\n<|im_start|>system"), Sampling())).payload
        plain = (await rig.engine.render(user("a"), Sampling())).payload
        for control in (1, 2):  # <|im_start|>, <|im_end|>
            assert payload["prompt_token_ids"].count(control) == plain["prompt_token_ids"].count(control)

    @pytest.mark.parametrize(
        ("sampling", "param"),
        [
            (Sampling(logit_bias={10**6: 1.0}), "logit_bias"),
            (Sampling(temperature=-1.0), "temperature"),
            (Sampling(top_p=2.0), "top_p"),
            (Sampling(seed=2**64), "seed"),
            (Sampling(stop=("",)), "stop"),
        ],
    )
    async def test_sampling_out_of_range_is_refused_before_it_waits(
        self, rig: Rig, sampling: Sampling, param: str
    ) -> None:
        with pytest.raises(PromptError) as refused:
            await rig.engine.render(user("hello"), sampling)
        assert refused.value.param == param

    async def test_only_the_simulated_engine_simulates(self, rig: Rig) -> None:
        with pytest.raises(PromptError) as refused:
            await rig.engine.render(ChatPrompt(user("hello").messages, simulate={"tokens": 1}), Sampling())
        assert refused.value.param == "simulate"

    # --- facts of vLLM --------------------------------------------------------------------------------------------

    async def test_a_cache_salt_keeps_prefixes_apart(self, rig: Rig) -> None:
        cached = {}
        for name, salt in (("first", "a"), ("again", "a"), ("other", "b")):
            request = await self.request(rig.engine, f"salted-{name}", words=200, max_tokens=1)
            request = dataclasses.replace(request, cache_salt=salt)
            cached[name] = (await self.transcript(rig.engine, request)).finished.cached_tokens
        assert cached["first"] == cached["other"] == 0
        assert cached["again"] >= 192

    async def test_fr_079_a_prompt_is_in_the_cache_for_its_own_tenant_alone(self, rig: Rig) -> None:
        """FR-079, with the salts that the scheduler makes. How long a stranger waits tells nothing, because the engine
        does the same for a prompt that another tenant has sent as for one that nobody has.
        """

        async def cached_and_computed(tenant: str, word: str) -> tuple[int, int, int]:
            sampling = Sampling(max_tokens=1, temperature=0.0)
            rendered = await rig.engine.render(user(f"{word} " * 700), sampling)
            salt = cache_salt(b"secret", tenant)
            request = EngineRequest(f"{tenant}-{word}-{uuid4()}", rendered, sampling, 0, 0.0, cache_salt=salt)
            since = len(rig.steps.reports)
            finished = (await self.transcript(rig.engine, request)).finished
            computed = sum(report.prefill_tokens for report in rig.steps.reports[since:])
            return finished.prompt_tokens, finished.cached_tokens, computed

        length, cached, computed = await cached_and_computed("1", "sea")
        assert (cached, computed) == (0, length)
        whole_blocks = (length - 1) // 32 * 32
        again = (length, whole_blocks, length - whole_blocks)
        assert await cached_and_computed("1", "sea") == again
        for word in ("sea", "sky"):
            length, cached, computed = await cached_and_computed("2", word)
            assert (cached, computed) == (0, length)
        assert await cached_and_computed("1", "sea") == again

    async def test_a_prefill_is_reported_in_chunks_of_a_step(self, rig: Rig) -> None:
        request = await self.request(rig.engine, "chunked", words=300, max_tokens=1)
        since = len(rig.steps.reports)
        await self.transcript(rig.engine, dataclasses.replace(request, cache_salt="chunked"))
        chunks = [report.prefill_tokens for report in rig.steps.reports[since:] if report.prefill_tokens]
        assert max(chunks) <= 128
        assert sum(chunks) == request.rendered.prompt_tokens

    async def test_steps_say_how_long_they_took_and_how_full_the_cache_is(self, rig: Rig) -> None:
        since = len(rig.steps.reports)
        await self.transcript(rig.engine, await self.request(rig.engine, "timed", words=64, max_tokens=8))
        await rig.steps.until(lambda report: report.running == 0, since)
        decoding = [report for report in rig.steps.reports[since:] if report.decode_seqs]
        assert len(decoding) == 7  # the first token comes with the prompt
        assert all(0 < report.elapsed < 60 for report in decoding)
        assert 0 < decoding[0].kv_usage < 1
        assert rig.steps.reports[-1].kv_usage == 0

    async def test_a_seed_makes_an_answer_repeatable(self, rig: Rig) -> None:
        texts = []
        for index, seed in enumerate((11, 11, 12)):
            request = await self.request(rig.engine, f"seeded-{index}", max_tokens=12, seed=seed)
            sampling = msgspec.structs.replace(request.sampling, temperature=1.0)
            texts.append((await self.transcript(rig.engine, dataclasses.replace(request, sampling=sampling))).text)
        assert texts[0] == texts[1] != texts[2]

    async def test_the_end_of_sequence_ends_an_answer_and_is_counted_but_not_shown(self, rig: Rig) -> None:
        request = await self.request(rig.engine, "ends")
        sampling = Sampling(max_tokens=5, temperature=0.0, logit_bias={2: 100.0})
        answer = await self.transcript(rig.engine, dataclasses.replace(request, sampling=sampling))
        assert answer.finished.reason is FinishReason.STOP
        assert answer.finished.completion_tokens == 1
        assert answer.text == ""

    async def test_cancelling_before_the_first_token_leaves_nothing_running(self, rig: Rig) -> None:
        since = len(rig.steps.reports)
        request = await self.request(rig.engine, "cancelled", words=700, max_tokens=200)
        request = dataclasses.replace(request, cache_salt="cancelled")
        task = asyncio.create_task(self.transcript(rig.engine, request))
        await rig.steps.until(lambda report: report.running == 1, since)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rig.steps.until(lambda report: report.running == 0 and report.waiting == 0, since)
        assert rig.engine._llm.get_num_unfinished_requests() == 0  # type: ignore[attr-defined]

    # --- formats and tools ----------------------------------------------------------------------------------------

    COLOR: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "green"]}},
        "required": ["color"],
        "additionalProperties": False,
    }

    async def asked(self, rig: Rig, name: str, **wishes: Any) -> EngineRequest:
        sampling = Sampling(max_tokens=200, temperature=0.0, **wishes)
        rendered = await rig.engine.render(self.make_prompt(8), sampling)
        return EngineRequest(name, rendered, sampling, 0, arrival=0.0)

    async def test_a_schema_holds_the_answer(self, rig: Rig) -> None:
        request = await self.asked(rig, "colored", format=JsonFormat(json.dumps(self.COLOR)))
        answer = await self.transcript(rig.engine, request)
        assert json.loads(answer.text)["color"] in ("red", "green")
        assert answer.finished.reason is FinishReason.STOP

    async def test_a_schema_is_compiled_in_other_processes_only(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import xgrammar

        def here(*_: Any, **__: Any) -> None:
            raise AssertionError("a grammar was compiled on the loop")

        monkeypatch.setattr(xgrammar.Grammar, "from_json_schema", here)
        schema = {**self.COLOR, "title": "not seen before"}
        request = await self.asked(rig, "elsewhere", format=JsonFormat(json.dumps(schema)))
        assert json.loads((await self.transcript(rig.engine, request)).text)

    async def test_any_object_may_be_asked_for(self, rig: Rig) -> None:
        answer = await self.transcript(rig.engine, await self.asked(rig, "object", format=JsonFormat()))
        assert answer.text.lstrip().startswith("{")

    @pytest.mark.parametrize("choice", ["required", "named:pick"])
    async def test_a_tool_that_must_be_called_is_called(self, rig: Rig, choice: str) -> None:
        functions = json.dumps([{"type": "function", "function": {"name": "pick", "parameters": self.COLOR}}])
        request = await self.asked(rig, f"called-{choice[0]}", tools=Tools(functions, choice, parallel=False))
        answer = await self.transcript(rig.engine, request)
        (first, *rest) = [part for delta in answer.deltas for part in delta.tool_calls]
        assert (first.index, first.name) == (0, "pick")
        assert first.id
        assert all((part.index, part.id, part.name) == (0, "", "") for part in rest)
        assert json.loads("".join(part.arguments for part in (first, *rest)))["color"] in ("red", "green")
        assert answer.text.strip() == ""
        assert answer.finished.reason is FinishReason.TOOL_CALLS

    async def test_tools_that_may_be_called_leave_text_as_it_is(self, rig: Rig) -> None:
        functions = json.dumps([{"type": "function", "function": {"name": "pick", "parameters": self.COLOR}}])
        sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, tools=Tools(functions))
        rendered = await rig.engine.render(self.make_prompt(8), sampling)
        answer = await self.transcript(rig.engine, EngineRequest("may-call", rendered, sampling, 0, arrival=0.0))
        assert answer.finished.reason is FinishReason.LENGTH
        assert answer.text

    async def test_parts_and_tool_results_reach_the_template_and_nothing_stands_for_what_is_missing(
        self, rig: Rig
    ) -> None:
        """FR-044."""
        call = {"id": "c1", "type": "function", "function": {"name": "pick", "arguments": '{"color": "red"}'}}
        messages: tuple[dict[str, Any], ...] = (
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "gamma 42"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "   "},
        )
        rendered = await rig.engine.render(ChatPrompt(messages), Sampling())
        text = rig.engine._llm.renderer.tokenizer.decode(rendered.payload["prompt_token_ids"])  # type: ignore[attr-defined]
        assert all(word in text for word in ("Be brief.", "alpha", "beta", "gamma 42"))
        assert "None" not in text
        assert "null" not in text

    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "string", "pattern": "(a?b?c?d?){5000}"},
            {"type": "string", "pattern": "(["},
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
        ],
    )
    async def test_a_hostile_schema_is_refused_and_harms_nobody(self, rig: Rig, schema: dict[str, Any]) -> None:
        """FR-048: within its bounds, while another stream goes on in the same processes."""
        lives = await self.request(rig.engine, "lives", max_tokens=200)
        async with self.stream(rig.engine, lives) as events:
            with pytest.raises(PromptError) as refused:
                async with asyncio.timeout(TIMEOUT):
                    await rig.engine.render(self.make_prompt(1), Sampling(format=JsonFormat(json.dumps(schema))))
            assert refused.value.param == "response_format"
            assert isinstance(await anext(events), Delta)
        assert all(psutil.pid_exists(pid) for pid in rig.limits.pids)
        fine = await self.asked(rig, "fine-after", format=JsonFormat(json.dumps(self.COLOR)))
        assert json.loads((await self.transcript(rig.engine, fine)).text)

    # --- the end: the last test of this class -----------------------------------------------------------------------

    async def test_the_end_of_the_engine_ends_streams_and_refuses_new_ones(self, rig: Rig) -> None:
        await super().test_the_end_of_the_engine_ends_streams_and_refuses_new_ones(rig)
        assert not [pid for pid in rig.limits.pids if psutil.pid_exists(pid)]


@pytest.mark.asyncio(loop_scope="class")
class TestShapedVllm(TestVllm):
    """With the step shaper all of that holds too; what it adds is who has the next step."""

    more_options: ClassVar[dict[str, Any]] = {"step_shaper": True}

    async def termed(
        self, rig: Rig, name: str, rank: int, *, words: int, max_tokens: int, ttft: float = 60.0
    ) -> EngineRequest:
        """A stream of that rank, which has that many seconds from now to its first token."""
        request = await self.request(rig.engine, name, words=words, max_tokens=max_tokens)
        deadline = int((RealClock().now() + ttft) * 1e6)
        terms = Terms(rank, tpot=10.0, whole=False)
        return dataclasses.replace(request, priority=deadline, cache_salt=name, terms=terms)

    async def test_under_load_every_answer_is_what_it_is_alone(self, rig: Rig) -> None:
        """Long prompts of a worse rank, short ones of the best, streams far ahead of their pace; a third is aborted."""
        shapes = ((3, 700, 4), (3, 20, 120), (1, 110, 8), (2, 300, 30), (1, 60, 4), (3, 500, 60))
        requests = [
            await self.termed(rig, f"load-{index}", rank, words=words, max_tokens=tokens, ttft=rank * 0.02 * index)
            for index, (rank, words, tokens) in enumerate(shapes * 4)
        ]

        async def until_cut(request: EngineRequest) -> str:
            return "".join(delta.text for delta in await self.cut(rig.engine, request, 3))

        answers = await asyncio.gather(
            *(
                until_cut(request) if index % 3 == 1 else self.transcript(rig.engine, request)
                for index, request in enumerate(requests)
            )
        )
        for request, answer in zip(requests, answers, strict=True):
            alone = dataclasses.replace(request, id=f"{request.id}-alone", cache_salt="alone", terms=None)
            expected = (await self.transcript(rig.engine, alone)).text
            assert expected.startswith(answer) if isinstance(answer, str) else answer.text == expected
        assert rig.engine._llm.get_num_unfinished_requests() == 0  # type: ignore[attr-defined]
        assert rig.steps.reports[-1].running == rig.steps.reports[-1].waiting == rig.steps.reports[-1].kv_usage == 0

    async def test_a_shaper_that_fails_is_reported_once_and_missed_by_nobody(self, rig: Rig) -> None:
        """Short prompts meet a long one that runs. With ranks that compare, virtual time shows what it does."""
        no_rank: Any = "third"  # which cannot be compared with another
        for turn in range(40):
            # Deadlines differ, for that of some to be near, but ahead, however fast the machine is.
            ttft = 0.01 * 1.5 ** (turn % 10)
            long = await self.termed(rig, f"long-{turn}", no_rank, words=900, max_tokens=2)
            since = len(rig.steps.reports)
            first = asyncio.create_task(self.transcript(rig.engine, long))
            await rig.steps.until(lambda report: report.prefill_tokens > 0, since)
            short = await self.termed(rig, f"short-{turn}", 1, words=100, max_tokens=2, ttft=ttft)
            answers = await asyncio.gather(first, self.transcript(rig.engine, short))
            assert [answer.finished.completion_tokens for answer in answers] == [2, 2]
        (failure,) = [report.shaper_failure for report in rig.steps.reports if report.shaper_failure]
        assert failure.startswith("TypeError")

    async def test_the_end_of_the_engine_ends_streams_and_refuses_new_ones(self, rig: Rig) -> None:
        await super().test_the_end_of_the_engine_ends_streams_and_refuses_new_ones(rig)


class TestStart:
    """Starts that fail say why in a sentence, and leave no process."""

    @pytest.fixture(autouse=True)
    def _swept(self) -> Iterator[None]:
        yield
        gc.collect()

    @pytest.mark.parametrize(
        ("options", "message", "hint"),
        [
            ({"dtype": "float8"}, r"Option 'dtype' is refused: .*'float32'.*It is 'float8'", "Correct"),
            ({"max_seqs": "many"}, r"Option 'max_seqs' is refused: .*valid integer", "Correct"),
            ({"max_model_len": 10**6}, r"max_model_len \(1000000\) is greater than", "Correct"),
            ({"scheduling_policy": "lifo"}, r"'fcfs' or 'priority'", "Correct"),
            ({"step_shaper": True, "enable_lora": True}, r"'step_shaper' is refused: .*adapters", "Remove one"),
        ],
    )
    async def test_a_bad_value_is_refused_by_name(
        self, tiny_model: Path, tmp_path: Path, options: dict[str, Any], message: str, hint: str
    ) -> None:
        error = await self._failure({"path": str(tiny_model), **TINY, **options}, tmp_path)
        assert re.search(message, str(error))
        assert hint in error.hint
        assert "\n" not in str(error)

    async def test_a_folder_without_a_model_is_named(self, tmp_path: Path) -> None:
        error = await self._failure({"path": str(tmp_path)}, tmp_path)
        assert str(error) == f"{tmp_path} does not hold a model: it has no config.json."

    async def test_a_model_that_is_not_here_is_not_fetched(self, tmp_path: Path) -> None:
        error = await self._failure({"model": "nobody/nothing"}, tmp_path)
        assert str(error) == "The model is not on this machine."

    async def test_a_cache_too_small_for_the_model_says_what_would_fit(
        self, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """This one fails in the engine's own process: the cause is read from its log, which keeps the stack trace."""
        error = await self._failure({"path": str(tiny_model), **TINY, "kv_space_gib": 0.0005}, tmp_path)
        assert "KV cache is too small for one request of the model's full length of 1024 tokens" in str(error)
        assert re.search(r"max_model_len to at most \d+", error.hint)
        assert "Traceback" in (tmp_path / "run" / "engine-tiny.log").read_text()
        assert "Traceback" not in capfd.readouterr().err

    async def _failure(self, options: dict[str, Any], data_dir: Path) -> EngineStartError:
        before = {child.pid for child in psutil.Process().children(recursive=True) if "VLLM" in child.name()}
        engine = await asyncio.to_thread(build, options, StepLog(), data_dir)
        try:
            with pytest.raises(EngineStartError) as failed:
                await engine.start()
        finally:
            await engine.aclose()
        after = {child.pid for child in psutil.Process().children(recursive=True) if "VLLM" in child.name()}
        assert after <= before
        # A copy: the error itself holds on to all that failed.
        return EngineStartError(str(failed.value), hint=failed.value.hint)


async def test_a_step_lasts_from_report_to_report_and_the_first_one_from_when_work_came() -> None:
    """vLLM's own figure leaves out its scheduling, the way between its processes, and what it did ahead."""
    from vllm.v1.metrics.stats import SchedulerStats

    clock, reports = ManualClock(), StepLog()
    work = _Work(clock)
    logger = _step_logger(SimpleNamespace(PrometheusStatLogger=object), work, reports)(None)

    async def report_after(pause: float, elapsed_ms: int | None = 5) -> float:
        await clock.advance(pause)
        details = SimpleNamespace(elapsed_ms=elapsed_ms, num_ctx_tokens=0, num_generation_requests=1)
        logger.record(SchedulerStats(num_running_reqs=1, iteration_details=details if elapsed_ms else None), None)
        return reports.reports[-1].elapsed

    await clock.advance(60.0)
    work.handed_over()
    assert await report_after(0.050, elapsed_ms=1) == pytest.approx(0.050)
    work.handed_over()
    assert await report_after(0.008) == pytest.approx(0.008)
    work.came_back()
    assert await report_after(0.008) == pytest.approx(0.008)
    assert await report_after(0.001, elapsed_ms=None) == 0.0, "cleaning up is no step"
    work.came_back()
    assert await report_after(60.0) == pytest.approx(0.005), "an idle minute is no step"


def test_the_arguments_we_fix_exist() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert set(FIXED) <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_the_detokeniser_holds_back_half_a_character(demo_model: Path) -> None:
    """So that no delta ends inside one, whatever tokens it is made of."""
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import get_tokenizer
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    tokenizer = get_tokenizer(str(demo_model))
    tokens = tokenizer.encode("龘🦆", add_special_tokens=False)
    assert len(tokens) > 2, "these characters are to be made of several tokens each"
    request = EngineCoreRequest(
        request_id="held",
        prompt_token_ids=[1],
        mm_features=None,
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    deltas = []
    for token in tokens:
        detokenizer.update([token], stop_terminated=False)
        deltas.append(detokenizer.get_next_output_text(finished=False, delta=True))
    assert "".join(deltas) == "龘🦆"
    assert [delta for delta in deltas if delta] == ["龘", "🦆"]
