"""What a chat request is answered with: the pieces of a body, and the answer in one piece."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from harness_web.openai.errors import ApiError, unknown_model
from harness_web.openai.exchange import Exchange
from harness_web.openai.headers import Header, disclosure, rate_limits
from harness_web.openai.schema import ChatRequest
from scheduler.gateway import (
    Accepted,
    Delta,
    Done,
    Event,
    Failed,
    Refused,
    TokenLogprob,
    ToolCallDelta,
    joined,
)


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class BatchInfo(msgspec.Struct):
    """The decision that admitted the request, and its times in seconds."""

    batch_id: str
    batch_size: float  # mean number of sequences per step while it ran
    wait_time: float  # arrival to dispatch
    compute_time: float  # dispatch to last token


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: CalledFunction


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: tuple[ToolCall, ...] | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: tuple[int, ...] | None
    top_logprobs: tuple[TopLogprob, ...]


class Logprobs(msgspec.Struct):
    content: tuple[ContentLogprob, ...]
    refusal: None = None


class Choice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: Logprobs | None
    finish_reason: str


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: tuple[Choice, ...]
    service_tier: str
    usage: Usage
    batch_info: BatchInfo


def completion_id(exchange: Exchange) -> str:
    """The same randomness as the request id, so that either finds the other."""
    return exchange.id.replace("req_", "chatcmpl-", 1)


def usage_of(done: Done) -> Usage:
    return Usage(
        done.prompt_tokens,
        done.completion_tokens,
        done.prompt_tokens + done.completion_tokens,
        PromptDetails(done.cached_tokens),
        CompletionDetails(),
    )


def batch_info_of(done: Done) -> BatchInfo:
    batch = done.batch
    return BatchInfo(batch.batch_id, batch.batch_size, batch.wait_time, batch.compute_time)


def refusal(refused: Refused, model: str) -> ApiError:
    """A refusal as the caller sees it; `model` is the name that was asked for."""
    if refused.reason == "model_not_served":
        return unknown_model(model)
    headers = (*rate_limits(refused.limits), *disclosure(refused.degradation))
    return ApiError(
        refused.reason, refused.message, param=refused.param, retry_after=refused.retry_after, headers=headers
    )


def acceptance(accepted: Accepted) -> tuple[Header, ...]:
    """The headers of an answer, as they are known once the request is accepted."""
    return (*rate_limits(accepted.limits), *disclosure(accepted.degradation))


def failure(failed: Failed) -> ApiError:
    return ApiError(failed.reason, failed.message)


def logprobs_of(tokens: Iterable[TokenLogprob]) -> Logprobs:
    return Logprobs(
        tuple(
            ContentLogprob(
                token.chosen.token,
                token.chosen.logprob,
                token.chosen.bytes,
                tuple(TopLogprob(one.token, one.logprob, one.bytes) for one in token.top),
            )
            for token in tokens
        )
    )


class Gathered:
    """One answer as it comes in parts."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._calls: list[ToolCallDelta] = []
        self._finish_reason = ""

    def add(self, part: Delta | Done) -> None:
        self._texts.append(part.text)
        self._logprobs += part.logprobs
        self._calls += part.tool_calls if isinstance(part, Delta) else ()
        self._finish_reason = part.finish_reason

    def choice(self, index: int, *, logprobs: bool) -> Choice:
        text, calls = "".join(self._texts), joined(self._calls)
        message = AssistantMessage(content=text or (None if calls else ""))
        if calls:
            message.tool_calls = tuple(
                ToolCall(id=call.id, function=CalledFunction(call.name, call.arguments)) for call in calls
            )
        return Choice(
            index=index,
            message=message,
            logprobs=logprobs_of(self._logprobs) if logprobs else None,
            finish_reason=self._finish_reason,
        )


class WholeAnswer:
    """Gathers the answers; headers and body go out with the last event."""

    def __init__(self, exchange: Exchange, chat: ChatRequest) -> None:
        self._exchange = exchange
        self._model = chat.model
        self._logprobs = bool(chat.logprobs)
        self._created = int(time.time())
        self._headers: tuple[Header, ...] = ()
        self._service_tier = ""
        self._answers = [Gathered() for _ in range(chat.answers)]

    async def take(self, event: Event) -> None:
        """Raises ApiError where the event is the end of a request that failed."""
        match event:
            case Delta():
                self._answers[event.index].add(event)
            case Accepted():
                self._headers = acceptance(event)
                self._service_tier = event.service_tier
            case Done():
                self._answers[event.index].add(event)
                body = msgspec.json.encode(self._completion(event))
                await self._exchange.respond(200, body, headers=self._headers)
            case Refused():
                raise refusal(event, self._model)
            case Failed():
                raise failure(event)

    def _completion(self, done: Done) -> Completion:
        return Completion(
            id=completion_id(self._exchange),
            created=self._created,
            model=self._model,
            choices=tuple(answer.choice(index, logprobs=self._logprobs) for index, answer in enumerate(self._answers)),
            service_tier=self._service_tier,
            usage=usage_of(done),
            batch_info=batch_info_of(done),
        )
