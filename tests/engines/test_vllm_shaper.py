"""The step shaper around vLLM's own schedulers, plain and asynchronous, in this process and in virtual time.

The workers are replaced by arithmetic: the next token is a function of all tokens before it, so that a token that was
lost, repeated or computed from the wrong context changes every one after it.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.engines import vllm as adapter
from scheduler.engines.vllm_options import SHAPER_FAILURE, SHAPER_TERMS
from tests.engines.third_party import VLLM_WARNINGS

pytestmark = [pytest.mark.vllm, VLLM_WARNINGS]

BLOCK = 32
SLOTS = 6
STEP_TOKENS = 64
ROOMY, TIGHT = 400, 40  # blocks of KV cache
STEP_SECONDS, TOKEN_SECONDS = 0.004, 0.0001


@dataclass(frozen=True)
class Ask:
    """A request of a scenario. Seconds; `ttft` from its arrival."""

    name: str
    at: float
    rank: int
    prompt: int
    tokens: int
    ttft: float = 0.5
    tpot: float = 0.1
    whole: bool = False
    abort_at: float | None = None


@dataclass
class Workers:
    """vLLM's workers as its scheduler sees them: they know a request from the step that first has it on."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)

    def run(self, step: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        for name in step.finished_req_ids:
            self.tokens.pop(name, None)
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.tokens
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.computed[new.req_id] = new.num_computed_tokens
        old = step.scheduled_cached_reqs
        for name, computed in zip(old.req_ids, old.num_computed_tokens, strict=True):
            if name in old.resumed_req_ids:
                self.tokens[name] = list(old.all_token_ids[name])
                self.computed[name] = computed
            assert self.computed[name] == computed
        sampled = [self._advance(name, count) for name, count in step.num_scheduled_tokens.items()]
        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)

    def _advance(self, name: str, count: int) -> list[int]:
        tokens = self.tokens[name]
        self.computed[name] += count
        assert self.computed[name] <= len(tokens)
        if self.computed[name] < len(tokens):
            return []
        tokens.append(zlib.crc32(repr(tokens).encode()) % 1000)
        return tokens[-1:]


class Plant:
    """A scheduler of vLLM, its workers and a clock, driven as its engine process drives them."""

    def __init__(self, config: Any, scheduler: str, *, shaped: bool, blocks: int = ROOMY) -> None:
        import torch
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from scheduler.engines import vllm_shaper

        base: Any = {"plain": Scheduler, "async": AsyncScheduler}[scheduler]
        config.scheduler_config.async_scheduling = scheduler == "async"
        config.cache_config.num_gpu_blocks = blocks
        cache = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kind = vllm_shaper.shaped(base, lambda: self.now) if shaped else base
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], cache)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.now = 0.0
        self.workers = Workers()
        self.answers: dict[str, list[int]] = {}
        self.first_tokens: dict[str, float] = {}
        self.failures: list[str] = []
        self.preemptions = 0
        self.ended: set[str] = set()
        self._leaving: dict[str, float] = {}
        self._depth = 2 if scheduler == "async" else 1
        self._steps: deque[tuple[Any, Any]] = deque()

    def serve(self, asks: list[Ask]) -> dict[str, list[int]]:
        """Send every request at its instant and make steps until nothing is left. Answers tokens by request."""
        coming = deque(sorted(asks, key=lambda ask: ask.at))
        self._leaving = {ask.name: ask.abort_at for ask in asks if ask.abort_at is not None}
        for _ in range(20_000):
            while coming and coming[0].at <= self.now:
                self._add(coming.popleft())
            if self.scheduler.has_requests() or self._steps:
                self._step()
            elif coming:
                self.now = max(self.now, coming[0].at)
            else:
                return self.answers
        raise AssertionError(f"left in the engine: {[r.request_id for r in self.scheduler.requests.values()]}")

    def assert_nothing_is_left(self, asks: list[Ask]) -> None:
        scheduler = self.scheduler
        assert self.ended == {ask.name for ask in asks}
        assert not scheduler.running and not scheduler.waiting and not scheduler.requests
        assert scheduler.get_kv_cache_usage() == 0
        assert scheduler.max_num_active_reqs == SLOTS

    def _add(self, ask: Ask) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        draw = random.Random(ask.name)
        terms = {SHAPER_TERMS: [ask.rank, ask.tpot, ask.whole]}
        sampling = SamplingParams(max_tokens=ask.tokens, temperature=0.0, ignore_eos=True, extra_args=terms)
        request = Request(
            ask.name,
            [draw.randrange(1000) for _ in range(ask.prompt)],
            sampling,
            None,
            arrival_time=ask.at,
            priority=int((ask.at + ask.ttft) * 1e6),
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.answers[ask.name] = []
        self.scheduler.add_request(request)

    def _step(self) -> None:
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self.preemptions += len(step.preempted_req_ids)
            self._steps.append((step, self.workers.run(step)))
            self.now += STEP_SECONDS + TOKEN_SECONDS * step.total_num_scheduled_tokens
            if len(self._steps) < self._depth and step.total_num_scheduled_tokens:
                return
        self._abort()
        for outputs in self.scheduler.update_from_output(*self._steps.popleft()).values():
            for output in outputs.outputs:
                self.first_tokens.setdefault(output.request_id, self.now)
                self.answers[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.ended.add(output.request_id)
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.failures.append(outputs.scheduler_stats.kv_connector_stats[SHAPER_FAILURE])

    def _abort(self) -> None:
        """As the engine does, between a step and what came of it."""
        from vllm.v1.request import RequestStatus

        for name in [name for name, at in self._leaving.items() if at <= self.now]:
            del self._leaving[name]
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.ended.add(name)


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> Any:
    """vLLM's configuration of a small engine."""
    arguments = adapter._load().AsyncEngineArgs(
        model=str(tiny_model),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=512,
        scheduling_policy="priority",
        enable_prefix_caching=True,
        kv_cache_memory_bytes=2**20,
    )
    return arguments.create_engine_config()


both = pytest.mark.parametrize("scheduler", ["plain", "async"])


def crowd(seed: int) -> list[Ask]:
    """Long prompts of worse ranks and short urgent ones, in bursts; every sixth is aborted somewhere."""
    draw = random.Random(seed)
    asks, at = [], 0.0
    for index in range(80):
        at += draw.choice((0.0, 0.0, 0.02, 0.1))
        rank = draw.choice((1, 2, 3, 3))
        prompt = draw.randrange(1, 200) if rank == 1 else draw.randrange(1, 400)
        asks.append(
            Ask(
                f"{seed}-{index}",
                at,
                rank,
                prompt,
                draw.randrange(1, 60),
                ttft=draw.uniform(0.05, 0.2) if rank == 1 else rank * draw.uniform(0.1, 2.0),
                tpot=draw.choice((0.01, 0.1)),
                whole=draw.random() < 0.3,
                abort_at=at + draw.uniform(0.0, 0.5) if index % 6 == 0 else None,
            )
        )
    return asks


def counted(plant: Plant) -> list[Any]:
    """The shapes that the plant's shaper chooses from now on."""
    shaper, shapes = plant.scheduler._shaper, []
    choose = shaper.choose

    def note(*args: Any) -> Any:
        if (shape := choose(*args)) is not None:
            shapes.append(shape)
        return shape

    shaper.choose = note
    return shapes


@both
def test_the_scheduler_that_vllm_would_use_is_the_one_that_is_shaped(
    config: Any, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subclass of the plain one would take the overlap of steps from an engine that has it."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    monkeypatch.setattr(config.scheduler_config, "scheduler_cls", None)
    monkeypatch.setattr(config.scheduler_config, "async_scheduling", scheduler == "async")
    usual = config.scheduler_config.get_scheduler_cls()
    adapter._shape(config)
    chosen = config.scheduler_config.get_scheduler_cls()
    assert chosen is not usual and issubclass(chosen, usual)
    assert issubclass(chosen, AsyncScheduler) is (scheduler == "async")


# --- nothing is lost --------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("blocks", [ROOMY, TIGHT])
@pytest.mark.parametrize("seed", range(5))
def test_under_load_every_request_ends_with_the_tokens_it_has_without_a_shaper(
    config: Any, scheduler: str, blocks: int, seed: int
) -> None:
    asks = crowd(seed)
    plain = Plant(config, scheduler, shaped=False, blocks=blocks)
    expected = plain.serve(asks)
    plant = Plant(config, scheduler, shaped=True, blocks=blocks)
    shapes = counted(plant)
    answers = plant.serve(asks)

    plant.assert_nothing_is_left(asks)
    assert shapes and not plant.failures
    assert any(shape.held for shape in shapes)
    assert plant.preemptions > 0 or blocks == ROOMY
    for ask in asks:
        common = min(len(answers[ask.name]), len(expected[ask.name]))
        assert answers[ask.name][:common] == expected[ask.name][:common]
        if ask.abort_at is None:
            assert len(answers[ask.name]) == len(expected[ask.name]) == ask.tokens


# --- who stands back --------------------------------------------------------------------------------------------------

LONG = Ask("long", 0.0, rank=3, prompt=400, tokens=2, ttft=5.0)


def served(config: Any, scheduler: str, asks: list[Ask], *, shaped: bool, blocks: int = ROOMY) -> Plant:
    plant = Plant(config, scheduler, shaped=shaped, blocks=blocks)
    plant.serve(asks)
    plant.assert_nothing_is_left(asks)
    assert not plant.failures
    return plant


@both
def test_an_urgent_prompt_does_not_wait_for_a_long_one_of_a_worse_rank(config: Any, scheduler: str) -> None:
    asks = [LONG, Ask("urgent", 0.001, rank=1, prompt=100, tokens=2, ttft=0.1)]
    plain = served(config, scheduler, asks, shaped=False)
    plant = served(config, scheduler, asks, shaped=True)
    assert plain.first_tokens["urgent"] > plain.first_tokens["long"]
    assert plant.first_tokens["urgent"] < plant.first_tokens["long"] / 2
    # The urgent prompt takes one step whole and leaves the long one what is left of its second.
    step = STEP_SECONDS + STEP_TOKENS * TOKEN_SECONDS
    assert plant.now <= plain.now + 2 * step


@pytest.mark.parametrize(
    ("rank", "ttft", "long_ttft"),
    [
        pytest.param(3, 0.1, 5.0, id="the same rank"),
        pytest.param(1, 0.5, 5.0, id="time enough"),
        pytest.param(1, 0.1, 0.09, id="a later deadline"),
        pytest.param(1, -1.0, 5.0, id="a deadline that is missed"),
    ],
)
def test_nobody_stands_back_without_a_reason(config: Any, rank: int, ttft: float, long_ttft: float) -> None:
    plant = Plant(config, "plain", shaped=True)
    shapes = counted(plant)
    plant.serve([replace(LONG, ttft=long_ttft), Ask("urgent", 0.001, rank, prompt=60, tokens=2, ttft=ttft)])
    assert not shapes


def test_a_prompt_that_has_missed_its_deadline_stands_behind_one_that_can_meet_it(config: Any) -> None:
    missed = replace(LONG, ttft=-1.0)
    plant = served(config, "plain", [missed, Ask("urgent", 0.001, rank=1, prompt=60, tokens=2, ttft=0.1)], shaped=True)
    assert plant.first_tokens["urgent"] < plant.first_tokens["long"]


@both
@pytest.mark.parametrize("whole", [False, True])
def test_only_streams_that_are_ahead_of_their_pace_skip_a_step(config: Any, scheduler: str, whole: bool) -> None:
    """Ten tokens a second were promised, a step takes a hundredth: the stream is ahead. The hasty one never is."""
    deadline = 10.0 if whole else 0.5
    ahead = Ask("ahead", 0.0, rank=3, prompt=8, tokens=60, ttft=deadline, tpot=0.1, whole=whole)
    hasty = Ask("hasty", 0.0, rank=3, prompt=8, tokens=60, ttft=0.5, tpot=0.004)
    urgent = Ask("urgent", 0.2, rank=1, prompt=300, tokens=1, ttft=0.04)
    plant = Plant(config, scheduler, shaped=True)
    shapes = counted(plant)
    plant.serve([ahead, hasty, urgent])
    held = [request.request_id for shape in shapes for request in shape.held]
    assert held and set(held) == {"ahead"}
    # It was idle for the time of one prompt only, and is not late for it.
    assert len(held) <= 300 // STEP_TOKENS + 1


def test_streams_skip_no_more_tokens_than_are_needed(config: Any) -> None:
    streams = [Ask(f"stream-{index}", 0.0, rank=3, prompt=8, tokens=90) for index in range(4)]
    plant = Plant(config, "plain", shaped=True)
    shapes = counted(plant)
    plant.serve([*streams, Ask("urgent", 0.3, rank=1, prompt=STEP_TOKENS - 2, tokens=1, ttft=0.015)])
    assert [len(shape.held) for shape in shapes] == [2]


def test_nobody_stands_back_while_memory_is_scarce(config: Any) -> None:
    """The long prompt and the urgent one will fill half of the cache, then 83 %."""
    for prompt, expected in ((100, True), (450, False)):
        plant = Plant(config, "plain", shaped=True, blocks=32)
        shapes = counted(plant)
        plant.serve([LONG, Ask("urgent", 0.001, rank=1, prompt=prompt, tokens=2, ttft=0.1)])
        assert bool(shapes) is expected


def test_a_prompt_stands_back_for_fifty_steps_at_most(config: Any) -> None:
    from scheduler.engines.vllm_shaper import MOST_YIELDS

    flood = [Ask(f"urgent-{index}", 0.001 + index * 0.01, 1, prompt=60, tokens=1, ttft=0.05) for index in range(200)]
    plant = Plant(config, "plain", shaped=True)
    shapes = counted(plant)
    plant.serve([LONG, *flood])
    back = [shape for shape in shapes if any(request.request_id == "long" for request in shape.held + shape.shown[-1:])]
    assert len(back) == MOST_YIELDS
    assert plant.first_tokens["long"] < flood[-1].at


def test_the_long_prompt_runs_on_when_the_urgent_one_is_not_let_in_all_the_same(config: Any) -> None:
    plant = Plant(config, "plain", shaped=True)
    shapes = counted(plant)
    manager = plant.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def refuse_the_urgent_one(request: Any, *args: Any, **kwargs: Any) -> Any:
        blocked = request.request_id == "urgent" and plant.first_tokens.get("long") is None
        return None if blocked else allocate(request, *args, **kwargs)

    manager.allocate_slots = refuse_the_urgent_one
    asks = [LONG, Ask("urgent", 0.001, rank=1, prompt=60, tokens=2, ttft=0.1)]
    plant.serve(asks)
    plant.assert_nothing_is_left(asks)
    assert len(shapes) == 1


def test_nobody_stands_back_for_what_may_not_enter_a_paused_engine(config: Any) -> None:
    from vllm.v1.core.sched.interface import PauseState

    plant = Plant(config, "plain", shaped=True)
    shapes = counted(plant)
    plant.scheduler.set_pause_state(PauseState.UNPAUSED)
    plant._add(LONG)
    plant._step()
    plant.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    plant._add(Ask("urgent", 0.001, rank=1, prompt=60, tokens=2, ttft=0.1))
    while "long" not in plant.ended:
        plant._step()
    assert not shapes
    assert not plant.answers["urgent"]


# --- what fails -------------------------------------------------------------------------------------------------------


def break_choice(plant: Plant) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("injected")

    plant.scheduler._shaper._scarce = fail


def break_note(plant: Plant) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("injected")

    plant.scheduler._shaper.scheduled = fail


def break_vllm(plant: Plant) -> None:
    """vLLM fails in the first step that is shaped, when it has let requests in, but before it has made the step."""
    scheduler, failed = plant.scheduler, []
    describe = scheduler._make_cached_request_data

    def fail_once(*args: Any) -> Any:
        if not failed and len(scheduler.running) != len(
            [request for request in scheduler.requests.values() if request.status.name == "RUNNING"]
        ):
            failed.append(True)
            raise RuntimeError("injected")
        return describe(*args)

    scheduler._make_cached_request_data = fail_once


@both
@pytest.mark.parametrize("blocks", [ROOMY, TIGHT])
@pytest.mark.parametrize("break_it", [break_choice, break_note, break_vllm])
def test_an_exception_ends_the_shaping_and_no_request(config: Any, scheduler: str, blocks: int, break_it: Any) -> None:
    asks = [ask for ask in crowd(3) if ask.abort_at is None]
    expected = served(config, scheduler, asks, shaped=False, blocks=blocks).answers
    plant = Plant(config, scheduler, shaped=True, blocks=blocks)
    break_it(plant)
    assert plant.serve(asks) == expected
    plant.assert_nothing_is_left(asks)
    assert plant.failures == ["RuntimeError: injected"], "it is reported once"
    assert plant.scheduler._shaper is None


def test_terms_that_cannot_be_read_end_the_shaping_only(config: Any) -> None:
    plant = Plant(config, "plain", shaped=True)
    asks = [LONG, Ask("urgent", 0.001, rank="first", prompt=60, tokens=2, ttft=0.1)]  # type: ignore[arg-type]
    plant.serve(asks)
    plant.assert_nothing_is_left(asks)
    assert len(plant.failures) == 1
    assert plant.failures[0].startswith("TypeError")


def test_a_failure_reaches_the_step_report() -> None:
    details = SimpleNamespace(elapsed_ms=5.0, num_ctx_tokens=0, num_generation_requests=1)
    stats = SimpleNamespace(
        iteration_details=details,
        num_running_reqs=1,
        num_waiting_reqs=0,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=0.0,
        kv_connector_stats={SHAPER_FAILURE: "RuntimeError: injected"},
    )
    assert adapter._report(stats, None, 1.0, 0.0).shaper_failure == "RuntimeError: injected"
    stats.kv_connector_stats = None
    assert adapter._report(stats, None, 2.0, 1.0).shaper_failure is None
