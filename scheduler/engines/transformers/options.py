"""What a deployment of the transformers engine may set, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from scheduler.engines.base import EngineStartError
from scheduler.engines.model_folder import find_model

Count = Annotated[int, msgspec.Meta(ge=1)]
DEFAULT_MODEL_LEN = 2048  # tokens: on a CPU, longer prompts are for those who ask for them


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`path`: the model's folder. `max_model_len`: tokens of prompt and answer (None: 2,048, or what the model has).

    `max_padding`: the share of a batch's prompt tokens that may be padding; requests of more different lengths run in
    batches of their own, by turns.
    """

    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_seqs: Count = 8
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] | None = None
    max_padding: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5

    def model_len(self, positions: int) -> int:
        """Tokens of a request for a model with so many positions. EngineStartError if more is asked than it has."""
        if self.max_model_len is None:
            return min(positions, DEFAULT_MODEL_LEN)
        if self.max_model_len > positions:
            raise EngineStartError(
                f"The model has {positions} positions, max_model_len asks for {self.max_model_len}.",
                hint=f"Set max_model_len to at most {positions}.",
            )
        return self.max_model_len


def parse_options(options: Mapping[str, Any], data_dir: Path) -> Options:
    """Check a deployment's options and find its model. Raises EngineStartError that names the bad one."""
    try:
        parsed = msgspec.convert(dict(options), Options)
    except msgspec.ValidationError as error:
        raise EngineStartError(
            f"The options of the transformers engine are not valid: {error}.",
            hint=f"Known options: {', '.join(Options.__struct_fields__)}.",
        ) from error
    return msgspec.structs.replace(parsed, path=find_model(parsed.path, data_dir, must_exist=True))
