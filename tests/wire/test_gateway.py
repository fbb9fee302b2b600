"""What the web has of the scheduler: the gateway, against a scheduler that a test plays by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.types import Reason
from scheduler.gateway import SCHEDULER_LOST, AskError, Event, Gateway, GatewayUnavailable
from scheduler.wire import codec
from scheduler.wire.connection import BEAT, DEAD_AFTER
from scheduler.wire.memory import MemoryTransport
from scheduler.wire.messages import (
    Accepted,
    Answer,
    Ask,
    BatchInfo,
    Cancel,
    Delta,
    Done,
    Events,
    Failed,
    Goodbye,
    Models,
    Refused,
    Snapshot,
    Submit,
    Welcome,
)
from scheduler.wire.session import REQUESTS, TELEMETRY, Server, serve
from scheduler.wire.transport import Address
from tests.wire.cast import PATIENCE, Recorder, Wire, make_wire, submit, until
from tests.wire.strategies import property_test

MEBIBYTE = 1024 * 1024


def accepted(request_id: str = "r1") -> Accepted:
    return Accepted(request_id, "vip", 3, {"remaining-requests": 9.0})


def done(request_id: str = "r1", tokens: int = 2) -> Done:
    return Done(request_id, "stop", 3, tokens, 0, BatchInfo("b1", 1.0, 0.0, 0.1))


class Stage:
    """A gateway and the schedulers that it talks to."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.listed: list[Address] = []
        self.gateway = Gateway(lambda: self.listed, "web-1", wire.transport, clock=wire.clock, ask_timeout=0.2)

    @property
    def scheduler(self) -> Recorder:
        """The scheduler's end of the latest connection for requests."""
        return [session for session in self.wire.sessions if session.hello and session.hello.role == REQUESTS][-1]

    async def open(self) -> None:
        server = await self.wire.serve()
        self.listed = [server.address]
        await self.gateway.start()
        await until(self.gateway.connected)

    async def submitted(self, message: Submit | None = None) -> tuple[AsyncGenerator[Event, None], Submit]:
        """A request that has reached the scheduler; its iterator and what came."""
        message = message or submit()
        events = self.gateway.submit(message)
        self.first = asyncio.ensure_future(anext(events))
        arrived = await until(lambda: self.said(Submit, message.id))
        return events, arrived[0]

    async def running(self, request_id: str = "r1") -> AsyncGenerator[Event, None]:
        events, _ = await self.submitted(submit(request_id))
        self.say(accepted(request_id))
        assert await self.first == accepted(request_id)
        return events

    def said(self, kind: type, request_id: str | None = None) -> list[Any]:
        """What of that kind the present scheduler has heard."""
        heard = [message for message in self.scheduler.messages if isinstance(message, kind)]
        return [message for message in heard if request_id in (None, message.id)]

    def say(self, *events: Event) -> None:
        assert self.scheduler.connection.send(Events(events))

    async def settled(self) -> None:
        """Everything that the scheduler has said so far is in the gateway."""
        models = {"settled": str(len(self.gateway.models())), **self.gateway.models()}
        self.scheduler.connection.send(Models(models))
        await until(lambda: self.gateway.models() == models)

    async def aclose(self) -> None:
        await self.gateway.aclose()
        await self.wire.aclose()


@pytest.fixture(params=["memory", "unix"])
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(make_wire(request.param, tmp_path))
    await stage.open()
    yield stage
    await stage.aclose()


@pytest.fixture
async def network() -> AsyncIterator[Stage]:
    """A stage on a memory network, which can be cut and frozen."""
    stage = Stage(make_wire("memory", Path()))
    await stage.open()
    yield stage
    await stage.aclose()


async def read(events: AsyncGenerator[Event, None]) -> list[Event]:
    async with asyncio.timeout(PATIENCE):
        return [event async for event in events]


# --- a request -------------------------------------------------------------------------------------------------------


async def test_a_request_is_accepted_streamed_and_done(stage: Stage) -> None:
    events, arrived = await stage.submitted()
    assert arrived == submit()

    stage.say(accepted())
    assert await stage.first == accepted()
    stage.say(Delta("r1", "w0 ", 1))
    assert await anext(events) == Delta("r1", "w0 ", 1)
    stage.say(Delta("r1", "w1", 2), done())

    assert await read(events) == [Delta("r1", "w1", 2), done()]
    await stage.settled()
    assert stage.said(Cancel) == []


async def test_a_refusal_is_the_whole_answer(stage: Stage) -> None:
    events, _ = await stage.submitted()
    refusal = Refused("r1", Reason.QUEUE_FULL, "The queue is full.", retry_after=2.0)

    stage.say(refusal)

    assert await stage.first == refusal
    assert await read(events) == []


async def test_a_queued_request_can_end_by_a_refusal(stage: Stage) -> None:
    events = await stage.running()
    refusal = Refused("r1", Reason.QUEUE_TIMEOUT, "It waited too long.")

    stage.say(refusal)

    assert await read(events) == [refusal]


async def test_each_request_gets_its_own_events_however_they_are_mixed(stage: Stage) -> None:
    names = [f"r{number}" for number in range(100)]
    readers = [asyncio.ensure_future(read(stage.gateway.submit(submit(name)))) for name in names]
    await until(lambda: len(stage.said(Submit)) == len(names))

    stage.say(*(accepted(name) for name in names))
    for step in range(1, 4):
        stage.say(*(Delta(name, f"{name}.{step} ", step) for name in names))
    stage.say(*(done(name, 3) for name in reversed(names)))

    for name, events in zip(names, await asyncio.gather(*readers), strict=True):
        assert events[0] == accepted(name)
        assert events[-1] == done(name, 3)
        assert "".join(event.text for event in events[1:-1]) == f"{name}.1 {name}.2 {name}.3 "


async def test_an_identifier_under_way_cannot_be_used_again(stage: Stage) -> None:
    await stage.running()

    with pytest.raises(ValueError, match="under way"):
        await anext(stage.gateway.submit(submit()))


async def test_a_request_too_large_for_a_frame_is_refused(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME", 1_000)

    events = await read(stage.gateway.submit(submit(text="x" * 1_000)))

    assert [type(event) for event in events] == [Refused]
    assert events[0].reason == Reason.CONTEXT_LENGTH
    assert stage.gateway.connected()


# --- a slow reader ---------------------------------------------------------------------------------------------------


async def test_what_piles_up_before_a_slow_reader_is_one_text(stage: Stage) -> None:
    events = await stage.running()

    for number in range(1, 1_001):
        stage.say(Delta("r1", f"w{number} ", number))
    stage.say(done(tokens=1_000))
    await stage.settled()

    text = "".join(f"w{number} " for number in range(1, 1_001))
    assert await read(events) == [Delta("r1", text, 1_000), done(tokens=1_000)]


async def test_a_slow_reader_does_not_hold_up_another(stage: Stage) -> None:
    await stage.running("slow")
    quick = await stage.running("quick")

    stage.say(*(Delta("slow", "x" * 1_000, number) for number in range(1, 1_001)))
    stage.say(Delta("quick", "hello", 1))

    assert await anext(quick) == Delta("quick", "hello", 1)


@property_test
@given(st.lists(st.tuples(st.text(max_size=5), st.booleans()), max_size=10))
async def test_no_text_is_lost_or_doubled_whenever_the_reader_reads(
    network: Stage, steps: list[tuple[str, bool]]
) -> None:
    events, got, tokens = await network.running(), "", 0

    # The text read so far and what the end brings make up exactly what was said, and counts never go back.
    for text, reads_now in steps:
        network.say(Delta("r1", text, tokens := tokens + 1))
        if reads_now:
            event = await anext(events)
            assert isinstance(event, Delta)
            assert event.tokens == tokens
            got += event.text
    network.say(done(tokens=tokens))
    rest = await read(events)

    assert got + "".join(event.text for event in rest[:-1]) == "".join(text for text, _ in steps)
    assert rest[-1] == done(tokens=tokens)


# --- leaving ---------------------------------------------------------------------------------------------------------


async def test_closing_the_iterator_cancels_the_request(stage: Stage) -> None:
    events = await stage.running()

    await events.aclose()

    assert await until(lambda: stage.said(Cancel)) == [Cancel("r1")]


async def test_a_reader_that_is_cancelled_cancels_its_request(stage: Stage) -> None:
    reader = asyncio.ensure_future(read(stage.gateway.submit(submit())))
    await until(lambda: stage.said(Submit))

    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader

    assert await until(lambda: stage.said(Cancel)) == [Cancel("r1")]


async def test_what_still_comes_for_a_request_that_was_left_disturbs_nobody(stage: Stage) -> None:
    left, other = await stage.running("left"), await stage.running("other")
    await left.aclose()

    stage.say(Delta("left", "late", 1), done("left"), Delta("other", "mine", 1), done("other"))

    assert await read(other) == [Delta("other", "mine", 1), done("other")]


# --- losing the scheduler --------------------------------------------------------------------------------------------


async def test_a_request_not_accepted_yet_is_refused_when_the_scheduler_is_lost(stage: Stage) -> None:
    events, _ = await stage.submitted()

    stage.scheduler.connection.abort("killed")

    refusal = await stage.first
    assert isinstance(refusal, Refused)
    assert (refusal.reason, refusal.retry_after) == (Reason.ENGINE_NOT_READY, 1.0)
    assert await read(events) == []


async def test_a_running_request_fails_with_what_it_had_when_the_scheduler_is_lost(stage: Stage) -> None:
    events = await stage.running()
    stage.say(Delta("r1", "w0 w1 ", 2))
    await stage.settled()

    stage.scheduler.connection.abort("killed")

    text, failure = await read(events)
    assert text == Delta("r1", "w0 w1 ", 2)
    assert isinstance(failure, Failed)
    assert (failure.reason, failure.completion_tokens) == (SCHEDULER_LOST, 2)


async def test_without_a_scheduler_there_are_no_models_and_requests_are_told_to_come_again(stage: Stage) -> None:
    await stage.wire._servers[0].aclose()
    await until(lambda: not stage.gateway.connected())

    (refusal,) = await read(stage.gateway.submit(submit()))

    assert stage.gateway.models() == {}
    assert (refusal.reason, refusal.retry_after) == (Reason.ENGINE_NOT_READY, 1.0)


async def test_a_connection_that_lasted_is_made_again_at_once(network: Stage) -> None:
    await network.wire.beat(2.0)

    network.wire.transport.cut()

    await until(lambda: len(network.wire.sessions) == 2)
    await until(network.gateway.connected)
    assert network.wire.clock.now() == 102.0  # no time passed


async def test_a_scheduler_that_comes_back_is_found_within_a_second(network: Stage) -> None:
    server = network.wire._servers[0]
    await server.aclose()
    await network.wire.beat(120.0)
    assert not network.gateway.connected()

    await network.wire.serve()
    await network.wire.beat(1.0)

    assert network.gateway.connected()


async def test_attempts_to_connect_back_off_to_one_a_second(network: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    async def refuse(address: Address, factory: object) -> None:
        attempts.append(network.wire.clock.now())
        raise ConnectionRefusedError("nobody")

    await network.wire.beat(2.0)
    monkeypatch.setattr(network.wire.transport, "connect", refuse)
    network.wire.transport.cut()
    await network.wire.beat(60.0)

    assert 60 <= len(attempts) <= 130  # the pauses are half a second to a second, after the first few
    assert attempts[0] == 102.0


async def test_a_network_that_went_silent_ends_requests_on_both_sides_within_six_seconds(network: Stage) -> None:
    events = await network.running()

    network.wire.transport.freeze()
    await network.wire.beat((DEAD_AFTER + 1) * BEAT)

    (failure,) = await read(events)
    assert failure.reason == SCHEDULER_LOST
    assert network.wire.sessions[0].closed == ["silent for 5 s"]


async def test_a_stalled_scheduler_makes_large_requests_wait_and_loses_none(network: Stage) -> None:
    transport = network.wire.transport
    assert isinstance(transport, MemoryTransport)
    transport.freeze()
    requests = [submit(f"r{number}", text="x" * (16 * MEBIBYTE)) for number in range(4)]
    readers = [asyncio.ensure_future(read(network.gateway.submit(request))) for request in requests]
    await network.wire.beat(3.0)
    transport.thaw()

    await until(lambda: len(network.said(Submit)) == 4)

    assert len(network.wire.sessions) == 1  # the connection held
    assert {message.age for message in network.said(Submit)} >= {0.0, 3.0}  # the wait counts
    network.say(*(done(request.id) for request in requests))
    assert await asyncio.gather(*readers) == [[done(request.id)] for request in requests]


# --- epochs ----------------------------------------------------------------------------------------------------------


async def another(stage: Stage, address: Address, name: str, epoch: int, models: dict[str, str]) -> Server:
    """One more scheduler process, listed."""
    server = await serve(
        address,
        stage.wire._session,
        welcome=lambda: Welcome(name, epoch, models),
        transport=stage.wire.transport,
        clock=stage.wire.clock,
    )
    stage.wire._servers.append(server)
    stage.listed = [*stage.listed, address]
    await stage.wire.beat(1.0)
    return server


async def test_a_scheduler_of_a_lower_epoch_is_not_listened_to(network: Stage) -> None:
    await another(network, "newer", "scheduler-2", 5, {"large": "ready"})
    await another(network, "older", "scheduler-2", 4, {"stale": "ready"})

    assert network.gateway.models() == {"demo": "ready", "large": "ready"}


async def test_a_higher_epoch_ends_the_connection_of_the_lower_and_its_frames_are_dropped(network: Stage) -> None:
    events = await network.running()
    superseded = network.scheduler

    await another(network, "successor", "scheduler-1", 2, {"demo": "ready"})
    superseded.connection.send(Events((done(),)))

    (failure,) = await read(events)
    assert failure.reason == SCHEDULER_LOST
    await network.wire.beat(5.0)
    assert network.gateway.models() == {"demo": "ready"}


# --- who serves what -------------------------------------------------------------------------------------------------


async def test_a_model_that_nobody_serves_is_refused_as_such(stage: Stage) -> None:
    (refusal,) = await read(stage.gateway.submit(submit(model="unknown")))

    assert (refusal.reason, refusal.param, refusal.retry_after) == (Reason.MODEL_NOT_SERVED, "model", None)


async def test_a_model_may_be_at_a_scheduler_that_is_away(network: Stage) -> None:
    network.listed = [*network.listed, "away"]
    await network.wire.beat(2.0)

    (refusal,) = await read(network.gateway.submit(submit(model="unknown")))

    assert refusal.reason == Reason.ENGINE_NOT_READY


async def test_a_model_that_is_not_ready_is_the_schedulers_to_refuse(stage: Stage) -> None:
    stage.scheduler.connection.send(Models({"demo": "starting"}))
    await until(lambda: stage.gateway.models() == {"demo": "starting"})

    events, arrived = await stage.submitted()

    assert arrived.model == "demo"
    stage.say(Refused("r1", Reason.ENGINE_NOT_READY, "It is starting.", retry_after=9.0))
    assert await stage.first == Refused("r1", Reason.ENGINE_NOT_READY, "It is starting.", retry_after=9.0)
    assert await read(events) == []


async def test_requests_go_where_the_model_is_ready(network: Stage) -> None:
    first = network.scheduler
    await another(network, "second", "scheduler-2", 1, {"demo": "starting"})
    second = network.scheduler

    readers = [asyncio.ensure_future(read(network.gateway.submit(submit(f"r{number}")))) for number in range(4)]

    assert len(await first.received(4)) == 4
    assert second.messages == []
    await network.gateway.aclose()
    await asyncio.wait(readers)


async def test_among_schedulers_where_it_is_ready_requests_go_where_fewer_are(network: Stage) -> None:
    first = network.scheduler
    await another(network, "second", "scheduler-2", 1, {"demo": "ready"})
    second = network.scheduler

    readers = [asyncio.ensure_future(read(network.gateway.submit(submit(f"r{number}")))) for number in range(4)]

    assert (len(await first.received(2)), len(await second.received(2))) == (2, 2)
    await network.gateway.aclose()
    await asyncio.wait(readers)


async def test_a_scheduler_that_says_goodbye_gets_no_new_requests_and_ends_the_ones_it_has(stage: Stage) -> None:
    events = await stage.running()

    stage.scheduler.connection.send(Goodbye("draining"))
    await until(lambda: stage.gateway.models() == {})
    (refusal,) = await read(stage.gateway.submit(submit("r2")))
    stage.say(done())

    assert (refusal.reason, refusal.retry_after) == (Reason.ENGINE_NOT_READY, 1.0)
    assert await read(events) == [done()]


async def test_an_address_taken_off_the_list_is_left(network: Stage) -> None:
    network.listed = []

    await network.wire.beat(1.0)

    assert not network.gateway.connected()
    assert network.wire.sessions[0].closed


# --- questions -------------------------------------------------------------------------------------------------------


async def asked(stage: Stage) -> Ask:
    questions: list[Ask] = await until(lambda: stage.said(Ask))
    return questions[-1]


async def test_a_question_is_answered(stage: Stage) -> None:
    asking = asyncio.ensure_future(stage.gateway.ask("queue_status", tier="vip"))
    question = await asked(stage)
    stage.scheduler.connection.send(Answer(question.id, {"waiting": 3}))

    assert (question.what, question.args) == ("queue_status", {"tier": "vip"})
    assert await asking == {"waiting": 3}


async def test_a_question_that_cannot_be_answered_raises_what_the_scheduler_said(stage: Stage) -> None:
    asking = asyncio.ensure_future(stage.gateway.ask("nonsense"))
    stage.scheduler.connection.send(Answer((await asked(stage)).id, error="There is no such question."))

    with pytest.raises(AskError, match="no such question"):
        await asking


async def test_a_question_that_nobody_answers_ends_by_time(stage: Stage) -> None:
    with pytest.raises(GatewayUnavailable, match="in time"):
        await stage.gateway.ask("queue_status")

    stage.scheduler.connection.send(Answer((await asked(stage)).id, "too late"))
    await stage.settled()


async def test_a_question_ends_with_the_connection(stage: Stage) -> None:
    asking = asyncio.ensure_future(stage.gateway.ask("queue_status"))
    await asked(stage)
    stage.scheduler.connection.abort("killed")

    with pytest.raises(GatewayUnavailable, match="lost"):
        await asking


async def test_without_a_scheduler_a_question_is_refused_at_once(tmp_path: Path) -> None:
    gateway = Gateway(list, "web-1", MemoryTransport())

    with pytest.raises(GatewayUnavailable, match="connected"):
        await gateway.ask("queue_status")


# --- telemetry -------------------------------------------------------------------------------------------------------


class Watcher:
    """Reads telemetry into a list."""

    def __init__(self, stage: Stage) -> None:
        self.values: list[dict[str, Any]] = []
        self._task = asyncio.create_task(self._read(stage.gateway))

    async def _read(self, gateway: Gateway) -> None:
        async with contextlib.aclosing(gateway.snapshots()) as snapshots:
            async for value in snapshots:
                self.values.append(value)

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def test_telemetry_comes_over_a_connection_of_its_own_and_survives_its_loss(network: Stage) -> None:
    server, watcher = network.wire._servers[0], Watcher(network)
    await until(lambda: len(server.connections) == 2)
    assert network.gateway.telemetry_fresh_at is None

    server.broadcast(Snapshot(1, {"seq": 1}), TELEMETRY)
    await until(lambda: watcher.values)
    assert network.gateway.telemetry_fresh_at == 100.0
    network.wire.transport.cut()
    await network.wire.beat(2.0)
    await until(lambda: len(server.connections) == 2)
    server.broadcast(Snapshot(2, {"seq": 2}), TELEMETRY)

    await until(lambda: len(watcher.values) == 2)
    assert watcher.values == [{"seq": 1}, {"seq": 2}]
    assert network.gateway.telemetry_fresh_at == 102.0
    await watcher.aclose()
    await until(lambda: len(server.connections) == 1)


async def test_a_watcher_that_lags_gets_the_latest(network: Stage) -> None:
    server, snapshots = network.wire._servers[0], network.gateway.snapshots()
    first = asyncio.ensure_future(anext(snapshots))
    await until(lambda: len(server.connections) == 2)
    server.broadcast(Snapshot(1, {"seq": 1}), TELEMETRY)
    assert await first == {"seq": 1}

    for number in range(2, 10):
        server.broadcast(Snapshot(number, {"seq": number}), TELEMETRY)
    await network.wire.clock.settle()

    assert await anext(snapshots) == {"seq": 9}
    await snapshots.aclose()


async def test_a_gateway_that_closes_leaves_no_task_behind(stage: Stage) -> None:
    watcher = Watcher(stage)
    events = await stage.running()

    await watcher.aclose()
    await stage.gateway.aclose()

    (failure,) = await read(events)
    assert failure.reason == SCHEDULER_LOST
    await until(lambda: not [task for task in asyncio.all_tasks() if "gateway" in task.get_name()])
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("wire-link")])
