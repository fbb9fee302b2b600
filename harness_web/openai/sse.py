"""An answer as server-sent events.

    (headers)                            with the first engine event: until then every failure is a status
    data: {… delta: {role, content: ""}}
    data: {… delta: {content: "…"}}      one for each text; texts that piled up behind a slow client are one
    data: {… delta: {}, finish_reason}   the only chunk whose finish_reason is not null
    data: {… choices: [], usage}         only if asked for; every other chunk then says "usage": null
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
    Usage,
    acceptance,
    batch_info_of,
    completion_id,
    failure,
    refusal,
    usage_of,
)
from harness_web.openai.exchange import Exchange
from harness_web.openai.headers import Header
from harness_web.openai.schema import ChatRequest
from scheduler.gateway import Accepted, Delta, Done, Event, Failed, Refused

SILENCE = 15.0  # seconds after which a comment keeps the connection open
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder()


class ChunkDelta(msgspec.Struct, omit_defaults=True):
    role: str = ""
    content: str | None = None


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int = 0
    delta: ChunkDelta
    logprobs: None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    batch_info: BatchInfo | msgspec.UnsetType = msgspec.UNSET


class Chunks:
    """Writes the chunks of one answer. What they share is encoded once; a text costs one string."""

    _MARK = "\x00"

    def __init__(self, id_: str, created: int, model: str, *, include_usage: bool) -> None:
        self._id = id_
        self._created = created
        self._model = model
        self._include_usage = include_usage
        sample = self._choice(ChunkChoice(delta=ChunkDelta(content=self._MARK)))
        self._before, self._after = sample.split(_json.encode(self._MARK), 1)

    def role(self) -> bytes:
        return self._choice(ChunkChoice(delta=ChunkDelta(role="assistant", content="")))

    def text(self, text: str) -> bytes:
        return self._before + _json.encode(text) + self._after

    def end(self, done: Done) -> bytes:
        """Everything that follows the last text."""
        last = ChunkChoice(delta=ChunkDelta(), finish_reason=done.finish_reason)
        batch_info = batch_info_of(done)
        if not self._include_usage:
            return self._choice(last, batch_info=batch_info) + DONE
        return self._choice(last) + self._event((), usage=usage_of(done), batch_info=batch_info) + DONE

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
            choices=choices,
            usage=usage,
            batch_info=batch_info,
        )
        return b"data: " + _json.encode(chunk) + b"\n\n"


class StreamedAnswer:
    """One stream. `keep_alive` runs beside it."""

    def __init__(self, exchange: Exchange, chat: ChatRequest, *, silence: float = SILENCE) -> None:
        self._exchange = exchange
        self._chunks = Chunks(completion_id(exchange), int(time.time()), chat.model, include_usage=chat.include_usage)
        self._model = chat.model
        self._silence = silence
        self._headers: tuple[Header, ...] = ()
        self._begun = False
        self._role_sent = False
        self._writing = asyncio.Lock()  # the answer and the comments share a connection
        self._loop = asyncio.get_running_loop()
        self._written_at = self._loop.time()

    async def take(self, event: Event) -> None:
        """Raises ApiError where the event is the end of a request that failed."""
        match event:
            case Delta():
                await self._write(self._texts(event.text))
            case Done():
                await self._write(self._texts(event.text) + self._chunks.end(event), more=False)
            case Accepted():
                self._headers = acceptance(event)
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

    def _texts(self, text: str) -> bytes:
        role = b"" if self._role_sent else self._chunks.role()
        self._role_sent = True
        return role + self._chunks.text(text) if text else role

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        async with self._writing:
            if not self._begun:
                self._begun = True
                await self._exchange.begin_stream(self._headers)
            if data:
                await self._exchange.write(data, more=more)
            self._written_at = self._loop.time()
