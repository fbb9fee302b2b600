"""What a deployment of the simulated engine may set, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from scheduler.core.types import PoolCapacity
from scheduler.engines.base import EngineStartError
from scheduler.engines.simulated.machine import StepCost

Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class StepOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds per step, per prefilled token, per decoding sequence and per token of context; what is absent is free."""

    base: Seconds = 0.0
    prefill_token: Seconds = 0.0
    decode_seq: Seconds = 0.0
    kv_token: Seconds = 0.0


# An 8B model in bfloat16 on one H100, derived from its bandwidth and arithmetic, not measured: 16 GB of weights over
# 3.35 TB/s plus 2 ms of launches a step, 16 GFLOP a token, 128 KiB of KV a token.
H100_8B = StepOptions(base=0.007, prefill_token=27e-6, decode_seq=50e-6, kv_token=40e-9)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lengths and sizes in tokens. A `step` that is given starts from zero costs, not from the default profile."""

    step: StepOptions = H100_8B
    max_seqs: Count = 256
    step_tokens: Count = 8192
    kv_tokens: Count = 400_000
    max_model_len: Count = 8192
    block_size: Count = 16
    pipelined: bool = False
    start_seconds: Seconds = 0.0

    @property
    def capacity(self) -> PoolCapacity:
        """`max_seqs` is what can run at a time: every running sequence needs a token of each step."""
        blocks = self.kv_tokens // self.block_size
        return PoolCapacity(
            max_seqs=min(self.max_seqs, self.step_tokens),
            step_tokens=self.step_tokens,
            kv_tokens=blocks * self.block_size,
            block_size=self.block_size,
            max_model_len=min(self.max_model_len, blocks * self.block_size),
        )

    @property
    def cost(self) -> StepCost:
        step = self.step
        return StepCost(step.base, step.prefill_token, step.decode_seq, step.kv_token)


def parse_options(options: Mapping[str, Any]) -> Options:
    """Check a deployment's options. Raises EngineStartError that names the bad one."""
    try:
        parsed = msgspec.convert(dict(options), Options)
    except msgspec.ValidationError as error:
        raise EngineStartError(
            f"The options of the simulated engine are not valid: {error}.",
            hint=f"Known options: {', '.join(Options.__struct_fields__)}; "
            f"under step: {', '.join(StepOptions.__struct_fields__)}.",
        ) from error
    if parsed.capacity.max_model_len < 2:
        raise EngineStartError(
            "kv_tokens holds no request of the simulated engine.",
            hint="Make kv_tokens at least block_size and max_model_len at least 2.",
        )
    return parsed
