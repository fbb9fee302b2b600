"""Hugging Face transformers on the CPU, with batches as they were before engines batched by iteration.

What is dispatched together is padded to one width and runs as one batch to its end, so that the policies `static` and
`dynamic` pay here what they cost in the servers that they are named after: padding in front of short prompts, and rows
that have ended but are computed on.

options.py   what a deployment may set
model.py     tokenizer, weights and sampling defaults, loaded from a folder; imports torch
sampling.py  a row of logits to a token
batch.py     the padded batch and how requests are composed into batches
text.py      tokens to text that never splits a character nor shows a stop string
engine.py    the asynchronous engine around them
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler.clock import Clock
from scheduler.engines.base import Engine, EngineStartError, StepListener
from scheduler.engines.transformers.options import parse_options


def create(model: str, options: Mapping[str, Any], *, clock: Clock, on_step: StepListener, data_dir: Path) -> Engine:
    """Build (not start) the engine of a deployment. Blocks while torch is imported (5 to 10 s).

    EngineStartError names a bad option, or the package that is missing.
    """
    parsed = parse_options(options, data_dir)
    try:
        from scheduler.engines.transformers.engine import TransformersEngine
    except ModuleNotFoundError as error:
        raise EngineStartError(
            f"The engine transformers needs a package that is missing: {error.name}.", hint="Run `make setup`."
        ) from error
    return TransformersEngine(model, parsed, clock=clock, on_step=on_step)
