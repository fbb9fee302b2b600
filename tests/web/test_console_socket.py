"""The console's websocket: who may listen, what they hear, and when it ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.contrib.auth.models import User
from django.test import Client

from harness_web.console import consumers, live
from harness_web.routing import websocket_application
from tenants.models import Membership

pytestmark = pytest.mark.django_db(transaction=True)

SUBSCRIBE = {"type": "subscribe", "topic": "overview"}


class Socket:
    """The browser's side of one websocket."""

    def __init__(self, path: str, origin: str, cookie: str = "") -> None:
        headers = [(b"origin", origin.encode()), (b"cookie", cookie.encode())]
        scope = {"type": "websocket", "path": path, "headers": headers, "query_string": b"", "subprotocols": []}
        self.server = ApplicationCommunicator(websocket_application, scope)

    async def connect(self) -> bool:
        await self.server.send_input({"type": "websocket.connect"})
        return bool((await self.server.receive_output(5))["type"] == "websocket.accept")

    async def say(self, message: Any) -> None:
        text = message if isinstance(message, str) else json.dumps(message)
        await self.server.send_input({"type": "websocket.receive", "text": text})

    async def hear(self) -> Any:
        return json.loads((await self.server.receive_output(5))["text"])

    async def close_code(self) -> int:
        message = await self.server.receive_output(5)
        assert message["type"] == "websocket.close"
        return int(message["code"])

    async def disconnect(self) -> None:
        await self.server.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.server.wait(5)


Connect = Callable[..., Awaitable[Socket]]


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> live.Board:
    made = live.Board()
    monkeypatch.setattr(consumers.ConsoleConsumer, "board", made)
    monkeypatch.setattr(consumers, "RECHECK", 0.02)
    return made


@sync_to_async
def signed_in(role: str | None = Membership.Role.OPERATOR) -> Client:
    user = User.objects.create_user("olga")
    if role:
        Membership.objects.create(user=user, role=role)
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
async def connect(board: live.Board) -> AsyncIterator[Connect]:
    opened: list[Socket] = []

    async def open_socket(client: Client | None, origin: str = "http://localhost") -> Socket:
        cookie = "; ".join(f"{name}={morsel.value}" for name, morsel in client.cookies.items()) if client else ""
        opened.append(Socket("/ws/console/", origin, cookie))
        return opened[-1]

    yield open_socket
    for socket in opened:
        await socket.disconnect()


async def test_an_operator_gets_a_snapshot_and_then_deltas(connect: Connect, board: live.Board) -> None:
    socket = await connect(await signed_in())
    assert await socket.connect()
    await socket.say(SUBSCRIBE)
    first = await socket.hear()
    assert (first["type"], first["stream"], first["seq"]) == ("snapshot", board.stream, 0)
    assert first["sentence"]["text"] == "No scheduler is connected."
    await publish(board)
    delta = await socket.hear()
    assert (delta["type"], delta["seq"]) == ("delta", 1)


async def publish(board: live.Board) -> None:
    layer = live.get_channel_layer()
    await layer.group_send(board.group, {"type": "overview.frame", "frame": board.tick()})


async def test_a_socket_that_unsubscribed_hears_nothing_and_resumes_without_loss(
    connect: Connect, board: live.Board
) -> None:
    socket = await connect(await signed_in())
    await socket.connect()
    await socket.say(SUBSCRIBE)
    await socket.hear()
    await socket.say({"type": "unsubscribe", "topic": "overview"})
    assert await socket.server.receive_nothing(0.05)
    await publish(board)
    await socket.say(SUBSCRIBE | {"stream": board.stream, "seq": 0})
    answer = await socket.hear()
    assert answer["resumed"]
    assert [point["seq"] for point in answer["points"]] == [1]


async def test_a_visitor_is_told_to_sign_in(connect: Connect) -> None:
    socket = await connect(None)
    await socket.connect()
    assert await socket.close_code() == 4401


async def test_others_are_told_that_they_are_not_operators(connect: Connect) -> None:
    socket = await connect(await signed_in(Membership.Role.FINANCE))
    await socket.connect()
    assert await socket.close_code() == 4403


async def test_pages_of_other_sites_cannot_open_it(connect: Connect) -> None:
    socket = await connect(await signed_in(), origin="http://evil.example")
    assert await socket.connect() is False


async def test_unknown_addresses_are_refused() -> None:
    socket = Socket("/ws/else/", "http://localhost")
    assert await socket.connect() is False


async def test_signing_out_ends_it(connect: Connect) -> None:
    client = await signed_in()
    socket = await connect(client)
    await socket.connect()
    await sync_to_async(client.logout)()
    assert await socket.close_code() == 4401


async def test_losing_the_role_ends_it(connect: Connect) -> None:
    socket = await connect(await signed_in())
    await socket.connect()
    await sync_to_async(Membership.objects.all().delete)()
    assert await socket.close_code() == 4403


@pytest.mark.parametrize("text", ["", "{", '{"type": "subscribe", "topic": "secrets"}', "[1]", "[" * 5000])
async def test_what_is_not_understood_ends_it(connect: Connect, text: str) -> None:
    socket = await connect(await signed_in())
    await socket.connect()
    await socket.say(text)
    assert await socket.close_code() == 4400
