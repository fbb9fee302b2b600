"""What a step of the started engine costs: a closed loop at several batch sizes, an open one like the runs, and a fit.

Two fits of the same steps. The planner's step model learns from the time that the engine reports, as in production.
The profile for load and simulator is fitted to the time from one report to the next, which is what a step really takes:
scheduling, transport and the handling of outputs included.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from benchmarks.live import LiveEngine, Run, StepObserver, StepSample
from benchmarks.report import percentile
from scheduler.core.planner import FIRST_GUESS
from scheduler.core.step_model import Coefficients, StepLoad, StepModel
from scheduler.core.types import Request
from scheduler.engines.simulated.machine import StepCost
from scheduler.simulator.profiles import Profile
from scheduler.simulator.trace import TraceRow
from scheduler.simulator.workload import Workload

ALONE_REQUESTS = 20  # short prompts on an idle engine, for the unloaded time to first token
Floats = NDArray[np.float64]

OUTLIER_SIGMAS = 3.0  # by the median deviation: what others did to this machine is no property of the engine


@dataclass(frozen=True, slots=True)
class Calibration:
    """`error`: median |period - fitted| / period. `overhead`: share of the period that the engine does not report.

    `host`: seconds of a lone request's first token that are no step: the way in, the way out, the threads between.
    """

    profile: Profile
    learned: Coefficients
    samples: int
    error: float
    overhead: float
    host: float
    alone_ttft_p95: float


async def calibrate(
    live: LiveEngine, rows: Sequence[TraceRow], seconds: float, name: str, offer: Callable[[Profile], Workload]
) -> Calibration:
    """Half of `seconds` in a closed loop of 1, 2, 4 … sequences, then an open one that `offer` makes for its result.

    The closed loop holds each batch size still; the open one has what runs have, prompts that come while others decode
    and a planner beside the engine, and so decides how long a step really takes.
    """
    alone = await _alone(live, rows)
    closed = await _closed_loop(live, rows, seconds / 2)
    rough = Profile(name, live.capacity, fit(closed)[0], "a closed loop", False, pipelined=True)
    run = Run(live, offer(rough), "continuous", "calibration", learn(closed))
    samples = [*closed, *(await run.serve()).samples]
    cost, error = fit(samples)
    overhead = 1 - sum(s.elapsed for s in samples) / sum(s.period for s in samples)
    profile = replace(rough, cost=cost, basis="measured by the calibration of this run", step_error=error)
    host = max(median(seconds - cost.base - cost.prefill_token * prompt for prompt, seconds in alone), 0.0)
    ttft_p95 = percentile([seconds for _, seconds in alone], 95)
    return Calibration(profile, learn(samples), len(samples), error, overhead, host, ttft_p95)


def slowdown(samples: Sequence[StepSample], cost: StepCost) -> float:
    """How much longer these steps took than `cost` says, in sum: 1 is no longer."""
    predicted = sum(
        cost.base
        + cost.prefill_token * s.prefill_tokens
        + cost.decode_seq * s.decode_seqs
        + cost.kv_token * s.decode_context
        for s in samples
    )
    return sum(s.period for s in samples) / predicted


def fit(samples: Sequence[StepSample]) -> tuple[StepCost, float]:
    """Non-negative least squares of the period, a second time without outliers; and the median relative error."""
    features = np.array([[1.0, s.prefill_tokens, s.decode_seqs, s.decode_context] for s in samples])
    periods = np.array([s.period for s in samples])
    solution = _solve(features, periods)
    errors = np.abs(periods - features @ solution)
    usual = errors <= OUTLIER_SIGMAS * 1.4826 * np.median(errors)
    solution = _solve(features[usual], periods[usual])
    relative = np.abs(periods - features @ solution) / periods
    return StepCost(*(float(value) for value in solution)), float(np.median(relative))


def _solve(features: Floats, periods: Floats) -> Floats:
    scale = features.max(axis=0).clip(1.0)
    solution, _ = nnls(features / scale, periods)
    return np.asarray(solution / scale)


def learn(samples: Sequence[StepSample]) -> Coefficients:
    """What the planner's own model makes of the same steps, in random order: it forgets what is long ago."""
    model = StepModel(FIRST_GUESS)
    for s in random.Random(2).sample(list(samples), len(samples)):
        model.learn(StepLoad(s.prefill_tokens, s.decode_seqs, s.decode_context), s.elapsed)
    return model.coefficients


async def _closed_loop(live: LiveEngine, rows: Sequence[TraceRow], seconds: float) -> list[StepSample]:
    """Every batch size twice, in random order."""
    contexts: dict[str, int] = {}  # KV tokens of each decoding request
    observer = StepObserver(lambda: sum(contexts.values()))
    live.listener = observer.step
    rounds = 2 * [2**n for n in range(live.capacity.max_seqs.bit_length())]
    draw = random.Random(1)
    draw.shuffle(rounds)

    async def client(name: str, until: float) -> None:
        number = 0
        while live.clock.now() < until:
            row = draw.choice(rows)
            request_id = f"{name}-{number}"
            async for delta in live.generate(request_id, _request(live, row), priority=0):
                contexts[request_id] = row.prompt_tokens + delta.tokens
            contexts.pop(request_id, None)
            number += 1

    begun = live.clock.now()  # ids are an engine's own for good
    try:
        for number, size in enumerate(rounds):
            until = live.clock.now() + seconds / len(rounds)
            await asyncio.gather(*(client(f"cal-{begun}-{number}-{n}", until) for n in range(size)))
    finally:
        live.listener = lambda report: None
    return observer.samples


async def _alone(live: LiveEngine, rows: Sequence[TraceRow]) -> list[tuple[int, float]]:
    """Prompt tokens and seconds to the first token of prompts below the median, one at a time."""
    short = sorted(row.prompt_tokens for row in rows)[: len(rows) // 2]
    draw = random.Random(3)
    times: list[tuple[int, float]] = []
    for number in range(ALONE_REQUESTS):
        row = TraceRow(0.0, draw.choice(short), 1)
        begun = live.clock.now()
        async for _ in live.generate(f"alone-{number}-{begun}", _request(live, row), priority=0):
            times.append((row.prompt_tokens, live.clock.now() - begun))
    return times


def _request(live: LiveEngine, row: TraceRow) -> Request:
    now = live.clock.now()
    return Request("calibration", "", "", now, row.prompt_tokens, row.output_tokens, True, now, now)
