"""What the simulated engine reads and answers: words as tokens, numbered words back, or what `simulate` says.

A token of a prompt is a whitespace-separated word of the text of a message; words do not join across messages or
parts, roles do not count. An answer is `w0 w1 …`, one token a word, until `max_tokens` or a stop string: without
`simulate` it has no end of its own. An end that `simulate` sets is kept also under `ignore_eos`.

Where a format is asked for, the answer is the smallest document that it describes; where a tool must be called, or
`simulate` says so, it is that call, with the smallest arguments that its parameters describe.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from scheduler.engines.base import (
    ChatPrompt,
    FinishReason,
    LikelyToken,
    PromptError,
    Sampling,
    TokenLogprob,
    ToolCallDelta,
    Tools,
)
from scheduler.engines.simulated.document import NoDocument, smallest
from scheduler.engines.simulated.machine import End

VOCABULARY = 32_000
PIECE = 8  # characters of a document in a token

Tokens = Annotated[int, msgspec.Meta(ge=0)]


def token_ids(prompt: ChatPrompt) -> tuple[int, ...]:
    """The prompt's tokens. A word has the same id in every process. PromptError for content that is not text."""
    return tuple(
        zlib.crc32(word.encode("utf-8", "surrogatepass")) % VOCABULARY
        for text in _texts(prompt)
        for word in text.split()
    )


def _texts(prompt: ChatPrompt) -> Iterator[str]:
    for index, message in enumerate(prompt.messages):
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text
            elif part is not None:
                raise PromptError("This model takes text only.", param=f"messages[{index}].content")


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers to report instead of the true ones."""

    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call to answer with; `arguments` are the exact deltas, one token each."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: tuple[str, ...] = ("{}",)


class Simulate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `simulate` field of a request. A fault `*_at: k` comes when k tokens have been made, also if k is the last.

    Of several faults the earliest comes; at the same k: crash, out of memory, failure, hang.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None  # end by itself after so many
    text: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] | None = None  # exact deltas, one token each
    pace: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 0.0  # extra seconds before each token
    fail_at: Tokens | None = None
    hang_at: Tokens | None = None
    crash_at: Tokens | None = None
    oom_at: Tokens | None = None
    usage: Usage = Usage()
    tool_calls: Annotated[tuple[Call, ...], msgspec.Meta(min_length=1)] | None = None  # after `text`

    def fault(self) -> tuple[int, End] | None:
        """The fault that comes first, and after how many tokens."""
        faults = (
            (self.crash_at, End.CRASH),
            (self.oom_at, End.OOM),
            (self.fail_at, End.FAIL),
            (self.hang_at, End.HANG),
        )
        return min(((at, end) for at, end in faults if at is not None), key=lambda fault: fault[0], default=None)


def parse_simulate(value: Mapping[str, Any] | None) -> Simulate:
    """Check a `simulate` field. Raises PromptError with param `simulate` that names the bad part."""
    try:
        return msgspec.convert({} if value is None else dict(value), Simulate)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise PromptError(f"simulate is not valid: {error}.", param="simulate") from error


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, known in full before it runs: `tokens` and `end` say how it ends, `cut` where its text does."""

    tokens: int
    end: End
    texts: Sequence[str] | None = None  # None: numbered words
    cut: int | None = None  # characters before the stop string; None if no stop string ends it
    held: int = 0  # characters to hold back because a stop string might begin in them
    calls: Sequence[ToolCallDelta] = ()  # after the texts, one token each

    @property
    def reason(self) -> FinishReason:
        """Why it ends, if it ends by itself."""
        if self.end is End.LENGTH:
            return FinishReason.LENGTH
        return FinishReason.TOOL_CALLS if self.calls else FinishReason.STOP

    def text(self, index: int) -> str:
        """The text of token `index`, from 0."""
        if self.texts is not None:
            return self.texts[index] if index < len(self.texts) else ""
        return f" w{index}" if index else "w0"

    def call(self, index: int) -> ToolCallDelta | None:
        """The part of a tool call that token `index` is."""
        before = len(self.texts or ())
        return self.calls[index - before] if self.calls and index >= before else None


def compose(sampling: Sampling, simulate: Simulate, name: str = "") -> Answer:
    """The answer to a request whose `max_tokens` is set. `name`: of the answer, for the ids of its calls.

    Raises PromptError for a format or parameters that describe nothing.
    """
    limit = sampling.max_tokens
    assert limit is not None, "the worker sets max_tokens"
    texts, calls = _content(sampling, simulate, name)
    own_end = len(texts or ()) + len(calls) if texts or calls else limit + 1
    own_end = min(simulate.tokens or limit + 1, own_end)
    plain = Answer(min(limit, own_end), End.STOP if own_end <= limit else End.LENGTH, texts, calls=calls)
    stopped = _until_stop(plain, tuple(stop for stop in sampling.stop if stop))
    fault = simulate.fault()
    if fault is None or fault[0] > stopped.tokens:
        return stopped
    return replace(stopped, tokens=fault[0], end=fault[1], cut=None)


def _content(sampling: Sampling, simulate: Simulate, name: str) -> tuple[Sequence[str] | None, Sequence[ToolCallDelta]]:
    """Texts and tool calls: as `simulate` says, else what the request must be answered with; neither is words."""
    if simulate.text or simulate.tool_calls:
        calls = simulate.tool_calls or ()
        if sampling.tools is not None and not sampling.tools.parallel:
            calls = calls[:1]
        return simulate.text or (), _deltas(calls, name)
    tools = sampling.tools
    if tools is not None and tools.choice != "auto":
        return (), _deltas([_forced_call(tools)], name)
    if sampling.format is not None:
        return _pieces(_document(sampling.format.schema or '{"type": "object"}', "response_format")), ()
    return None, ()


def _forced_call(tools: Tools) -> Call:
    functions = [tool["function"] for tool in msgspec.json.decode(tools.functions)]
    named = [one for one in functions if f"named:{one['name']}" == tools.choice]
    function = (named or functions)[0]
    parameters = function.get("parameters") or {"type": "object"}
    return Call(function["name"], _pieces(_document(msgspec.json.encode(parameters).decode(), "tools")))


def _document(schema: str, param: str) -> str:
    try:
        return msgspec.json.encode(smallest(msgspec.json.decode(schema))).decode()
    except NoDocument as error:
        raise PromptError(f"The schema cannot be answered: {error}.", param=param) from error


def _pieces(text: str) -> tuple[str, ...]:
    return tuple(text[at : at + PIECE] for at in range(0, len(text), PIECE))


def _deltas(calls: Iterable[Call], name: str) -> tuple[ToolCallDelta, ...]:
    """Each call as its head (id and name), then its arguments."""
    deltas: list[ToolCallDelta] = []
    for index, call in enumerate(calls):
        unique = hashlib.sha256(f"{name}/{index}".encode()).hexdigest()[:24]
        deltas.append(ToolCallDelta(index, f"call_{unique}", call.name))
        deltas += [ToolCallDelta(index, arguments=part) for part in call.arguments]
    return tuple(deltas)


def _until_stop(answer: Answer, stops: tuple[str, ...]) -> Answer:
    """The answer as the first stop string ends it: the token that completes it is the last."""
    if not stops:
        return answer
    held = max(len(stop) for stop in stops) - 1
    so_far = ""
    for index in range(answer.tokens):
        before = max(len(so_far) - held, 0)
        so_far += answer.text(index)
        found = [at for stop in stops if (at := so_far.find(stop, before)) >= 0]
        if found:
            return replace(answer, tokens=index + 1, end=End.STOP, cut=min(found), held=held, calls=())
    return replace(answer, held=held)


class Teller:
    """Turns the tokens of an answer into deltas that never show a stop string, nor the beginning of one.

    `told`: how many tokens an earlier run has delivered; with stop strings there is none.
    """

    def __init__(self, answer: Answer, told: int = 0) -> None:
        self._answer = answer
        self._told = 0  # characters delivered
        self._kept = ""  # characters held back
        self.tokens = told

    def next(self) -> str:
        """The delta of the next token; empty if all of it is held back."""
        answer = self._answer
        self._kept += answer.text(self.tokens)
        self.tokens += 1
        stopped = answer.cut is not None and self.tokens == answer.tokens
        ready = 0 if stopped else max(len(self._kept) - answer.held, 0)
        delta, self._kept = self._kept[:ready], self._kept[ready:]
        self._told += len(delta)
        return delta

    def rest(self) -> str:
        """What was held back and may be shown at the end."""
        cut = self._answer.cut
        return self._kept if cut is None else self._kept[: cut - self._told]


def likely(text: str, alternatives: int) -> TokenLogprob:
    """The made-up log-probabilities of a token: the chosen one is the likeliest."""
    others = [f"{text}~{number}" for number in range(1, alternatives)]
    tokens = [LikelyToken(one, -0.125 * 2.0**place, tuple(one.encode())) for place, one in enumerate([text, *others])]
    return TokenLogprob(tokens[0], tuple(tokens[:alternatives]))
