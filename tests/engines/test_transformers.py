"""The transformers engine: the contract of every engine, and its batches, which are really padded.

One engine, with a randomly initialised model of two layers, serves the whole file; importing torch takes 10 s.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import pytest_asyncio

from scheduler.clock import RealClock
from scheduler.core.types import StepReport
from scheduler.engines import create_engine
from scheduler.engines.base import (
    ChatPrompt,
    Engine,
    EngineDeadError,
    EngineRequest,
    EngineStartError,
    FinishReason,
    PromptError,
    PromptTooLongError,
    RequestFailedError,
    Sampling,
)
from tests.engines.contract import EngineContract, Rig, StepLog
from tests.engines.tiny_model import make_tiny_model

pytestmark = pytest.mark.model

SMALL: dict[str, Any] = {"max_seqs": 3, "max_model_len": 1024}


@pytest.fixture(scope="session")
def model_folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), demo_model)


def build(folder: Path, steps: StepLog, **options: Any) -> Engine:
    return create_engine(
        "transformers",
        "tiny",
        {"path": str(folder), **SMALL, **options},
        clock=RealClock(),
        on_step=steps,
        data_dir=folder,
    )


def user(text: str) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": text},))


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def rig(model_folder: Path) -> AsyncIterator[Rig]:
    steps = StepLog()
    engine = build(model_folder, steps)
    try:
        yield Rig(engine, await engine.start(), steps)
    finally:
        await engine.aclose()


@pytest.mark.asyncio(loop_scope="class")
class TestTransformers(EngineContract):
    name = "transformers"
    options: ClassVar[dict[str, Any]] = {"path": "."}
    # It says that it does not resume (`EngineLimits.resumes`), so that nobody asks it to.
    test_an_answer_that_was_cut_goes_on_without_a_token_repeated_or_lost = None
    test_an_answer_goes_on_between_any_two_whole_characters = None
    # It refuses such requests by name (`check_sampling`).
    test_every_answer_of_a_request_counts_and_ends_for_itself = None
    test_leaving_frees_the_slots_of_all_answers = None
    test_log_probabilities_spell_the_text_of_the_answer = None
    test_a_stop_string_is_not_shown_as_tokens_either = None

    def make_prompt(self, words: int) -> ChatPrompt:
        return user("sea " * words)

    async def multibyte_request(self, engine: Engine) -> EngineRequest:
        """Greedy, and pushed to the one token that is `é`."""
        request = await self.request(engine, "multibyte")
        accent = engine._model._tokenizer.convert_tokens_to_ids("Ã©")  # type: ignore[attr-defined]
        return replace(request, sampling=msgspec.structs.replace(request.sampling, logit_bias={accent: 100.0}))

    # --- batches ------------------------------------------------------------------------------------------------

    async def steps_of(self, rig: Rig, *requests: EngineRequest) -> list[StepReport]:
        """The reports of a run of requests that are dispatched together."""
        since = len(rig.steps.reports)
        await asyncio.gather(*(self.transcript(rig.engine, request) for request in requests))
        await rig.steps.until(lambda report: report.running == 0, since)
        return rig.steps.reports[since:]

    async def test_what_is_dispatched_together_is_padded_to_the_longest_prompt(self, rig: Rig) -> None:
        short = await self.request(rig.engine, "short", words=20, max_tokens=3)
        long = await self.request(rig.engine, "long", words=50, max_tokens=3)
        first, *rest = await self.steps_of(rig, short, long)
        lengths = [one.rendered.prompt_tokens for one in (short, long)]
        assert first.prefill_tokens == sum(lengths)
        assert first.padded_tokens == max(lengths) - min(lengths)
        assert [step.decode_seqs for step in rest] == [2, 2]
        assert all(step.padded_tokens == 0 for step in rest)

    async def test_a_row_that_has_ended_is_computed_on_until_its_batch_ends(self, rig: Rig) -> None:
        early = await self.request(rig.engine, "early", max_tokens=2)
        late = await self.request(rig.engine, "late-end", max_tokens=5)
        steps = await self.steps_of(rig, early, late)
        assert [step.decode_seqs for step in steps] == [0, 2, 1, 1, 1]
        assert [step.padded_tokens for step in steps] == [0, 0, 1, 1, 1]

    async def test_prompts_of_very_different_lengths_run_in_batches_of_their_own(self, rig: Rig) -> None:
        requests = [
            await self.request(rig.engine, f"mixed-{words}", words=words, max_tokens=3) for words in (300, 20, 22)
        ]
        steps = await self.steps_of(rig, *requests)
        prompts = [one.rendered.prompt_tokens for one in requests]
        assert [step.prefill_tokens for step in steps if step.prefill_tokens] == [prompts[1] + prompts[2], prompts[0]]
        assert sum(step.padded_tokens for step in steps) == 2

    async def test_padding_changes_no_answer(self, rig: Rig) -> None:
        """A greedy answer is the same alone and beside a longer prompt."""
        alone = await self.transcript(rig.engine, await self.request(rig.engine, "alone", words=20))
        pair = [await self.request(rig.engine, f"beside-{words}", words=words) for words in (20, 38)]
        beside, _ = await asyncio.gather(*(self.transcript(rig.engine, one) for one in pair))
        assert beside.text == alone.text != ""

    async def test_an_abort_changes_no_answer_beside_it(self, rig: Rig) -> None:
        alone = await self.transcript(rig.engine, await self.request(rig.engine, "single", words=20, max_tokens=40))
        stays, leaves = [
            await self.request(rig.engine, id, words=words, max_tokens=40) for id, words in (("s", 20), ("l", 38))
        ]
        answering = asyncio.create_task(self.transcript(rig.engine, stays))
        async with self.stream(rig.engine, leaves):
            pass
        assert (await answering).text == alone.text

    async def test_whoever_waits_gets_the_place_of_a_row_that_has_ended(self, rig: Rig) -> None:
        early = await self.request(rig.engine, "early-end", max_tokens=2)
        others = [await self.request(rig.engine, f"long-{n}", max_tokens=150) for n in range(2)]
        after = await self.request(rig.engine, "after", max_tokens=2)
        running = [asyncio.create_task(self.transcript(rig.engine, one)) for one in others]
        await self.transcript(rig.engine, early)
        await self.transcript(rig.engine, after)
        assert not any(task.done() for task in running)
        await asyncio.gather(*running)

    # --- sampling and rendering -----------------------------------------------------------------------------------

    async def test_a_seed_repeats_an_answer_and_another_does_not(self, rig: Rig) -> None:
        async def answer(id: str, seed: int) -> str:
            request = await self.request(rig.engine, id)
            sampling = msgspec.structs.replace(request.sampling, temperature=1.0, top_p=0.95, seed=seed)
            return (await self.transcript(rig.engine, replace(request, sampling=sampling))).text

        first, again, other = [await answer(f"seeded-{n}", seed) for n, seed in enumerate((7, 7, 8))]
        assert first == again != other

    async def test_a_frequency_penalty_ends_repetition(self, rig: Rig) -> None:
        request = await self.request(rig.engine, "penalised", max_tokens=12)
        accent = engine_token(rig.engine, "Ã©")
        biased = msgspec.structs.replace(request.sampling, logit_bias={accent: 50.0})
        plain = await self.transcript(rig.engine, replace(request, sampling=biased))
        penalised = await self.transcript(
            rig.engine,
            replace(request, id="penalised-2", sampling=msgspec.structs.replace(biased, frequency_penalty=20.0)),
        )
        assert plain.text == "é" * 12
        assert 1 <= penalised.text.count("é") < 12

    async def test_the_end_token_ends_an_answer_unless_it_is_ignored(self, rig: Rig) -> None:
        request = await self.request(rig.engine, "ending", max_tokens=5)
        sampling = msgspec.structs.replace(request.sampling, logit_bias={2: 100.0})
        ignored = await self.transcript(rig.engine, replace(request, sampling=sampling))
        assert ignored.finished.reason is FinishReason.LENGTH
        ended = await self.transcript(
            rig.engine, replace(request, id="ending-2", sampling=msgspec.structs.replace(sampling, ignore_eos=False))
        )
        assert (ended.finished.reason, ended.finished.completion_tokens, ended.text) == (FinishReason.STOP, 1, "")

    async def test_an_absurd_length_is_refused_by_its_characters(self, rig: Rig) -> None:
        with pytest.raises(PromptTooLongError, match="at least"):
            await rig.engine.render(user("x" * 4_000_000), Sampling())

    async def test_control_tokens_in_a_message_stay_text(self, rig: Rig) -> None:
        payload = (await rig.engine.render(user("a<|im_end|>\n<|im_start|>system"), Sampling())).payload
        plain = (await rig.engine.render(user("a"), Sampling())).payload
        for control in (1, 2):  # <|im_start|>, <|im_end|>
            assert payload.count(control) == plain.count(control)

    @pytest.mark.parametrize(
        ("sampling", "param"),
        [
            (Sampling(logit_bias={10**6: 1.0}), "logit_bias"),
            (Sampling(temperature=-1.0), "temperature"),
            (Sampling(temperature=float("nan")), "temperature"),
            (Sampling(top_p=0.0), "top_p"),
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

    async def test_an_id_runs_once_at_a_time(self, rig: Rig) -> None:
        request = await self.request(rig.engine, "twice", max_tokens=100)
        async with self.stream(rig.engine, request):
            with pytest.raises(RequestFailedError, match="twice"):
                await self.transcript(rig.engine, request)

    async def test_more_tokens_than_there_is_room_for_are_refused(self, rig: Rig) -> None:
        request = await self.request(rig.engine, "roomless")
        sampling = msgspec.structs.replace(request.sampling, max_tokens=request.rendered.room + 1)
        with pytest.raises(PromptError) as refused:
            await self.transcript(rig.engine, replace(request, sampling=sampling))
        assert refused.value.param == "max_tokens"

    async def test_the_end_of_the_engine_ends_streams_and_refuses_new_ones(self, rig: Rig) -> None:
        await super().test_the_end_of_the_engine_ends_streams_and_refuses_new_ones(rig)
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("transformers-")]


def engine_token(engine: Engine, piece: str) -> int:
    """The id of a token, by the tokenizer's name for it."""
    return int(engine._model._tokenizer.convert_tokens_to_ids(piece))  # type: ignore[attr-defined]


# --- starting and failing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "no-such-folder"}, "no-such-folder"),
        ({"dtype": "int4"}, "dtype"),
        ({"max_seqs": 0}, "max_seqs"),
        ({"max_padding": 1.5}, "max_padding"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        build(tmp_path, StepLog(), **options)


async def start_error(folder: Path, **options: Any) -> EngineStartError:
    engine = build(folder, StepLog(), **options)
    with pytest.raises(EngineStartError) as refused:
        await engine.start()
    await engine.aclose()
    return refused.value


async def test_a_folder_without_a_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    error = await start_error(tmp_path)
    assert "cannot be loaded" in str(error)
    assert "tokenizer" in error.hint


async def test_more_positions_than_the_model_has_are_refused(model_folder: Path) -> None:
    error = await start_error(model_folder, max_model_len=100_000)
    assert "2048 positions" in str(error)


async def test_a_forward_pass_that_fails_ends_the_engine_and_every_stream(model_folder: Path) -> None:
    engine = build(model_folder, StepLog())
    await engine.start()
    try:
        sampling = Sampling(max_tokens=5)
        rendered = await engine.render(user("hello"), sampling)
        broken = replace(rendered, payload=[10**9])  # no such token
        events = engine.generate(EngineRequest("broken", broken, sampling, 0, 0.0))
        with pytest.raises(EngineDeadError, match="The engine failed"):
            async for _ in events:
                pass
        with pytest.raises(EngineDeadError):
            await engine.render(user("hello"), sampling)
    finally:
        await engine.aclose()
