"""The engine seam: what Harness needs from anything that turns prompts into tokens.

    start() -> EngineLimits          slow; EngineStartError says what to do about a failure
    render(prompt, sampling)         chat template + tokenisation, off the event loop; exact prompt length
    generate(request) -> events      for each answer (`Sampling.n`) Delta*, then exactly one Finished, those of several
                                     answers mixed; or an EngineError is raised
    abort(id)                        frees slots and memory at the end of the current step, and the stream ends without
                                     Finished; unknown ids are ignored
    aclose()                         idempotent; no process or file is left behind

An engine knows no tenants and no tiers; of a contract it may hear the deadline and `Terms`. Closing the `generate`
iterator early is an abort. If `EngineLimits.resumes`, an answer that was cut short can go on (`EngineRequest.produced`)
under the same id and as soon as the iterator is closed, also on another engine that was built from the same options.
One contract test (`tests/engines/contract.py`) runs over every engine.

Errors:

    EngineError
    ├── EngineStartError     start() failed; `hint` tells the operator what to do
    ├── EngineDeadError      the whole engine is gone; every stream ends with it
    ├── RequestFailedError   this request failed, the engine lives
    └── PromptError          the input cannot be rendered or is out of range; `param` names the field
        └── PromptTooLongError   `tokens` and `limit` say by how much
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec

from scheduler.core.types import PoolCapacity, StepReport


class EngineError(Exception):
    """Root of what an engine raises."""


class EngineStartError(EngineError):
    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class EngineDeadError(EngineError):
    pass


class RequestFailedError(EngineError):
    pass


class PromptError(EngineError):
    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(PromptError):
    """`at_least`: the prompt was so long that its tokens were not counted; it has no fewer than `tokens`.

    `count` says how many it has, for people.
    """

    def __init__(self, tokens: int, limit: int, *, param: str, at_least: bool = False) -> None:
        self.count = f"at least {tokens}" if at_least else str(tokens)
        super().__init__(f"The prompt has {self.count} tokens; the model takes at most {limit}.", param=param)
        self.tokens = tokens
        self.limit = limit


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the started engine can hold, and the operating-system processes that belong to it.

    `resumes`: its deltas carry token ids, and it takes `EngineRequest.produced`.
    """

    capacity: PoolCapacity
    vocab_size: int
    pids: tuple[int, ...] = ()
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A validated conversation: dicts with `role` and `content`, as the OpenAI wire names them.

    `simulate` is the request's field of that name, so that `render` refuses a bad one before anything is queued.
    """

    messages: tuple[Mapping[str, Any], ...]
    simulate: Mapping[str, Any] | None = None


class JsonFormat(msgspec.Struct, frozen=True, array_like=True):
    """Each answer is to be a JSON document: one that `schema` (JSON Schema, as JSON text) describes, "" any object."""

    schema: str = ""


class Tools(msgspec.Struct, frozen=True, array_like=True):
    """The functions that an answer may call.

    `functions`: JSON text, an array of the tools as OpenAI's wire has them, for the model's template. `choice`: `auto`,
    `required` or, as `named:NAME`, the one that must be called. `parallel`: an answer may hold several calls.
    """

    functions: str
    choice: str = "auto"
    parallel: bool = True


class Sampling(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How to answer. It travels whole, from the web to the engine.

    `max_tokens`: of each answer; None means as many as the model has room for. `n`: how many answers. `logprobs`: how
    many likely tokens are told beside each one that was chosen, 0 to 20; None: no log-probabilities.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    format: JsonFormat | None = None
    tools: Tools | None = None


def compact(tokens: Iterable[int]) -> array[int]:
    """Token ids of a prompt that waits, at four bytes each: a list of numbers holds nine times as much."""
    return array("I", tokens)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt ready for the engine. `room`: tokens left for output.

    `payload` belongs to the engine that made it, or to one that was built from the same options after it.
    """

    prompt_tokens: int
    room: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Terms:
    """What an engine may know of a request's contract, beside its deadline, to divide its own steps.

    `rank`: smaller is more important. `tpot`: seconds per token. `whole`: the deadline is that of the last token, else
    that of the first.
    """

    rank: int
    tpot: float
    whole: bool


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What `generate` gets. `sampling.max_tokens` is set. `priority`: smaller first. `arrival`: monotonic seconds.

    With `terms`, `priority` is the deadline in microseconds of the monotonic clock.

    `produced`: the tokens that an earlier run of the request has delivered. The answer goes on after them; all counts
    (`max_tokens`, `Delta.tokens`, `Finished`) are those of the whole answer, as if it had not been interrupted.
    """

    id: str
    rendered: Rendered
    sampling: Sampling
    priority: int
    arrival: float
    cache_salt: str | None = None
    simulate: Mapping[str, Any] | None = None
    produced: Sequence[int] = ()
    terms: Terms | None = None


class LikelyToken(msgspec.Struct, frozen=True, array_like=True):
    """A token with its log-probability. `bytes` None: it has none of its own."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token of an answer, and the most likely ones at its place, the likeliest first."""

    chosen: LikelyToken
    top: tuple[LikelyToken, ...] = ()


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True):
    """A part of the tool call `index` of an answer. The first one has `id` and `name`; all `arguments` are one text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


def joined(parts: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """The parts of tool calls with each call in one, in the order in which they began."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for part in parts:
        calls.setdefault(part.index, []).append(part)
    return tuple(
        ToolCallDelta(index, some[0].id, some[0].name, "".join(part.arguments for part in some))
        for index, some in calls.items()
    )


@dataclass(slots=True)
class Delta:
    """What one step has made of one answer. `tokens`: how many it has produced so far (cumulative, exact).

    `token_ids`: the new tokens. `cached_tokens`: those of the prompt that were not computed anew. A text that is empty
    may hold back the beginning of a character: an answer cannot go on from there. `index`: which of the answers.
    """

    text: str
    tokens: int
    token_ids: Sequence[int] = ()
    cached_tokens: int = 0
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(slots=True)
class Finished:
    """The end of one answer. Token counts are the engine's own and exact.

    `text` and `logprobs` are what was still held back because a stop string might have begun in it.
    """

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    text: str = ""
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


EngineEvent = Delta | Finished

StepListener = Callable[[StepReport], None]


@runtime_checkable
class Engine(Protocol):
    """See the module text. `on_step` is called on the event loop once per engine step."""

    async def start(self) -> EngineLimits: ...

    async def render(self, prompt: ChatPrompt, sampling: Sampling) -> Rendered: ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineEvent]: ...

    async def abort(self, request_id: str) -> None: ...

    async def aclose(self) -> None: ...
