"""What the simulated engine reads and answers: words as tokens, numbered words back, or what `simulate` says.

A token of a prompt is a whitespace-separated word of the text of a message; words do not join across messages or
parts, roles do not count. An answer is `w0 w1 …`, one token a word, until `max_tokens` or a stop string: without
`simulate` it has no end of its own. An end that `simulate` sets is kept also under `ignore_eos`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from scheduler.engines.base import ChatPrompt, PromptError, Sampling
from scheduler.engines.simulated.machine import End

VOCABULARY = 32_000

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

    def text(self, index: int) -> str:
        """The text of token `index`, from 0."""
        if self.texts is not None:
            return self.texts[index]
        return f" w{index}" if index else "w0"


def compose(sampling: Sampling, simulate: Simulate) -> Answer:
    """The answer to a request whose `max_tokens` is set."""
    limit = sampling.max_tokens
    assert limit is not None, "the worker sets max_tokens"
    own_end = min(simulate.tokens or limit + 1, len(simulate.text) if simulate.text else limit + 1)
    plain = Answer(min(limit, own_end), End.STOP if own_end <= limit else End.LENGTH, simulate.text)
    stopped = _until_stop(plain, tuple(stop for stop in sampling.stop if stop))
    fault = simulate.fault()
    if fault is None or fault[0] > stopped.tokens:
        return stopped
    return Answer(fault[0], fault[1], stopped.texts, held=stopped.held)


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
            return Answer(index + 1, End.STOP, answer.texts, cut=min(found), held=held)
    return Answer(answer.tokens, answer.end, answer.texts, held=held)


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
