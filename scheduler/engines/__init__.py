"""Engines by name. Importing this package imports no engine: a product without torch still starts."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from scheduler.clock import Clock
from scheduler.engines.base import Engine, EngineStartError, StepListener

# name -> module; each module has `create(model, options, clock, on_step, data_dir)`.
ENGINES = {
    "simulated": "scheduler.engines.simulated",
    "transformers": "scheduler.engines.transformers",
    "vllm": "scheduler.engines.vllm",
}


# The engines whose steps have a size, and the names of that option.
STEP_OPTIONS = {"simulated": ("step_tokens",), "vllm": ("step_tokens", "max_num_batched_tokens")}


def with_step_tokens(engine: str, options: Mapping[str, Any], step_tokens: int | None) -> Mapping[str, Any]:
    """The options of a deployment; the size of a step is the policy's where the deployment names none."""
    names = STEP_OPTIONS.get(engine)
    if step_tokens is None or names is None or any(name in options for name in names):
        return options
    return {**options, names[0]: step_tokens}


def with_smaller_step(engine: str, options: Mapping[str, Any], step_tokens: int) -> Mapping[str, Any]:
    """The options with that size of a step, whatever they say of it; an engine without one is left as it is."""
    names = STEP_OPTIONS.get(engine)
    if names is None:
        return options
    return {name: value for name, value in options.items() if name not in names} | {names[0]: step_tokens}


def create_engine(
    name: str, model: str, options: Mapping[str, Any], *, clock: Clock, on_step: StepListener, data_dir: Path
) -> Engine:
    """Build (not start) the engine of a deployment.

    Raises EngineStartError for an unknown name, an unknown option (by name) or a missing package.
    """
    if name not in ENGINES:
        raise EngineStartError(f"Unknown engine {name!r}.", hint=f"Choose one of: {', '.join(sorted(ENGINES))}.")
    module = import_module(ENGINES[name])
    engine: Engine = module.create(model, options, clock=clock, on_step=on_step, data_dir=data_dir)
    return engine
