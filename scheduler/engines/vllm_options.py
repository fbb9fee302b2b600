"""A deployment's options as arguments of the vLLM engine.

Harness has names of its own for what every engine has; any other argument of vLLM goes by vLLM's name. What decides
how this adapter works is not for the operator to change.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from scheduler.engines.base import EngineStartError
from scheduler.engines.model_folder import find_model

GIB = 1024**3

# our name -> vLLM's
ALIASES = {
    "path": "model",
    "max_seqs": "max_num_seqs",
    "step_tokens": "max_num_batched_tokens",
    "kv_space_gib": "kv_cache_memory_bytes",
}
# Options that the engine arguments of vLLM do not have:
SHAPER = "step_shaper"  # whether its steps are shaped (`vllm_shaper.py`)
TOOL_PARSER = "tool_parser"  # which of vLLM's tool parsers reads the calls of this model

# What the adapter in our process and the shaper in vLLM's say to each other, in fields of vLLM that carry anything:
SHAPER_TERMS = "harness_terms"  # `SamplingParams.extra_args`: rank, tpot, and whether the deadline is the last token's
SHAPER_FAILURE = "harness_shaper_failure"  # `SchedulerStats.kv_connector_stats`, once: why steps are no longer shaped

DEFAULTS: Mapping[str, Any] = {
    "scheduling_policy": "priority",
    "enable_prefix_caching": True,
    "use_tqdm_on_load": False,
}

# vLLM's own defaults are for servers with hundreds of GiB; float32 because bfloat16 has no fast path on AVX2, blocks of
# 32 because 128 wastes a small pool.
CPU_DEFAULTS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 2 * GIB,
}

# One report for every step reaches our listener and nothing else; no request is ever logged.
FIXED: Mapping[str, Any] = {
    "disable_log_stats": True,
    "enable_logging_iteration_details": True,
    "enable_log_requests": False,
}
_OURS = frozenset({*FIXED, "logging_config", "log_level", "log_config_file", "structured_outputs_config"})


def engine_arguments(
    options: Mapping[str, Any], known: Collection[str], data_dir: Path, *, cpu: bool
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `AsyncEngineArgs`, whose field names are `known`.

    Raises EngineStartError naming the option that is unknown, given twice, ours to set, or a missing model.
    """
    arguments: dict[str, Any] = {**DEFAULTS, **(CPU_DEFAULTS if cpu else {}), **FIXED}
    seen: set[str] = set()
    for option, value in options.items():
        if option in (SHAPER, TOOL_PARSER):
            continue
        name = ALIASES.get(option, option)
        _check_name(option, name, known, seen)
        seen.add(name)
        arguments[name] = _kv_bytes(value) if option == "kv_space_gib" else value
    if "model" not in seen:
        raise EngineStartError("The deployment names no model.", hint="Give the folder of one in the option `path`.")
    arguments["model"] = find_model(arguments["model"], data_dir, must_exist="path" in options)
    return arguments


def wants_shaper(options: Mapping[str, Any]) -> bool:
    """Whether the steps of the deployment are to be shaped. Raises EngineStartError."""
    wanted = options.get(SHAPER, False)
    if not isinstance(wanted, bool):
        raise EngineStartError(f"Option {SHAPER!r} is refused: {wanted!r} is neither true nor false.")
    if wanted and "scheduler_cls" in options:
        raise EngineStartError(f"Option {SHAPER!r} is refused: it is a scheduler_cls of its own.")
    return wanted


def tool_parser(options: Mapping[str, Any], known: Collection[str]) -> str | None:
    """The tool parser of the deployment, one of `known`; None: its model calls no tools. Raises EngineStartError."""
    name = options.get(TOOL_PARSER)
    if name is not None and name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known are: {', '.join(sorted(known))}."
        raise EngineStartError(f"Option {TOOL_PARSER!r} is refused: there is no parser {name!r}.", hint=hint)
    return name


def _check_name(option: str, name: str, known: Collection[str], seen: Collection[str]) -> None:
    if name in _OURS:
        raise EngineStartError(f"Option {option!r} is set by Harness itself.", hint="Remove it from the deployment.")
    if name in seen:
        raise EngineStartError(f"Option {option!r} is given twice, under two names.", hint="Remove one of them.")
    if name not in known or name.startswith("_"):
        candidates = [
            candidate for candidate in (*ALIASES, SHAPER, TOOL_PARSER, *known) if not candidate.startswith("_")
        ]
        close = difflib.get_close_matches(option, candidates, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "See the engine arguments of vLLM."
        raise EngineStartError(f"Unknown option {option!r} of the engine vllm.", hint=hint)


def _kv_bytes(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise EngineStartError(f"Option 'kv_space_gib' is refused: {value!r} is not a number of GiB above 0.")
    return int(value * GIB)
