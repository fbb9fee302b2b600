"""Engines in figures. A profile is what the options of a simulated deployment are: sizes, and what a step costs.

Derived profiles come from datasheets, not from measurements, by this arithmetic (bfloat16 throughout):

    base           weights read once a step: bytes / memory bandwidth, plus 2 ms of launches
    prefill_token  2 FLOP per parameter and token over 61 % of the dense peak (600 of 989 TFLOP/s on an H100)
    decode_seq     the same, plus 23 us of sampling and bookkeeping
    kv_token       KV bytes of a context token / memory bandwidth
    kv_tokens      (90 % of the memory - weights - 3.5 GB of activations) / KV bytes of a token

What an H200 says of it (docs/scheduling.md): base and prefill_token are right within 15 %, decode_seq is 3 to 6 times
too high, because the arithmetic of decoding hides behind the reading of the weights, and kv_token is 0.6 to 0.9 of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from scheduler.core.types import PoolCapacity
from scheduler.engines.base import EngineStartError
from scheduler.engines.simulated.machine import StepCost
from scheduler.engines.simulated.options import H100_8B, Options, StepOptions, parse_options

DEFAULT_PROFILE = "h100-8b"


class ProfileError(Exception):
    """There is no such profile, or its file does not describe one."""


@dataclass(frozen=True, slots=True)
class Profile:
    """`basis`: where the figures come from. `derived`: from datasheets, not from a measurement.

    `step_error`: the median relative error of a single step against what was measured; None: nobody knows.
    `pipelined`: a step is scheduled while the one before it runs, so that what comes meanwhile waits for one more.
    """

    name: str
    capacity: PoolCapacity
    cost: StepCost
    basis: str
    derived: bool = True
    pipelined: bool = False
    step_error: float | None = None

    @property
    def accuracy(self) -> str:
        """How far what it predicts can be trusted; goes with every prediction."""
        if self.derived:
            return "derived from datasheets, not measured"
        if self.step_error is None:
            return "given figures, error unknown"
        return f"measured, median error of a step {100 * self.step_error:.1f} %"

    @property
    def longest(self) -> int:
        """Prompt and output tokens that one request may have together."""
        return min(self.capacity.max_model_len, self.capacity.total_blocks * self.capacity.block_size)


def _derived(name: str, options: Options, basis: str) -> Profile:
    return Profile(name, options.capacity, options.cost, basis)


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        _derived(
            "h100-8b",
            Options(H100_8B, max_seqs=256, step_tokens=8192, kv_tokens=400_000, max_model_len=131_072),
            "8B, GQA, on an H100 SXM 80 GB (3.35 TB/s, 989 TFLOP/s dense): 16 GB / 3.35 TB/s + 2 ms = 7 ms; "
            "16 GFLOP / 600 TFLOP/s = 27 us; + 23 us = 50 us; 128 KiB / 3.35 TB/s = 40 ns; "
            "(72 - 16 - 3.5) GB / 128 KiB = 400,000 tokens",
        ),
        Profile(
            "h200-8b",
            PoolCapacity(max_seqs=256, step_tokens=8192, kv_tokens=896_896, block_size=16, max_model_len=131_072),
            StepCost(base=5.0e-3, prefill_token=23.6e-6, decode_seq=8.6e-6, kv_token=44e-9),
            "8B, GQA, random weights in vLLM 0.26.0 on an NVIDIA H200 (bfloat16, FlashAttention 3, CUDA graphs): "
            "bursts of 1 to 256 prompts of 128 to 14,000 tokens, greedy, the engine's host work included; 44 windows "
            "of some 1,700 steps; vLLM found room for 896,896 tokens in 90 % of the memory",
            derived=False,
            step_error=0.055,
        ),
        _derived(
            "a100-8b",
            Options(
                StepOptions(base=0.010, prefill_token=85e-6, decode_seq=108e-6, kv_token=64e-9),
                max_seqs=256,
                step_tokens=8192,
                kv_tokens=400_000,
                max_model_len=131_072,
            ),
            "8B, GQA, on an A100 SXM 80 GB (2.04 TB/s, 312 TFLOP/s dense): 16 GB / 2.04 TB/s + 2 ms = 10 ms; "
            "16 GFLOP / 189 TFLOP/s = 85 us; + 23 us = 108 us; 128 KiB / 2.04 TB/s = 64 ns; KV as on the H100",
        ),
        _derived(
            "a10g-7b",
            Options(
                StepOptions(base=0.026, prefill_token=0.22e-3, decode_seq=0.1e-3),
                max_seqs=64,
                step_tokens=2048,
                kv_tokens=40_000,
                max_model_len=32_768,
            ),
            "7B, GQA, on an A10G 24 GB (600 GB/s, 70 TFLOP/s dense): 14 GB / 600 GB/s + 2.7 ms = 26 ms; "
            "14 GFLOP / 64 TFLOP/s = 0.22 ms; decode 0.1 ms with the reading of its context, at batches that leave "
            "arithmetic idle; (21.6 - 14 - 2.4) GB / 128 KiB = 40,000 tokens",
        ),
        _derived(
            "h100-70b-tp4",
            Options(
                StepOptions(base=0.015, prefill_token=69e-6, decode_seq=92e-6, kv_token=24e-9),
                max_seqs=256,
                step_tokens=8192,
                kv_tokens=400_000,
                max_model_len=131_072,
            ),
            "70B, GQA, on four H100 SXM: 141 GB / 4 / 3.35 TB/s + 2 ms + 160 all-reduces of 15 us = 15 ms; "
            "141 GFLOP / (4 x 600 TFLOP/s x 0.85) = 69 us; + 23 us = 92 us; 320 KiB / 4 / 3.35 TB/s = 24 ns; "
            "4 x (72 - 35.3 - 3.5) GB / 320 KiB = 400,000 tokens",
        ),
        Profile(
            "cpu-sim",
            Options(max_seqs=16, step_tokens=64, kv_tokens=6_000).capacity,
            StepCost(base=0.008, prefill_token=0.6e-3, decode_seq=2.5e-3),
            "a small model on a small CPU, in round figures; no real engine",
            derived=False,
        ),
        Profile(
            "cpu-tiny",
            PoolCapacity(max_seqs=32, step_tokens=256, kv_tokens=52_384, block_size=32, max_model_len=2048),
            StepCost(base=2.14e-3, prefill_token=9.94e-6, decode_seq=0.130e-3, kv_token=0.121e-6),
            "two random layers in vLLM 0.32 on one core of a quiet virtual machine (EPYC, 2 cores): measured by "
            "benchmarks/scheduling.py over 10,338 steps",
            derived=False,
            pipelined=True,
            step_error=0.075,
        ),
    )
}


def load_profile(name_or_file: str) -> Profile:
    """The profile of that name, or the one in that YAML or JSON file: a simulated deployment's `options`.

    Raises ProfileError.
    """
    if name_or_file in PROFILES:
        return PROFILES[name_or_file]
    path = Path(name_or_file)
    if not path.is_file():
        known = ", ".join(PROFILES)
        raise ProfileError(f"There is no profile {name_or_file!r}: choose one of {known}, or name a file.")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProfileError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ProfileError(f"{path} must hold the options of a simulated engine, such as step and max_seqs.")
    try:
        options = parse_options(document)
    except EngineStartError as error:
        raise ProfileError(f"{path}: {error} {error.hint}") from error
    if options.cost.base <= 0:
        raise ProfileError(f"{path}: step.base must be above 0, or time would not pass.")
    return Profile(path.stem, options.capacity, options.cost, f"the figures of {path.name}", False, options.pipelined)
