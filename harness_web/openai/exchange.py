"""One HTTP request and its answer, on plain ASGI: reading bounded, writing bounded, leaving noticed."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any

from harness_web.openai.errors import ApiError, ClientGone, SlowClient, envelope, error_headers
from harness_web.openai.headers import JSON, OPENAI_VERSION, STREAM, Header

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY = 16 * 1024 * 1024  # bytes
MAX_DISCARD = 64 * 1024 * 1024  # bytes of an oversized body that are still read, so that its sender sees the answer
BODY_PROGRESS = 30.0  # seconds without a byte of the body
WRITE_PROGRESS = 30.0  # seconds in which a client must take something


class Exchange:
    """A request as the views see it. `id` is ours, unguessable, and names the request everywhere."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        body_progress: float = BODY_PROGRESS,
        write_progress: float = WRITE_PROGRESS,
    ) -> None:
        self._receive = receive
        self._send = send
        self._body_progress = body_progress
        self._write_progress = write_progress
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._arrived = self._began
        self._ended = False
        self.id = f"req_{secrets.token_hex(16)}"
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        client = scope.get("client")
        self.client_ip: str | None = client[0] if client else None
        self.status = 0  # of the answer; 0 until its headers are out
        self.tenant = ""  # set by authentication
        self.key = ""

    @property
    def elapsed(self) -> float:
        """Seconds since the request line was read."""
        return self._loop.time() - self._began

    @property
    def age(self) -> float:
        """Seconds since arrival, which is when the whole request had been read."""
        return self._loop.time() - self._arrived

    def header(self, name: bytes) -> str:
        return self.headers.get(name, b"").decode("latin-1")

    # --- reading ----------------------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        """The whole body. Raises ApiError (408, 413) and ClientGone."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._next_part()
            size += len(message.get("body", b""))
            if size <= MAX_BODY:
                parts.append(message.get("body", b""))
            else:
                parts.clear()
            if not message.get("more_body", False) or size > MAX_DISCARD:
                break
        if size > MAX_BODY:
            raise ApiError("body_too_large", f"The body is larger than {MAX_BODY} bytes.", headers=(_CLOSE,))
        self._arrived = self._loop.time()
        return b"".join(parts)

    async def json_body(self) -> bytes:
        """The body of a request that says, or does not deny, that it is JSON. Raises ApiError also for 415."""
        kind = self.header(b"content-type").partition(";")[0].strip().lower()
        if kind not in ("", "application/json") and not kind.endswith("+json"):
            shown = kind[:100]
            raise ApiError("unsupported_media_type", f"Send JSON as 'application/json', not as '{shown}'.")
        return await self.body()

    async def _next_part(self) -> Message:
        try:
            async with asyncio.timeout(self._body_progress):
                message = await self._receive()
        except TimeoutError:
            text = f"The body made no progress for {self._body_progress:g} seconds."
            raise ApiError("request_timeout", text, headers=(_CLOSE,)) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    async def unless_gone(self, work: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end; when the client leaves first, or one of `beside` fails, `work` is cancelled.

        Only after the body has been read. Raises what `work` raises, and ClientGone.
        """
        main = asyncio.create_task(work)
        watchers = [asyncio.create_task(self._gone()), *(asyncio.create_task(each) for each in beside)]
        try:
            await asyncio.wait([main, *watchers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (main, *watchers):
                task.cancel()  # nothing to one that is done
            # Of all, so that what is not raised below, because something else is, counts as heard.
            await asyncio.gather(main, *watchers, return_exceptions=True)
        for task in (main, *watchers):
            if not task.cancelled():
                task.result()

    async def _gone(self) -> None:
        """Ends by ClientGone only: after a complete answer a disconnect means nothing."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._ended:
            await self._loop.create_future()
        raise ClientGone

    # --- answering --------------------------------------------------------------------------------------------------

    async def respond(
        self, status: int, body: bytes, *, headers: Iterable[Header] = (), content_type: Header = JSON
    ) -> None:
        """A whole answer; 204 is the one without content."""
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [*([] if status == 204 else [content_type, length]), *headers])
        await self.write(b"" if self.method == "HEAD" else body, more=False)

    async def begin_stream(self, headers: Iterable[Header]) -> None:
        await self._start(200, [*STREAM, *headers])

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Hand `data` to the connection. Raises SlowClient when it has not drained for too long."""
        self._ended = not more
        await self._deliver({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, error: ApiError) -> None:
        """Answer with the envelope, or, when a stream has begun, end it with one error event and without [DONE]."""
        if self._ended:
            return
        if self.status:
            await self.write(b"data: " + envelope(error) + b"\n\n", more=False)
            return
        await self.respond(error.shape.status, envelope(error), headers=error_headers(error))

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.status = status
        headers.append((b"x-request-id", self.id.encode()))
        headers.append((b"openai-processing-ms", str(round(self.elapsed * 1000)).encode()))
        headers.append(OPENAI_VERSION)
        if self.tenant:
            headers.append((b"openai-organization", self.tenant.encode()))
        await self._deliver({"type": "http.response.start", "status": status, "headers": headers})

    async def _deliver(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._write_progress):
                await self._send(message)
        except TimeoutError:
            raise SlowClient from None
        except OSError:  # servers that report a closed connection instead of swallowing the write
            raise ClientGone from None


_CLOSE: Header = (b"connection", b"close")
