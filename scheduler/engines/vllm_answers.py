"""vLLM's outputs of one request as events of its answers: text, log-probabilities and tool calls.

This module does not import vLLM: `api` is what `vllm.py` has loaded of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.engines.base import (
    Delta,
    EngineEvent,
    Finished,
    FinishReason,
    LikelyToken,
    RequestFailedError,
    Sampling,
    TokenLogprob,
    ToolCallDelta,
    Tools,
)
from scheduler.engines.logprobs import LogprobTail

LEAST_LOGPROB = -9999.0  # JSON has no infinity
THEIR_PREFIX, OUR_PREFIX = "chatcmpl-tool-", "call_"  # of the ids of tool calls


class AnswerReader:
    """One answer. `parse`: reads tool calls out of its text, if it may have any."""

    def __init__(
        self, index: int, sampling: Sampling, produced: int, spell: TokenSpeller, parse: ToolReader | None
    ) -> None:
        self._index = index
        self._alternatives = sampling.logprobs
        self._tail = LogprobTail(bool(sampling.stop))
        self._tokens = produced
        self._spell = spell
        self._parse = parse

    def read(self, output: Any, prompt_tokens: int, cached: int) -> Iterator[EngineEvent]:
        """What vLLM's `output` says: a delta, the end, or both. RequestFailedError: the engine gave the request up."""
        self._tokens += len(output.token_ids)
        ended = output.finish_reason is not None
        text: str = output.text
        calls: tuple[ToolCallDelta, ...] = ()
        if self._parse is not None:
            text, calls = self._parse.read(text, output.token_ids, ended)
        if output.token_ids or calls:
            logprobs = self._tail.told(self._logprobs(output), text)
            yield Delta(text, self._tokens, output.token_ids, cached, self._index, logprobs, calls)
            text = ""
        if ended and (reason := self._reason(output.finish_reason)) is not None:
            rest = self._tail.rest(text, cut=isinstance(output.stop_reason, str))
            yield Finished(reason, prompt_tokens, self._tokens, cached, text, self._index, rest)

    def _reason(self, theirs: str) -> FinishReason | None:
        """None: it was aborted."""
        if theirs == "abort":
            return None
        try:
            reason = FinishReason(theirs)
        except ValueError as error:
            raise RequestFailedError(f"The engine ended the request: {theirs}.") from error
        called = self._parse is not None and self._parse.called
        return FinishReason.TOOL_CALLS if called and reason is FinishReason.STOP else reason

    def _logprobs(self, output: Any) -> list[TokenLogprob]:
        if self._alternatives is None or not output.logprobs:
            return []
        return [
            self._token(token, likely, self._alternatives)
            for token, likely in zip(output.token_ids, output.logprobs, strict=False)
        ]

    def _token(self, token: int, likely: dict[int, Any], alternatives: int) -> TokenLogprob:
        spelled = {one: self._spell(one, entry.decoded_token, entry.logprob) for one, entry in likely.items()}
        ranked = sorted(likely, key=lambda one: likely[one].rank or 0)
        return TokenLogprob(spelled[token], tuple(spelled[one] for one in ranked[:alternatives]))


class TokenSpeller:
    """A token of one tokenizer with its text and its bytes, which may be a part of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._by_bytes = "Ġ" in tokenizer.get_vocab()  # how byte-level vocabularies write a space

    def __call__(self, token: int, text: str | None, logprob: float) -> LikelyToken:
        return LikelyToken(text or "", max(logprob, LEAST_LOGPROB), self._bytes(token, text or ""))

    def _bytes(self, token: int, text: str) -> tuple[int, ...] | None:
        if self._by_bytes:
            table, written = byte_table(), self._tokenizer.convert_ids_to_tokens(token)
            if all(letter in table for letter in written):
                return tuple(table[letter] for letter in written)
        return None if "\ufffd" in text else tuple(text.encode())


@functools.cache
def byte_table() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable ones as themselves, the others from U+0100 on, in order."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in themselves]
    return {chr(byte): byte for byte in themselves} | {chr(256 + place): byte for place, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A request that may call tools, in vLLM's words. `constraint`: what the answer must look like, or None."""

    parser: Any
    request: Any
    constraint: Any
    tokenizer: Any

    def reader(self) -> ToolReader:
        """For one answer: readers remember what they have read."""
        return ToolReader(self.parser(self.tokenizer, self.request.tools), self.request)

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether control tokens that begin a call must stay in the text, for the reader to find."""
        return not self.request.skip_special_tokens


def tool_request(api: Any, parser: Any, tokenizer: Any, tools: Tools, constraint: Any) -> ToolRequest:
    """`parser`: vLLM's class for the way in which the model calls tools. `constraint`: the format of other answers."""
    choice: Any = tools.choice
    if choice.startswith("named:"):
        choice = {"type": "function", "function": {"name": choice.removeprefix("named:")}}
    request = api.ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}],
        tools=json.loads(tools.functions),
        tool_choice=choice,
        parallel_tool_calls=tools.parallel,
    )
    request.structured_outputs = constraint
    request = parser(tokenizer, request.tools).adjust_request(request)
    if request.structured_outputs is not None and request.structured_outputs.structural_tag is not None:
        request.structured_outputs.structural_tag = _without_blanks(request.structured_outputs.structural_tag)
    return ToolRequest(parser, request, request.structured_outputs, tokenizer)


def _without_blanks(tag: str) -> str:
    """The structural tag with at most one blank in a row in its JSON: a model that likes them would write no more."""

    def bound(entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {"max_whitespace_cnt": 1} if entry.get("type") == "json_schema" else entry

    return json.dumps(json.loads(tag, object_hook=bound))


class ToolReader:
    """Reads the tool calls of one answer as its text comes. `called`: there is one."""

    def __init__(self, parser: Any, request: Any) -> None:
        self._parser = parser
        self._request = request
        self._known: set[int] = set()
        self.called = False

    def read(self, text: str, token_ids: Sequence[int], ended: bool) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """The text that is no call, and the new parts of calls."""
        message = self._parser.parse_delta(text, list(token_ids), self._request, [], finished=ended)
        if message is None:
            return "", ()
        calls = tuple(self._call(part) for part in message.tool_calls or ())
        self.called = self.called or bool(calls)
        return message.content or "", calls

    def _call(self, part: Any) -> ToolCallDelta:
        """OpenAI's shape: id and name in the first part of a call, and only there."""
        function = part.function
        arguments = (function.arguments if function else None) or ""
        if part.index in self._known:
            return ToolCallDelta(part.index, arguments=arguments)
        self._known.add(part.index)
        id_ = (part.id or "").replace(THEIR_PREFIX, OUR_PREFIX, 1)
        return ToolCallDelta(part.index, id_, (function.name if function else None) or "", arguments)
