"""An answer as server-sent events.

    (headers)                                    with the first engine event: until then every failure is a status
    data: {… delta: {role, content: ""}}         the first one of an answer (`index`); of a tool call, content is null
    data: {… delta: {content: "…"}}              one for each text; texts that piled up behind a slow client are one
    data: {… delta: {tool_calls: [{index …}]}}   id and name in the first one of a call, then its arguments in parts
    data: {… delta: {}, finish_reason}           of each answer the only chunk whose finish_reason is not null
    data: {… choices: [], usage}                 only if asked for; every other chunk then says "usage": null
    data: [DONE]

A failure after the headers is one `data: {"error": …}` event, and then the end without `[DONE]`: clients raise on it
and cannot take the rest for a whole answer. `batch_info` is on the usage chunk, else on the one with finish_reason.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from harness_web.openai.completion import (
    BatchInfo,
    Logprobs,
    Usage,
    acceptance,
    batch_info_of,
    completion_id,
    failure,
    logprobs_of,
    refusal,
    usage_of,
)
from harness_web.openai.exchange import Exchange
from harness_web.openai.headers import Header
from harness_web.openai.schema import ChatRequest
from scheduler.gateway import Accepted, Delta, Done, Event, Failed, Refused, ToolCallDelta

SILENCE = 15.0  # seconds after which a comment keeps the connection open
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder()


class CallPart(msgspec.Struct):
    """The function of a tool call: its name in the first part only, then its arguments as they come."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str = ""


class ToolCallPart(msgspec.Struct, kw_only=True):
    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: CallPart


class ChunkDelta(msgspec.Struct):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: tuple[ToolCallPart, ...] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    delta: ChunkDelta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    service_tier: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    batch_info: BatchInfo | msgspec.UnsetType = msgspec.UNSET


class Chunks:
    """Writes the chunks of one stream. What they share is encoded once for each answer; a text costs one string."""

    _MARK = "\x00"

    def __init__(self, id_: str, created: int, model: str, *, include_usage: bool, logprobs: bool = False) -> None:
        self._id = id_
        self._created = created
        self._model = model
        self._include_usage = include_usage
        self._logprobs = logprobs
        self.service_tier = ""  # known when the request is accepted, which is before the first chunk
        self._around: dict[int, tuple[bytes, bytes]] = {}  # by answer: what stands around a text

    def part(self, part: Delta | Done) -> bytes:
        """What has come of an answer: text, tool calls, and the end of one that is not the last."""
        data = b""
        if self._logprobs and part.logprobs:
            delta = ChunkDelta(content=part.text)
            data = self._choice(ChunkChoice(index=part.index, delta=delta, logprobs=logprobs_of(part.logprobs)))
        elif part.text:
            data = self.text(part.index, part.text)
        if isinstance(part, Done):
            return data
        data += b"".join(self._call(part.index, call) for call in part.tool_calls)
        return data + self._choice(_last(part)) if part.finish_reason else data

    def role(self, index: int, *, calls: bool = False) -> bytes:
        """The first chunk of an answer; one that begins with a tool call has no content."""
        return self._choice(ChunkChoice(index=index, delta=ChunkDelta("assistant", None if calls else "")))

    def text(self, index: int, text: str) -> bytes:
        around = self._around.get(index)
        if around is None:
            sample = self._choice(ChunkChoice(index=index, delta=ChunkDelta(content=self._MARK)))
            before, after = sample.split(_json.encode(self._MARK), 1)
            around = self._around[index] = before, after
        return around[0] + _json.encode(text) + around[1]

    def end(self, done: Done) -> bytes:
        """Everything that follows the last text."""
        batch_info = batch_info_of(done)
        if not self._include_usage:
            return self._choice(_last(done), batch_info=batch_info) + DONE
        return self._choice(_last(done)) + self._event((), usage=usage_of(done), batch_info=batch_info) + DONE

    def _call(self, index: int, call: ToolCallDelta) -> bytes:
        part = ToolCallPart(index=call.index, function=CallPart(arguments=call.arguments))
        if call.id:
            part.id, part.type, part.function.name = call.id, "function", call.name
        return self._choice(ChunkChoice(index=index, delta=ChunkDelta(tool_calls=(part,))))

    def _choice(self, choice: ChunkChoice, *, batch_info: BatchInfo | msgspec.UnsetType = msgspec.UNSET) -> bytes:
        usage = None if self._include_usage else msgspec.UNSET
        return self._event((choice,), usage=usage, batch_info=batch_info)

    def _event(
        self,
        choices: tuple[ChunkChoice, ...],
        *,
        usage: Usage | msgspec.UnsetType | None,
        batch_info: BatchInfo | msgspec.UnsetType,
    ) -> bytes:
        chunk = Chunk(
            id=self._id,
            created=self._created,
            model=self._model,
            service_tier=self.service_tier,
            choices=choices,
            usage=usage,
            batch_info=batch_info,
        )
        return b"data: " + _json.encode(chunk) + b"\n\n"


def _last(part: Delta | Done) -> ChunkChoice:
    return ChunkChoice(index=part.index, delta=ChunkDelta(), finish_reason=part.finish_reason)


class StreamedAnswer:
    """One stream. `keep_alive` runs beside it."""

    def __init__(self, exchange: Exchange, chat: ChatRequest, *, silence: float = SILENCE) -> None:
        self._exchange = exchange
        self._chunks = Chunks(
            completion_id(exchange),
            int(time.time()),
            chat.model,
            include_usage=chat.include_usage,
            logprobs=bool(chat.logprobs),
        )
        self._model = chat.model
        self._silence = silence
        self._headers: tuple[Header, ...] = ()
        self._begun = False
        self._silent = set(range(chat.answers))  # answers whose role has not been sent
        self._writing = asyncio.Lock()  # the answer and the comments share a connection
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()

    async def take(self, event: Event) -> None:
        """Raises ApiError where the event is the end of a request that failed."""
        match event:
            case Delta():
                await self._write(self._parts(event))
            case Done():
                await self._write(self._parts(event) + self._chunks.end(event), more=False)
            case Accepted():
                self._headers = acceptance(event)
                self._chunks.service_tier = event.service_tier
            case Refused():
                raise refusal(event, self._model)
            case Failed():
                raise failure(event)

    async def keep_alive(self) -> None:
        """A comment after every silence, by the caller's `x-harness-keepalive`: `1` while still queued too, `0` never.

        Comments before the headers commit the status 200, so that a later refusal is an error event.
        """
        wish = self._exchange.header(b"x-harness-keepalive").strip()
        if wish == "0":
            await self._loop.create_future()
        while True:
            due = self._written_at + self._silence - self._loop.time()
            if due > 0:
                await asyncio.sleep(due)
            elif self._begun or wish == "1":
                await self._write(KEEP_ALIVE)
            else:
                self._written_at = self._loop.time()

    def _parts(self, part: Delta | Done) -> bytes:
        if part.index not in self._silent:
            return self._chunks.part(part)
        self._silent.remove(part.index)
        calls = isinstance(part, Delta) and bool(part.tool_calls) and not part.text
        return self._chunks.role(part.index, calls=calls) + self._chunks.part(part)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        async with self._writing:
            if not self._begun:
                self._begun = True
                await self._exchange.begin_stream(self._headers)
            if data:
                await self._exchange.write(data, more=more)
            self._written_at = self._loop.time()
