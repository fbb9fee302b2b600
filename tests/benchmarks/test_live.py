"""A run of the benchmark on the real engine, with an engine that answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from benchmarks.live import Direct, Flight, LiveEngine, Run, Served
from scheduler.core.planner import FIRST_GUESS
from scheduler.core.types import PoolCapacity, Reason, Request
from scheduler.engines.base import (
    ChatPrompt,
    Delta,
    EngineEvent,
    EngineLimits,
    EngineRequest,
    Finished,
    FinishReason,
    Rendered,
    RequestFailedError,
    Sampling,
)
from scheduler.simulator.profiles import PROFILES
from scheduler.simulator.trace import TraceRow
from scheduler.simulator.workload import DEFAULT_TIERS, Demand, Workload, build_workload

CAPACITY = PoolCapacity(max_seqs=4, step_tokens=64, kv_tokens=4096, block_size=32, max_model_len=1024)


class QuickEngine:
    """A token every time the loop comes round."""

    def __init__(self, fails: bool = False) -> None:
        self._fails = fails

    async def start(self) -> EngineLimits:
        return EngineLimits(CAPACITY, vocab_size=100)

    async def render(self, prompt: ChatPrompt, sampling: Sampling) -> Rendered:
        return Rendered(1, 100, {"prompt_token_ids": [5]})

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineEvent]:
        if self._fails:
            raise RequestFailedError("no")
        most = request.sampling.max_tokens or 1
        for tokens in range(len(request.produced) + 1, most + 1):
            await asyncio.sleep(0)
            yield Delta("a", tokens, (7,))
        yield Finished(FinishReason.LENGTH, request.rendered.prompt_tokens, most)

    async def abort(self, request_id: str) -> None:
        pass

    async def aclose(self) -> None:
        pass


class EvictsAtOnce(Direct):
    """Takes a request out of the engine in the moment in which it was let in, and lets it in again."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, dict(DEFAULT_TIERS), ranked=False)
        self._run = run

    def arrive(self, request: Request, now: float) -> Reason | None:
        super().arrive(request, now)
        self._run.evict(request.id)
        return None

    def evicted(self, flight: Flight, now: float) -> None:
        self._run.begin(flight.request.id, 0)


def workload() -> Workload:
    rows = [TraceRow(0.01 * number, 10, 5) for number in range(4)]
    return build_workload(rows, PROFILES["cpu-sim"], DEFAULT_TIERS, Demand())


async def serve(arm: str, engine: QuickEngine, *, evicts: bool = False) -> Served:
    live = LiveEngine(engine, CAPACITY, await engine.render(ChatPrompt(()), Sampling()), vocabulary=100)
    run = Run(live, workload(), arm, "test", FIRST_GUESS)
    if evicts:
        run._front = EvictsAtOnce(run)
    return await asyncio.wait_for(run.serve(), timeout=10.0)


@pytest.mark.parametrize("arm", ["vllm-fcfs", "vllm-priority", "batching_aware", "continuous"])
async def test_every_request_is_answered_under_every_kind_of_arm(arm: str) -> None:
    served = await serve(arm, QuickEngine())
    assert [record.last_token is not None for record in served.records] == [True] * 4
    assert all((record.first_token or 0.0) >= record.request.arrival for record in served.records)


async def test_a_request_that_is_evicted_before_it_has_begun_still_gets_its_answer() -> None:
    served = await serve("vllm-fcfs", QuickEngine(), evicts=True)
    assert served.evictions == 4
    assert [record.last_token is not None for record in served.records] == [True] * 4


async def test_a_request_that_the_engine_fails_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.live.DRAIN_SECONDS", 0.1)
    with pytest.raises(RequestFailedError):
        await serve("vllm-fcfs", QuickEngine(fails=True))
