"""The console's websocket: JSON topics over one socket a page.

    client                                  server
    {"type": "subscribe", "topic": "overview", "stream": S, "seq": N}
                                            {"type": "snapshot", "stream", "seq", "view", "points", "resumed"}
                                            each second: {"type": "delta", "seq": previous + 1, "view", "point", …}
    {"type": "unsubscribe", "topic": "overview"}

A client that sees a gap subscribes again. Close codes: 4401 not signed in, 4403 not an operator, 4400 not understood.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import structlog
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.db import DatabaseError
from django.http import HttpRequest
from django.utils import translation

from harness_web.console import live, reports
from harness_web.console.access import Standing, standing
from harness_web.console.sentence import sentence

RECHECK = 1.5  # seconds: a logout or a lost role ends the socket within two
LEASE = 60.0  # seconds a socket lives on while the database cannot be asked
NOT_UNDERSTOOD = 4400
CLOSE_CODES = {Standing.SIGNED_OUT: 4401, Standing.NOT_OPERATOR: 4403}

log = structlog.get_logger(__name__)


class ConsoleConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # the package has no types
    """One operator's page. Nothing is sent before the session was checked, nor after it lost its right."""

    board = live.BOARD

    async def connect(self) -> None:
        self._watch: asyncio.Task[None] | None = None
        self._subscribed = False
        self._language = await database_sync_to_async(language_of)(self.scope)
        await self.accept()  # only an accepted socket can be closed with a code that the page can read
        current = await self._standing()
        if current is not Standing.OPERATOR:
            await self.close(CLOSE_CODES[current])
            return
        self._watch = asyncio.create_task(self._watch_rights())

    async def disconnect(self, code: int) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._unsubscribe()

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        if self._watch is None:  # refused in `connect`; what was already on its way is not answered
            return
        match decoded(text_data):
            case {"type": "subscribe", "topic": "overview", **rest}:
                await self._subscribe(rest.get("stream"), rest.get("seq"))
            case {"type": "unsubscribe", "topic": "overview"}:
                await self._unsubscribe()
            case _:
                await self.close(NOT_UNDERSTOOD)

    async def overview_frame(self, event: dict[str, Any]) -> None:
        """A frame from the channel layer."""
        if self._subscribed:
            await self._send(event["frame"])

    async def _subscribe(self, stream: Any, seq: Any) -> None:
        self._subscribed = True
        await self.channel_layer.group_add(self.board.group, self.channel_name)
        after = seq if isinstance(seq, int) else None
        await self._send(self.board.snapshot(stream if isinstance(stream, str) else None, after))

    async def _unsubscribe(self) -> None:
        self._subscribed = False
        await self.channel_layer.group_discard(self.board.group, self.channel_name)

    async def _send(self, frame: dict[str, Any]) -> None:
        await self.send(text_data=msgspec.json.encode(localised(frame, self._language)).decode())

    async def _standing(self) -> Standing:
        current: Standing = await database_sync_to_async(standing)(self.scope["session"].session_key)
        return current

    async def _watch_rights(self) -> None:
        asked = time.monotonic()
        current = Standing.OPERATOR
        while current is Standing.OPERATOR:
            await asyncio.sleep(RECHECK)
            try:
                current = await self._standing()
                asked = time.monotonic()
            except DatabaseError as error:
                log.warning("console_rights_not_checked", error=str(error))
                if time.monotonic() - asked > LEASE:
                    current = Standing.SIGNED_OUT
        await self._unsubscribe()
        await self.close(CLOSE_CODES[current])


def decoded(text: str | None) -> Any:
    """The JSON value of a message, None when it is none."""
    try:
        return msgspec.json.decode(text or "")
    except (msgspec.DecodeError, RecursionError):  # the latter for thousands of brackets
        return None


def language_of(scope: dict[str, Any]) -> str:
    """The language that the page of this socket is shown in: cookie first, then the browser's preference."""
    request = HttpRequest()
    request.COOKIES = scope.get("cookies", {})
    headers = dict(scope.get("headers", []))
    request.META["HTTP_ACCEPT_LANGUAGE"] = headers.get(b"accept-language", b"").decode("latin-1")
    return translation.get_language_from_request(request)


def localised(frame: dict[str, Any], language: str) -> dict[str, Any]:
    """The frame with its sentence of state, in `language`."""
    view = msgspec.convert(frame["view"], reports.View)
    with translation.override(language):
        said = sentence(view)
    return {**frame, "sentence": {"level": said.level, "text": said.text, "hint": said.hint}}
