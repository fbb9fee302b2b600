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
