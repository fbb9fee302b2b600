"""What the web has of the scheduler: submit a request and read its events, ask a question, follow telemetry.

One `Gateway` per web process, one connection per scheduler process, all requests multiplexed over it. The gateway never
stops reading the wire: the events of a consumer that lags wait in its stream, where texts merge into one. The
scheduling configuration, which is the database's, is passed on here too, so that this is all that the web imports.

Errors:

    GatewayError
    ├── GatewayUnavailable   no scheduler process is connected, or it did not answer in time
    └── AskError             the scheduler process answered that it cannot
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

import msgspec

from scheduler.clock import Clock, RealClock
from scheduler.config import ConfigConflict, ConfigDocument, ConfigError
from scheduler.config import current as config_document
from scheduler.config import update as update_config
from scheduler.core.types import Reason
from scheduler.engines.base import JsonFormat, LikelyToken, Sampling, TokenLogprob, ToolCallDelta, Tools, joined
from scheduler.limits import merged
from scheduler.wire.codec import MessageTooLargeError
from scheduler.wire.link import Epochs, Link, Roster, Wiring, report_death
from scheduler.wire.messages import (
    Accepted,
    Answer,
    AnyMessage,
    Ask,
    BudgetSpec,
    Caller,
    Cancel,
    Delta,
    Done,
    Events,
    Failed,
    Goodbye,
    Limits,
    LimitSpec,
    LimitState,
    Models,
    Refused,
    Snapshot,
    Submit,
)
from scheduler.wire.session import REQUESTS, TELEMETRY
from scheduler.wire.transport import Address, SocketTransport, Transport, socket_path

__all__ = [
    "Accepted",
    "AskError",
    "BudgetSpec",
    "Caller",
    "ConfigConflict",
    "ConfigDocument",
    "ConfigError",
    "Delta",
    "Done",
    "Event",
    "Failed",
    "Gateway",
    "GatewayError",
    "GatewayUnavailable",
    "JsonFormat",
    "LikelyToken",
    "LimitSpec",
    "LimitState",
    "Limits",
    "Refused",
    "Sampling",
    "Submit",
    "TokenLogprob",
    "ToolCallDelta",
    "Tools",
    "config_document",
    "joined",
    "socket_path",
    "update_config",
]

SCHEDULER_LOST = "scheduler_lost"  # reason of a Failed that the gateway itself makes
READY = "ready"  # state of a model that answers
RETRY_AFTER = 1.0  # seconds; a lost scheduler process is usually back by then
ASK_TIMEOUT = 5.0  # seconds

Event = Accepted | Refused | Delta | Done | Failed


class GatewayError(Exception):
    """Root of what the gateway raises."""


class GatewayUnavailable(GatewayError):
    """Nobody to ask."""


class AskError(GatewayError):
    """The scheduler process refused the question; the text is its answer."""


class Gateway:
    """See the module text. `addresses` is read again and again: it must be cheap and must not raise."""

    def __init__(
        self,
        addresses: Callable[[], Iterable[Address]],
        name: str,
        transport: Transport | None = None,
        *,
        clock: Clock | None = None,
        jitter: random.Random | None = None,
        ask_timeout: float = ASK_TIMEOUT,
    ) -> None:
        self.telemetry_fresh_at: float | None = None  # instant of the last snapshot, on `clock`
        self._addresses = addresses
        self._clock = clock or RealClock()
        self._ask_timeout = ask_timeout
        self._wiring = Wiring(
            transport or SocketTransport(),
            self._clock,
            name,
            Epochs(),
            jitter or random.Random(),  # noqa: S311
        )
        self._roster = Roster(addresses, lambda address: _RequestLink(address, self._wiring), self._clock)
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect; does not wait for any scheduler process to be there."""
        self._keeper = _keep(self._roster, "gateway")

    async def aclose(self) -> None:
        """End every connection and with it every request. Idempotent."""
        keeper, self._keeper = self._keeper, None
        await _stop(keeper)

    def connected(self) -> bool:
        """Whether any scheduler process is."""
        return bool(self._connected())

    def models(self) -> dict[str, str]:
        """Model to state, over all connected scheduler processes; ready anywhere is ready."""
        models: dict[str, str] = {}
        for link in self._connected():
            for model, state in link.models.items():
                if models.get(model) != READY:
                    models[model] = state
        return models

    async def submit(self, submit: Submit) -> AsyncGenerator[Event, None]:
        """Accepted or Refused, then Delta*, then exactly one of Done, Failed, Refused.

        Closing the iterator before its end cancels the request. Nothing is raised for what befalls the scheduler: a
        connection that is lost is a Refused before the acceptance and a Failed(`scheduler_lost`) after it.
        """
        link = self._route(submit)
        if isinstance(link, Refused):
            yield link
            return
        stream = _Stream(submit.id)
        entered = self._clock.now()
        await link.room()
        submit.age += self._clock.now() - entered
        link.open(stream, submit)
        try:
            while not stream.taken:
                yield await stream.take()
        finally:
            link.close(stream)

    async def ask(self, what: str, **args: Any) -> Any:
        """The answer of a scheduler process. Raises GatewayUnavailable, AskError."""
        return await self._ask(self._reachable()[0], what, args)

    async def find(self, what: str, **args: Any) -> Any:
        """The answer of the one scheduler process that has one; None if none has. Raises as `ask` does."""
        for link in self._reachable():
            value = await self._ask(link, what, args)
            if value is not None:
                return value
        return None

    async def limits(self, caller: Caller) -> Limits:
        """How the caller's limits and budgets stand, and the queues of its tier, over all scheduler processes.

        Raises GatewayUnavailable, also when one of them does not know: no part is shown as the whole. Raises AskError.
        """
        args = {"caller": caller}
        values = await asyncio.gather(*(self._ask(link, "limits", args) for link in self._reachable()))
        answers = [msgspec.convert(value, Limits) for value in values]
        for answer in answers:
            if answer.unavailable:
                raise GatewayUnavailable(answer.unavailable)
        return merged(answers)

    async def snapshots(self) -> AsyncGenerator[dict[str, Any], None]:
        """Telemetry of every scheduler process as it comes, over connections of its own.

        A reader that lags gets the latest of each process. While none is connected nothing comes;
        `telemetry_fresh_at` tells the age.
        """
        inbox = _Inbox()
        roster = Roster(
            self._addresses, lambda address: _TelemetryLink(address, self._wiring, inbox, self._freshen), self._clock
        )
        keeper = _keep(roster, "gateway-telemetry")
        try:
            while True:
                for value in await inbox.take():
                    yield value
        finally:
            await _stop(keeper)

    def _freshen(self) -> None:
        self.telemetry_fresh_at = self._clock.now()

    async def _ask(self, link: _RequestLink, what: str, args: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._ask_timeout):
                answer = await link.ask(what, args)
        except TimeoutError as error:
            raise GatewayUnavailable("The scheduler process did not answer in time.") from error
        if answer.error is not None:
            raise AskError(answer.error)
        return answer.value

    def _reachable(self) -> list[_RequestLink]:
        links = self._connected()
        if not links:
            raise GatewayUnavailable("No scheduler process is connected.")
        return links

    def _connected(self) -> list[_RequestLink]:
        return [link for link in self._roster.links.values() if link.connection is not None]

    def _route(self, submit: Submit) -> _RequestLink | Refused:
        """The least busy process that serves the model, preferably one where it is ready."""
        links = self._roster.links.values()
        candidates = [link for link in links if submit.model in link.models]
        if candidates:
            return min(candidates, key=lambda link: link.rank(submit.model))
        if links and all(link.connection is not None and not link.leaving for link in links):
            return Refused(submit.id, Reason.MODEL_NOT_SERVED, f"The model {submit.model!r} is not served.", "model")
        return _not_ready(submit.id)


class _Stream:
    """The events of one request that its reader has not taken yet: an acceptance, the news of each answer, an end."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.taken = False  # the end has been read
        self.ended = False  # the end has come
        self._accepted: Accepted | None = None
        self._news: dict[int, _News] = {}  # by answer
        self._tokens = 0
        self._end: Done | Failed | Refused | None = None
        self._ran = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._tokens = event.tokens
            news = self._news.get(event.index)
            if news is None:
                news = self._news[event.index] = _News()
            news.add(event)
        elif isinstance(event, Accepted):
            self._accepted, self._ran = event, True
        elif not self.ended:
            self._end, self.ended = event, True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def lose(self, reason: str) -> None:
        """The connection is gone, and the request with it."""
        if self._ran:
            self.put(Failed(self.id, SCHEDULER_LOST, f"The scheduler process was lost: {reason}.", self._tokens))
        else:
            self.put(_not_ready(self.id))

    async def take(self) -> Event:
        """The next event, in order; everything that has come of an answer is one."""
        while True:
            if (event := self._next()) is not None:
                return event
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _next(self) -> Event | None:
        if self._accepted is not None:
            accepted, self._accepted = self._accepted, None
            return accepted
        if self._news:
            index = next(iter(self._news))
            return self._news.pop(index).delta(self.id, index, self._tokens)
        self.taken = self.ended
        return self._end


class _News:
    """What has come of one answer since its reader has looked last."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._calls: list[ToolCallDelta] = []
        self._finish_reason = ""

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._logprobs += delta.logprobs
        self._calls += delta.tool_calls
        self._finish_reason = delta.finish_reason

    def delta(self, request_id: str, index: int, tokens: int) -> Delta:
        """All of it as one."""
        text, logprobs, calls = "".join(self._texts), tuple(self._logprobs), joined(self._calls)
        return Delta(request_id, text, tokens, index, self._finish_reason, logprobs, calls)


class _RequestLink(Link):
    """The requests and questions of this web process at one scheduler process."""

    def __init__(self, address: Address, wiring: Wiring) -> None:
        super().__init__(address, REQUESTS, wiring)
        self.leaving = False  # it has said Goodbye
        self._streams: dict[str, _Stream] = {}
        self._questions: dict[str, asyncio.Future[Answer]] = {}
        self._question_ids = itertools.count(1)

    def rank(self, model: str) -> tuple[bool, int]:
        """Sort key among links: ready first, then the fewest requests."""
        return (self.models.get(model) != READY, len(self._streams))

    async def room(self) -> None:
        if self.connection is not None:
            await self.connection.room()

    def open(self, stream: _Stream, submit: Submit) -> None:
        """Send the request; what comes of it, whatever it is, arrives in `stream`."""
        if stream.id in self._streams:
            raise ValueError(f"The request {stream.id} is under way already.")
        self._streams[stream.id] = stream
        try:
            if self.connection is None or not self.connection.send(submit):
                stream.lose("not connected")
        except MessageTooLargeError as error:
            stream.put(Refused(stream.id, Reason.CONTEXT_LENGTH, str(error), "messages"))

    def close(self, stream: _Stream) -> None:
        """Forget the request; one that has not ended is cancelled."""
        del self._streams[stream.id]
        if not stream.ended and self.connection is not None:
            self.connection.send(Cancel(stream.id))

    async def ask(self, what: str, args: dict[str, Any]) -> Answer:
        question = Ask(str(next(self._question_ids)), what, args)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions[question.id] = future
        try:
            if self.connection is None or not self.connection.send(question):
                raise GatewayUnavailable("The scheduler process is not connected.")
            return await future
        finally:
            del self._questions[question.id]

    def on_message(self, message: AnyMessage) -> None:
        match message:
            case Events():
                for event in message.events:
                    self._put(event)
            case Accepted() | Refused():
                self._put(message)
            case Answer():
                future = self._questions.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message)
            case Models():
                self.models = message.models
            case Goodbye():
                # It takes no more requests; those that it has come to their end.
                self.leaving, self.models = True, {}
            case _:
                self.cut(f"a scheduler process does not say {type(message).__name__}")

    def _put(self, event: Event) -> None:
        stream = self._streams.get(event.id)
        if stream is not None:  # else its reader has left, and the cancellation is under way
            stream.put(event)

    def on_lost(self, reason: str) -> None:
        self.leaving = False
        for stream in self._streams.values():
            stream.lose(reason)
        for future in self._questions.values():
            if not future.done():
                future.set_exception(GatewayUnavailable(f"The scheduler process was lost: {reason}."))


class _Inbox:
    """The latest snapshot of each address that has not been read."""

    def __init__(self) -> None:
        self._latest: dict[Address, dict[str, Any]] = {}
        self._filled = asyncio.Event()

    def put(self, address: Address, value: dict[str, Any]) -> None:
        self._latest[address] = value
        self._filled.set()

    async def take(self) -> list[dict[str, Any]]:
        await self._filled.wait()
        self._filled.clear()
        latest, self._latest = self._latest, {}
        return list(latest.values())


class _TelemetryLink(Link):
    """The one-way subscription at one scheduler process."""

    def __init__(self, address: Address, wiring: Wiring, inbox: _Inbox, freshen: Callable[[], None]) -> None:
        super().__init__(address, TELEMETRY, wiring)
        self._inbox = inbox
        self._freshen = freshen

    def on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Snapshot):
            self._freshen()
            self._inbox.put(self.address, message.value)

    def on_lost(self, reason: str) -> None:
        """Nothing to end: that nothing comes any more is what tells the reader."""


def _not_ready(request_id: str) -> Refused:
    return Refused(
        request_id, Reason.ENGINE_NOT_READY, "The scheduler process is not connected.", retry_after=RETRY_AFTER
    )


def _keep(roster: Roster[Any], name: str) -> asyncio.Task[None]:
    task = asyncio.create_task(roster.keep(), name=name)
    task.add_done_callback(report_death)
    return task


async def _stop(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
