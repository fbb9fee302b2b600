"""The bounds that our HTTP protocol puts before a request exists, and the process' life around its requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from harness_web import serve
from harness_web.asgi import Application
from harness_web.serve import BoundedHttp, uvicorn_arguments


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(serve, "HEADER_TIME", 0.1)
    config = Config(hello, http=BoundedHttp, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedHttp(config, state, {}), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def conversation(port: int, *sent: bytes) -> bytes:
    """Everything that comes back before the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in sent:
        writer.write(part)
        await writer.drain()
    async with asyncio.timeout(10):
        received = await reader.read()
    writer.close()
    await writer.wait_closed()
    return received


async def test_headers_that_do_not_arrive_end_the_connection(server: int) -> None:
    assert await conversation(server) == b""
    assert await conversation(server, b"GET / HTTP/1.1\r\nx-slow: 1\r\n") == b""


async def test_complete_headers_stop_the_clock(server: int) -> None:
    received = await conversation(server, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 200")


async def test_headers_over_the_bound_are_refused(server: int) -> None:
    big = b"GET / HTTP/1.1\r\nx-big: " + b"x" * (serve.MAX_HEADERS + 1)
    assert (await conversation(server, big + b"\r\n\r\n")).startswith(b"HTTP/1.1 400")


def test_forwarded_addresses_are_believed_only_from_named_proxies() -> None:
    assert "--no-proxy-headers" in uvicorn_arguments("127.0.0.1", 8000, 1)
    trusting = uvicorn_arguments("127.0.0.1", 8000, 1, ("10.0.0.1", "10.0.0.2"))
    assert trusting[trusting.index("--forwarded-allow-ips") + 1] == "10.0.0.1,10.0.0.2"


class Runtime:
    def __init__(self) -> None:
        self.life: list[str] = []

    async def start(self) -> None:
        self.life.append("started")

    async def aclose(self) -> None:
        self.life.append("closed")


async def test_each_scope_goes_where_it_belongs_and_the_runtime_lives_as_long_as_the_server() -> None:
    served: list[str] = []

    def part(name: str) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            served.append(name)

        return app

    runtime = Runtime()
    application = Application(part("pages"), part("websockets"), lambda: runtime)  # type: ignore[arg-type,return-value]
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    state: dict[str, Any] = {}
    lifespan = asyncio.create_task(application({"type": "lifespan", "state": state}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    assert (runtime.life, state["runtime"]) == (["started"], runtime)
    await application({"type": "websocket", "path": "/v1/x"}, inbox.get, outbox.put)
    for path in ("/", "/v1x", "/api/v1/x"):
        await application({"type": "http", "path": path}, inbox.get, outbox.put)
    assert served == ["websockets", "pages", "pages", "pages"]
    await inbox.put({"type": "lifespan.shutdown"})
    await lifespan
    assert runtime.life == ["started", "closed"]
