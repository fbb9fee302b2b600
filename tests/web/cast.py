"""The cast of the web's tests: two tenants and an operator, a client on raw ASGI, a scheduler that follows a script.

The gateway and the wire between are the real ones, over the in-memory transport.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from harness_web.openai.app import OpenAIApp
from harness_web.runtime import WebRuntime
from scheduler.clock import RealClock
from scheduler.gateway import Gateway
from scheduler.wire.connection import Connection
from scheduler.wire.memory import MemoryTransport
from scheduler.wire.messages import (
    Accepted,
    Answer,
    AnyMessage,
    Ask,
    BatchInfo,
    Cancel,
    Delta,
    Done,
    Events,
    Failed,
    Hello,
    Refused,
    Submit,
    Welcome,
)
from scheduler.wire.session import Server, serve
from tenants.auth import AuthError, InvalidKeyError, Principal
from tenants.limits import EffectiveLimit

PATIENCE = 10.0  # seconds a condition may take before the test fails
ADDRESS = "scheduler"
LIMITS = {"limit-requests": 600.0, "remaining-requests": 599.0, "reset-requests": 0.1}

T = TypeVar("T")


async def until(condition: Callable[[], T]) -> T:
    """Let the loop run until `condition` holds; its value. Bounded."""
    async with asyncio.timeout(PATIENCE):
        while not (value := condition()):
            await asyncio.sleep(0.001)
    return value


def principal(tenant: str, *, scopes: Iterable[str] = ("inference",), models: tuple[str, ...] = ("*",)) -> Principal:
    limit = EffectiveLimit("tenant", f"id-{tenant}", "", "rpm", 600)
    return Principal(
        f"id-{tenant}", tenant, f"key-{tenant}", "prod", "vip", frozenset(scopes), models, (limit,), None, 3
    )


class Keys:
    """An authenticator that knows these tokens: a principal, or the error that the token ends in."""

    def __init__(self) -> None:
        self.known: dict[str, Principal | AuthError] = {
            "sk-acme": principal("acme"),
            "sk-globex": principal("globex", models=("demo",)),
            "sk-ops": principal("ops", scopes=("admin",)),
        }
        self.addresses: list[str | None] = []

    async def authenticate(self, token: str, client_ip: str | None) -> Principal:
        self.addresses.append(client_ip)
        found = self.known.get(token, InvalidKeyError())
        if isinstance(found, AuthError):
            raise found
        return found


Script = Callable[["Scheduler", Submit], None]


class Scheduler:
    """The far end of the wire. `script` says what a request is answered with; without one the test speaks itself."""

    def __init__(self) -> None:
        self.models = {"demo": "ready", "org/name:tag": "ready"}
        self.script: Script | None = None
        self.answers: dict[str, Any] = {}
        self.submits: list[Submit] = []
        self.asks: list[Ask] = []
        self.cancelled: list[str] = []
        self.connections: list[Connection] = []
        self._server: Server | None = None

    async def start(self, transport: MemoryTransport, address: str = ADDRESS) -> None:
        self._server = await serve(
            address,
            self._session,
            welcome=lambda: Welcome("scheduler", 1, dict(self.models)),
            transport=transport,
            clock=RealClock(),
        )

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.aclose()

    def say(self, *events: Accepted | Refused | Delta | Done | Failed) -> None:
        self.connections[-1].send(Events(tuple(events)))

    def _session(self, connection: Connection, hello: Hello) -> _Session:
        self.connections.append(connection)
        return _Session(self, connection)


@dataclass
class _Session:
    scheduler: Scheduler
    connection: Connection

    def on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Submit):
            self.scheduler.submits.append(message)
            if self.scheduler.script:
                self.scheduler.script(self.scheduler, message)
        elif isinstance(message, Cancel):
            self.scheduler.cancelled.append(message.id)
        elif isinstance(message, Ask):
            self.scheduler.asks.append(message)
            value = self.scheduler.answers.get(message.what)
            self.connection.send(Answer(message.id, value, None if value is not None else "unknown question"))

    def on_closed(self, reason: str) -> None:
        """Nothing to give back."""


def accepted(id_: str) -> Accepted:
    return Accepted(id_, "vip", 3, dict(LIMITS))


def done(id_: str, tokens: int = 3, reason: str = "stop", text: str = "") -> Done:
    return Done(id_, reason, 3, tokens, 1, BatchInfo("b1", 1.5, 0.01, 0.2), text)


def words(*texts: str, reason: str = "stop") -> Script:
    """Answer with these texts and end."""

    def script(scheduler: Scheduler, submit: Submit) -> None:
        scheduler.say(accepted(submit.id))
        for count, text in enumerate(texts, start=1):
            scheduler.say(Delta(submit.id, text, count))
        scheduler.say(done(submit.id, len(texts), reason))

    return script


def refuses(reason: str, **fields: Any) -> Script:
    return lambda scheduler, submit: scheduler.say(Refused(submit.id, reason, f"Refused: {reason}.", **fields))


def fails_after(count: int, reason: str = "request_failed") -> Script:
    def script(scheduler: Scheduler, submit: Submit) -> None:
        scheduler.say(accepted(submit.id))
        for number in range(1, count + 1):
            scheduler.say(Delta(submit.id, f"w{number} ", number))
        scheduler.say(Failed(submit.id, reason, "The engine could not go on.", count))

    return script


@dataclass
class Reply:
    """What the client got, so far or in the end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    writes: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        assert isinstance(error["code"], str)
        assert isinstance(error["param"], str | None)
        return error

    @property
    def events(self) -> list[str]:
        """The data of each event; every event is one `data:` line or a comment."""
        blocks = self.body.decode().split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith(("data: ", ":")) and "\n" not in block for block in blocks)
        return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]


class Client:
    """One request on raw ASGI: what the server has sent is in `reply`, `leave` closes the connection."""

    def __init__(self, app: Callable[..., Awaitable[None]], scope: dict[str, Any], parts: list[bytes]) -> None:
        self.reply = Reply()
        self.reading = asyncio.Event()  # cleared: the client's buffers are full and it reads nothing
        self.reading.set()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for number, part in enumerate(parts, start=1):
            self.upload(part, more=number < len(parts))
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    def upload(self, part: bytes, *, more: bool) -> None:
        self._inbox.put_nowait({"type": "http.request", "body": part, "more_body": more})

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def finish(self) -> Reply:
        async with asyncio.timeout(PATIENCE):
            await self.task
        return self.reply

    async def _receive(self) -> dict[str, Any]:
        return await self._inbox.get()

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        reply = self.reply
        assert not reply.complete
        if message["type"] == "http.response.start":
            assert not reply.status
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            return
        reply.body += message["body"]
        reply.writes.append(message["body"])
        reply.complete = not message.get("more_body", False)


class Stage:
    """The data plane with everything behind it."""

    def __init__(self) -> None:
        self.keys = Keys()
        self.scheduler = Scheduler()
        self.transport = MemoryTransport()
        self.gateway = Gateway(lambda: [ADDRESS], "web", self.transport)
        self.runtime = WebRuntime(None, self.keys, self.gateway)  # type: ignore[arg-type]  # nothing polls here
        self.app = OpenAIApp(self.runtime)

    async def start(self) -> None:
        await self.scheduler.start(self.transport)
        await self.gateway.start()
        await until(self.gateway.models)

    async def stop(self) -> None:
        await self.gateway.aclose()
        await self.scheduler.stop()
        await self.runtime.database.aclose()

    async def scheduler_goes(self) -> None:
        await self.scheduler.stop()
        self.transport.cut()
        await until(lambda: not self.gateway.connected())

    async def scheduler_is_back(self) -> None:
        """After a cut: the gateway connects again by itself."""
        count = len(self.scheduler.connections)
        await until(lambda: len(self.scheduler.connections) > count and self.gateway.models())

    async def settle(self) -> None:
        """Everything that the scheduler has said before this has been heard and acted upon."""
        self.scheduler.answers["settle"] = True
        await self.gateway.ask("settle")
        for _ in range(20):
            await asyncio.sleep(0)

    def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        key: str | None = "sk-acme",
        headers: dict[str, str] | None = None,
        parts: list[bytes] | None = None,
    ) -> Client:
        sent = {} if key is None else {"authorization": f"Bearer {key}"}
        if body is not None:
            sent["content-type"] = "application/json"
        sent |= headers or {}
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 5000),
        }
        return Client(self.app, scope, [raw] if parts is None else parts)

    async def ask(self, method: str, path: str, body: Any = None, **options: Any) -> Reply:
        return await self.open(method, path, body, **options).finish()

    def open_chat(self, *, key: str | None = "sk-acme", headers: dict[str, str] | None = None, **fields: Any) -> Client:
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.open("POST", "/v1/chat/completions", body, key=key, headers=headers)

    async def chat(self, *, key: str | None = "sk-acme", headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        return await self.open_chat(key=key, headers=headers, **fields).finish()
