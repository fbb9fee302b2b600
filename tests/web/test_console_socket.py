"""The console's websocket: who may listen, what they hear, and when it ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import pytest
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.contrib.auth.models import User
from django.test import Client

from harness_web.console import consumers, live
from harness_web.portal import views as portal
from harness_web.routing import websocket_application
from tenants.models import Membership, Tenant, Tier

pytestmark = pytest.mark.django_db(transaction=True)

SUBSCRIBE = {"type": "subscribe", "topic": "overview"}


class Socket:
    """The browser's side of one websocket."""

    def __init__(self, path: str, origin: str, cookie: str = "", query: str = "") -> None:
        headers = [(b"origin", origin.encode()), (b"cookie", cookie.encode())]
        scope = {
            "type": "websocket",
            "path": path,
            "headers": headers,
            "query_string": query.encode(),
            "subprotocols": [],
        }
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

    async def open_socket(client: Client | None, origin: str = "http://localhost", query: str = "") -> Socket:
        cookie = "; ".join(f"{name}={morsel.value}" for name, morsel in client.cookies.items()) if client else ""
        opened.append(Socket("/ws/console/", origin, cookie, query))
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


# --- other tenants ----------------------------------------------------------------------------------------------------

# Topics, and what stands in addresses: what exists, what does not, and what only looks like it (the e is Cyrillic).
FOREIGN = ("overview", "globex", "2", "nobody", "*", "", "x" * 10_240, "glob\u0435x", "A.B", "A_B", "a-b")


@sync_to_async
def member(role: str) -> Client:
    """Somebody of acme; globex is there as well."""
    tier = Tier.objects.create(name="vip")
    acme, _ = (Tenant.objects.create(slug=slug, name=slug.title(), tier=tier) for slug in ("acme", "globex"))
    user = User.objects.create_user("ann")
    Membership.objects.create(user=user, tenant=acme, role=role)
    client = Client()
    client.force_login(user)
    return client


@pytest.mark.parametrize("role", [Membership.Role.OWNER, Membership.Role.DEVELOPER])
async def test_fr_081_a_tenants_people_are_in_no_feed_whatever_they_ask_for(
    connect: Connect, board: live.Board, role: str
) -> None:
    """FR-081: refused alike, whether what they name exists; nothing is sent, of the present or of the past.

    There is one group a process, named by chance and not after any tenant, and only operators are in it.
    """
    client = await member(role)
    await publish(board)
    for name in FOREIGN:
        socket = await connect(client, query=f"tenant={quote(name)}&topic={quote(name)}")
        assert await socket.connect()
        await socket.say({"type": "subscribe", "topic": name, "tenant": name, "stream": board.stream, "seq": 0})
        await socket.say(SUBSCRIBE | {"stream": board.stream, "seq": 0})
        assert await socket.close_code() == 4403
        await publish(board)
        assert await socket.server.receive_nothing(0.02)
        beside = Socket(f"/ws/console/{quote(name)}/", "http://localhost", "")
        assert await beside.connect() is False
    assert live.get_channel_layer().groups.get(board.group, {}) == {}
    assert board.group == f"console.overview.{board.stream}"


async def test_fr_081_the_feed_is_the_operators_alone_when_they_are_beside_each_other(
    connect: Connect, board: live.Board
) -> None:
    """FR-081: a tenant's socket hears nothing of what an operator's hears at the same time."""
    tenants, operators = await connect(await member(Membership.Role.OWNER)), await connect(await signed_in())
    for socket in (tenants, operators):
        await socket.connect()
        await socket.say(SUBSCRIBE)
    assert (await operators.hear())["type"] == "snapshot"
    assert await tenants.close_code() == 4403
    await publish(board)
    assert (await operators.hear())["type"] == "delta"
    assert await tenants.server.receive_nothing(0.02)


async def test_fr_081_what_an_engine_says_in_its_last_words_is_on_no_page_for_tenants(
    board: live.Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-081: of a shared engine everybody may know its state."""
    monkeypatch.setattr(portal, "BOARD", board)
    words = "cannot take the prompt 'my secret plan' of globex"
    board.receive(
        {"scheduler": "s", "engines": [{"model": "demo", "state": "failed", "message": words, "hint": words}]}
    )
    client = await member(Membership.Role.OWNER)
    for path in ("/", "/console/", "/console/overview.json"):
        shown = (await sync_to_async(client.get)(path)).content.decode()
        assert "secret" not in shown and "globex" not in shown, path
    assert "failed" in (await sync_to_async(client.get)("/")).content.decode()
