"""Why vLLM did not start, in one sentence for the operator.

vLLM fails in two places: in this process while it checks its arguments (an exception), or in its own processes while
it loads (an exception that says "see above", and a stack trace in the engine's log).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from scheduler.engines.base import EngineStartError


class _Known(NamedTuple):
    """A cause by a pattern in its text; named groups of the pattern fill the sentence and the hint."""

    pattern: re.Pattern[str]
    message: str
    hint: str


_MEMORY_HINT = "Lower kv_space_gib (on a GPU: gpu_memory_utilization), choose a smaller model, or free memory."
_KNOWN = (
    _Known(
        re.compile(r"\((?P<free>[\d.]+)/[\d.]+ GiB\) on kv cache allocation .*? for kv \((?P<asked>[\d.]+)", re.S),
        "There is not enough memory for the KV cache: {asked} GiB are asked for, {free} GiB are free.",
        _MEMORY_HINT,
    ),
    _Known(
        re.compile(r"model's max seq len \((?P<length>\d+)\).*?maximum model length is (?P<possible>\d+)", re.S),
        "The KV cache is too small for one request of the model's full length of {length} tokens.",
        "Raise kv_space_gib (on a GPU: gpu_memory_utilization), or set max_model_len to at most {possible}.",
    ),
    _Known(
        re.compile(r"model's max seq len \((?P<length>\d+)\)"),
        "The KV cache is too small for one request of the model's full length of {length} tokens.",
        "Raise kv_space_gib (on a GPU: gpu_memory_utilization), or lower max_model_len.",
    ),
    _Known(
        re.compile(r"No available memory for the cache blocks|on startup is less than desired|OutOfMemoryError"),
        "There is not enough memory for the model and its KV cache.",
        _MEMORY_HINT,
    ),
    _Known(
        re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|MemoryError", re.I),
        "There is not enough memory for the model.",
        _MEMORY_HINT,
    ),
    _Known(
        re.compile(r"LocalEntryNotFoundError|HFValidationError|couldn't find (it|them) in the cached files"),
        "The model is not on this machine.",
        "Give its folder in the option `path`, or put it into the local model cache first.",
    ),
    _Known(
        re.compile(r"Invalid repository ID or local directory specified: '(?P<folder>[^']*)'"),
        "{folder} does not hold a model: it has no config.json.",
        "Give the folder that holds config.json, the weights and the tokenizer.",
    ),
    _Known(
        re.compile(r"Cannot find any model weights|SafetensorError|InvalidHeaderDeserialization|HeaderTooLarge"),
        "The model's weights are missing or damaged.",
        "Copy the model folder again.",
    ),
    _Known(
        re.compile(r"Failed to infer device type|No CUDA GPUs are available|no NVIDIA driver", re.I),
        "There is no device that this build of vLLM can use.",
        "Check the GPU driver, or install the CPU build of vLLM.",
    ),
    _Known(
        re.compile(r"ChatTemplateResolutionError|does not define one|no chat template", re.I),
        "The model has no chat template.",
        "Use an instruct model, or put chat_template.jinja into the model folder.",
    ),
)
_KILLED = re.compile(r"Failed core proc\(s\): \{[^}]*: -(?P<signal>\d+)")
_EXCEPTION = re.compile(r"^(?:\(.*?\) )?(?:[\w.]+\.)?(?P<kind>[A-Z]\w*(?:Error|Exception|Exit)): (?P<text>.+)$", re.M)
_SEE_LOG = "The engine's log in the data directory (run/engine-*.log) has the details."


def explain(error: BaseException, log: str, names: Mapping[str, str]) -> EngineStartError:
    """The cause in a sentence. `log`: the engine's log. `names`: vLLM's argument names -> ours."""
    refused = _refused_option(error, names)
    if refused is not None:
        return refused
    text = f"{type(error).__name__}: {error}"
    for known in _KNOWN:
        match = known.pattern.search(f"{text}\n{log}")
        if match:
            groups = match.groupdict()
            return EngineStartError(known.message.format(**groups), hint=known.hint.format(**groups))
    killed = _KILLED.search(text)
    if killed:
        return EngineStartError(
            f"The engine was ended by signal {killed['signal']} while it started.",
            hint=f"Was there enough memory? {_SEE_LOG}",
        )
    return EngineStartError(f"vLLM could not start: {_last_exception(log) or _sentence(text)}", hint=_SEE_LOG)


def _refused_option(error: BaseException, names: Mapping[str, str]) -> EngineStartError | None:
    """What pydantic found wrong with an argument, by the name that the operator gave it."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return None
    first: dict[str, Any] = errors()[0]
    location = [str(part) for part in first.get("loc", ())]
    message = _sentence(str(first.get("msg", "")).removeprefix("Value error, "))
    if any(known.pattern.search(str(first.get("msg", ""))) for known in _KNOWN):
        return None
    if not location:
        return EngineStartError(f"vLLM refuses the options: {message}", hint="Correct the deployment's options.")
    name = names.get(location[0], location[0])
    return EngineStartError(
        f"Option {name!r} is refused: {message} It is {first.get('input')!r}.",
        hint="Correct the deployment's options.",
    )


def _last_exception(log: str) -> str:
    """The cause that the last stack trace of the log ends with."""
    found = _EXCEPTION.findall(log)
    return _sentence(found[-1][1]) if found else ""


def _sentence(text: str) -> str:
    """The first sentence, with its full stop."""
    first = re.split(r"(?<=[.!?])\s|\n", text.strip(), maxsplit=1)[0][:300]
    return first if first.endswith((".", "!", "?")) else f"{first}."
