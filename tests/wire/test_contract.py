"""What a connection promises, whatever carries it: the same tests over memory, Unix sockets and TCP, on both loops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.wire import codec, session
from scheduler.wire.codec import MessageTooLargeError
from scheduler.wire.connection import REQUEST_OUTBOX
from scheduler.wire.messages import (
    MAX_FRAME,
    PROTOCOL,
    AnyMessage,
    Cancel,
    Goodbye,
    Hello,
    Models,
    Ping,
    Pong,
    Snapshot,
    Welcome,
)
from scheduler.wire.session import TELEMETRY, dial
from tests.wire.cast import HELLO, RawPeer, Recorder, Wire, frame, submit, until
from tests.wire.strategies import MESSAGES, property_test

MEBIBYTE = 1024 * 1024


# --- messages --------------------------------------------------------------------------------------------------------


@property_test
@given(st.lists(MESSAGES.filter(lambda message: not isinstance(message, Ping | Pong)), max_size=5))
async def test_messages_arrive_as_they_were_sent_and_in_order(wire: Wire, messages: list[AnyMessage]) -> None:
    web, scheduler = await wire.standing_pair()
    web.messages.clear()
    scheduler.messages.clear()

    for message in messages:
        assert web.connection.send(message)
        assert scheduler.connection.send(message)

    assert await scheduler.received(len(messages)) == messages
    assert await web.received(len(messages)) == messages


async def test_thousands_of_small_messages_arrive_in_order(wire: Wire) -> None:
    web, scheduler = await wire.pair()

    for number in range(5_000):
        web.connection.send(Cancel(str(number)))

    assert await scheduler.received(5_000) == [Cancel(str(number)) for number in range(5_000)]


async def test_the_largest_request_arrives_whole(wire: Wire) -> None:
    web, scheduler = await wire.pair()
    large = submit(text="x" * (MAX_FRAME - 1_000))

    assert web.connection.send(large)

    assert await scheduler.received(1) == [large]


async def test_a_message_over_the_limit_is_refused_and_the_connection_goes_on(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    web, scheduler = await wire.pair()
    monkeypatch.setattr(codec, "MAX_FRAME", 1_000)

    with pytest.raises(MessageTooLargeError):
        web.connection.send(submit(text="x" * 1_000))
    web.connection.send(Cancel("next"))

    assert await scheduler.received(1) == [Cancel("next")]


# --- the greeting ----------------------------------------------------------------------------------------------------


async def test_the_welcome_says_who_the_scheduler_is_and_what_it_serves_now(wire: Wire) -> None:
    wire.epoch = 7
    web, scheduler = await wire.pair()

    assert web.welcome == Welcome("scheduler-1", 7, {"demo": "ready"})
    assert scheduler.hello == HELLO


async def test_a_peer_of_another_version_is_told_so_and_closed(wire: Wire) -> None:
    await wire.serve()
    foreign = bytearray(frame(HELLO))
    foreign[4] = PROTOCOL + 1

    peer = await wire.raw(bytes(foreign))

    await until(lambda: peer.lost)
    assert peer.said(Goodbye) == [
        Goodbye(f"The peer speaks protocol {PROTOCOL + 1}, this process protocol {PROTOCOL}.")
    ]


async def test_a_scheduler_of_another_version_is_not_listened_to(wire: Wire) -> None:
    foreign = bytearray(frame(Welcome("scheduler-1", 1, {})))
    foreign[4] = PROTOCOL + 1
    listener = await wire.transport.listen(wire.address, lambda: _Speaker(bytes(foreign)))
    web = Recorder()

    connection = await dial(
        listener.address, web, transport=wire.transport, clock=wire.clock, name="web-1", role="requests"
    )

    await until(lambda: web.closed)
    assert web.welcome is None
    assert f"protocol {PROTOCOL + 1}" in web.closed[0]
    assert connection.closed_because == web.closed[0]
    await listener.aclose()


class _Speaker(RawPeer):
    """A scheduler that says fixed bytes to whoever comes."""

    def __init__(self, words: bytes) -> None:
        super().__init__()
        self._words = words

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.transport.write(self._words)


@pytest.mark.parametrize("first", [Cancel("r1"), Hello(peer="web-1", role="visitor")], ids=["no hello", "unknown role"])
async def test_who_does_not_greet_properly_is_told_and_closed(wire: Wire, first: AnyMessage) -> None:
    await wire.serve()

    peer = await wire.raw(frame(first))

    await until(lambda: peer.lost)
    assert len(peer.said(Goodbye)) == 1
    assert wire.sessions == []


async def test_the_refusal_of_a_scheduler_reaches_the_web(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_CONNECTIONS", 1)
    await wire.pair()

    late = await wire.dial()

    await until(lambda: late.closed)
    assert late.welcome is None
    assert late.closed == ["not welcome: there are 1 connections already"]


async def test_a_change_of_models_is_told_to_requests_and_not_to_telemetry(wire: Wire) -> None:
    server = await wire.serve()
    requests, telemetry = await wire.dial(), await wire.dial(TELEMETRY)
    await until(lambda: len(server.connections) == 2)

    server.broadcast(Models({"demo": "draining"}))
    server.broadcast(Snapshot(1, {"at": 1.0}), TELEMETRY)

    assert await requests.received(1) == [Models({"demo": "draining"})]
    assert await telemetry.received(1) == [Snapshot(1, {"at": 1.0})]


# --- nonsense --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        (MAX_FRAME + 1).to_bytes(4, "big") + bytes([PROTOCOL]),
        b"\0\0\0\0" + bytes([PROTOCOL]),
        b"\0\0\0\3" + bytes([PROTOCOL]) + b"\xc1\xc1",
    ],
    ids=["http", "too large", "empty", "not msgpack"],
)
async def test_garbage_closes_its_connection_and_no_other(wire: Wire, garbage: bytes) -> None:
    web, scheduler = await wire.pair()

    peer = await wire.raw(frame(HELLO) + garbage)

    await until(lambda: peer.lost)
    assert len(peer.said(Goodbye)) == 1
    web.connection.send(Cancel("still here"))
    assert await scheduler.received(1) == [Cancel("still here")]


@property_test
@given(st.binary(min_size=1, max_size=200))
async def test_no_bytes_stop_the_scheduler_from_serving_others(wire: Wire, garbage: bytes) -> None:
    if not wire.sessions:
        await wire.serve()
    peer = await wire.raw(garbage)
    web = await wire.dial()

    await until(lambda: web.welcome)

    web.connection.abort("seen")
    peer.transport.abort()
    await until(lambda: peer.lost and web.closed)


# --- silence ---------------------------------------------------------------------------------------------------------


async def test_a_silent_peer_is_pinged_every_second_and_given_up_after_five(wire: Wire) -> None:
    await wire.serve()
    peer = await wire.raw(frame(HELLO))
    scheduler = await until(lambda: wire.sessions and wire.sessions[0])
    await wire.beat(0.5)  # the Hello was heard in this beat

    await wire.beat(4.5)
    await until(lambda: len(peer.said(Ping)) == 4)
    assert scheduler.closed == []
    await wire.beat(0.5)

    await until(lambda: scheduler.closed)
    assert scheduler.closed == ["silent for 5 s"]
    await until(lambda: peer.lost)


async def test_a_caller_who_never_greets_is_given_up_too(wire: Wire) -> None:
    await wire.serve()
    peer = await wire.raw()

    await wire.beat(6.0)

    await until(lambda: peer.lost)


async def test_peers_with_nothing_to_say_stay_connected(wire: Wire) -> None:
    web, scheduler = await wire.pair()

    await wire.beat(60.0)

    assert (web.closed, scheduler.closed) == ([], [])
    web.connection.send(Cancel("r1"))
    assert await scheduler.received(1) == [Cancel("r1")]


async def test_a_process_that_was_itself_stopped_finds_its_peers_alive(wire: Wire) -> None:
    web, scheduler = await wire.pair()

    await wire.clock.advance(0.1)
    for _ in range(3):  # time jumps: nobody's beats were late, the whole machine was
        wire.clock._now += 60.0
        await wire.beat(1.0)

    assert (web.closed, scheduler.closed) == ([], [])


# --- full buffers ----------------------------------------------------------------------------------------------------


async def test_a_peer_that_does_not_read_is_closed_when_its_outbox_is_full(wire: Wire) -> None:
    await wire.serve()
    peer = await wire.raw(frame(HELLO))
    scheduler = await until(lambda: wire.sessions and wire.sessions[0])
    peer.transport.pause_reading()
    chunk, sent = Snapshot(1, {"text": "x" * MEBIBYTE}), 0

    while scheduler.connection.send(chunk) and sent < 64:
        sent += 1

    await until(lambda: scheduler.closed)
    assert 7 <= sent <= 16  # eight MiB, and what the kernel's own buffers took
    assert scheduler.closed == ["the outbox is full: the peer does not read"]
    assert not scheduler.connection.send(chunk)
    peer.transport.resume_reading()
    await until(lambda: peer.lost)


async def test_room_is_given_when_the_peer_has_read(wire: Wire) -> None:
    web, scheduler = await wire.pair()

    for number in range(8):  # 64 MiB in all: more than the outbox holds
        assert await web.connection.room()
        assert web.connection.send(submit(f"r{number}", text="x" * (8 * MEBIBYTE)))
        assert web.connection.pending <= REQUEST_OUTBOX

    assert [message.id for message in await scheduler.received(8)] == [f"r{number}" for number in range(8)]


async def test_waiting_for_room_ends_with_the_connection(wire: Wire) -> None:
    web, scheduler = await wire.pair()
    scheduler.connection.abort("gone")
    await until(lambda: web.closed)

    assert not await web.connection.room()


# --- the end ---------------------------------------------------------------------------------------------------------


async def test_what_was_sent_before_the_close_arrives_before_the_close(wire: Wire) -> None:
    web, scheduler = await wire.pair()

    for number in range(100):
        scheduler.connection.send(Cancel(str(number)))
    scheduler.connection.close("done")

    await until(lambda: web.closed)
    assert web.messages == [Cancel(str(number)) for number in range(100)]


async def test_both_ends_hear_of_the_end_exactly_once(wire: Wire) -> None:
    web, scheduler = await wire.pair()

    web.connection.close("leaving")
    web.connection.close("leaving again")
    web.connection.abort("and again")

    await until(lambda: web.closed and scheduler.closed)
    assert web.closed == ["leaving"]
    assert scheduler.closed == ["closed by the peer"]
    assert not web.connection.send(Cancel("late"))


async def test_a_server_that_closes_lets_go_of_everybody_and_accepts_nobody(wire: Wire) -> None:
    web, scheduler = await wire.pair()
    server = wire._servers[0]

    scheduler.connection.send(Cancel("last words"))
    await server.aclose("maintenance")

    assert scheduler.closed == ["maintenance"]
    assert server.connections == {}
    await until(lambda: web.closed)
    assert web.messages == [Cancel("last words")]
    with pytest.raises(OSError):
        await wire.dial()


async def test_a_peer_that_does_not_read_does_not_hold_up_the_close(wire: Wire) -> None:
    server = await wire.serve()
    peer = await wire.raw(frame(HELLO))
    scheduler = await until(lambda: wire.sessions and wire.sessions[0])
    peer.transport.pause_reading()
    scheduler.connection.send(Snapshot(1, {"text": "x" * (7 * MEBIBYTE)}))

    await server.aclose("maintenance", within=0.05)

    assert scheduler.closed == ["maintenance"]
    peer.transport.resume_reading()
