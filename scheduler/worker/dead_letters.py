"""Writes dead letters off the loop, and runs them again.

    put ──► (buffer) ──► database ──► retry: open ──► retried, with its answer    the retry finished
                                                └──► open again                   it did not

A retry is a request like any other of its caller and model, with a new id and nobody who listens. It is billed, so
that its answer is stored with the letter. A retry that fails opens its letter again and makes none of its own; if this
process dies under a retry, its successor opens the letter.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
import structlog

from scheduler import dead_letters
from scheduler.clock import Clock
from scheduler.dead_letters import Cause, Letter
from scheduler.engines.base import ToolCallDelta, joined
from scheduler.wire import messages
from scheduler.worker.flight import Flight
from scheduler.worker.outbox import Session
from tenants.database import DatabaseAway, DatabaseThread

log = structlog.get_logger(__name__)

BUFFERED = 1_000  # letters and endings of retries that wait for the database; at a flood the newest
RETRY_SECONDS = 1.0  # while the database is away

Submitter = Callable[[Session, messages.Submit], None]


class DeadLetters:
    """Of one scheduler process. Letters that the process could not write before it died are lost: the ledger is not."""

    def __init__(self, clock: Clock, thread: DatabaseThread) -> None:
        self._clock = clock
        self._thread = thread
        self._work: deque[Callable[[], object]] = deque(maxlen=BUFFERED)
        self._news = asyncio.Event()
        self._retries: set[str] = set()  # ids of requests that are retries

    def put(self, flight: Flight, cause: Cause, message: str) -> None:
        """The flight has died of that."""
        if flight.id in self._retries:
            return
        caller = flight.submit.caller
        letter = Letter(
            request_id=flight.id,
            tenant_id=caller.tenant,
            tenant_slug=caller.tenant_slug,
            key_id=caller.key,
            tier=flight.tier_name,
            model=flight.submit.model,
            cause=cause,
            message=message,
            submitted_at=_instant(flight.arrived_at),
            died_at=_instant(flight.unix(self._clock.now())),
            payload=dead_letters.pack(flight.submit),
        )
        self._later(partial(dead_letters.write, [letter]))
        log.warning("dead letter", request_id=flight.id, cause=str(cause), message=message)

    async def retry(self, letter_id: int, submit: Submitter) -> str:
        """Run a letter's request again; the id of the new request. Raises RetryError, DatabaseAway."""
        request_id = f"req_{uuid4().hex}"
        submission = await self._thread.run(dead_letters.claim, letter_id, request_id)
        self._retries.add(request_id)
        submit(Session(_Listener(partial(self._retried, letter_id, request_id), submission.sampling.n)), submission)
        return request_id

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._news.wait()
            if not await self.write():
                await self._clock.sleep(RETRY_SECONDS)

    async def write(self) -> bool:
        """Write what waits; False if the database is away."""
        self._news.clear()
        while self._work:
            work = self._work[0]
            try:
                await self._thread.run(work)
            except DatabaseAway as error:
                log.warning("dead letters wait for the database", letters=len(self._work), error=type(error).__name__)
                self._news.set()
                return False
            except Exception:  # the boundary of a write: a letter that no column fits must not hold up the others
                log.exception("a dead letter could not be written")
            if self._work and self._work[0] is work:  # a flood may have pushed it out meanwhile
                self._work.popleft()
        return True

    def _retried(self, letter_id: int, request_id: str, end: messages.Done | str, answers: Sequence[_Answer]) -> None:
        self._retries.discard(request_id)
        if isinstance(end, str):
            self._later(partial(dead_letters.reopen, letter_id, end))
            return
        first, *others = [one.document() for one in answers]
        answer = {
            **first,
            **({"others": others} if others else {}),
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
        }
        self._later(partial(dead_letters.answered, letter_id, msgspec.json.encode(answer).decode()))

    def _later(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self._news.set()


class _Answer:
    """One answer of a retry, as it is kept."""

    def __init__(self) -> None:
        self._text = ""
        self._calls: list[ToolCallDelta] = []
        self._finish_reason = ""

    def add(self, part: messages.Delta | messages.Done) -> None:
        self._text += part.text
        self._calls += part.tool_calls if isinstance(part, messages.Delta) else ()
        self._finish_reason = part.finish_reason

    def document(self) -> dict[str, Any]:
        calls = [{"name": call.name, "arguments": call.arguments} for call in joined(self._calls)]
        return {
            "text": self._text,
            **({"tool_calls": calls} if calls else {}),
            "finish_reason": self._finish_reason,
        }


class _Listener:
    """The connection of a retry: gathers its answers and tells its end, or why there is none."""

    def __init__(self, on_end: Callable[[messages.Done | str, Sequence[_Answer]], None], answers: int) -> None:
        self._on_end = on_end
        self._answers = [_Answer() for _ in range(answers)]

    def send(self, message: messages.AnyMessage) -> bool:
        for event in message.events if isinstance(message, messages.Events) else ():
            if isinstance(event, messages.Delta | messages.Done):
                self._answers[event.index].add(event)
            if isinstance(event, messages.Done):
                self._on_end(event, self._answers)
            elif isinstance(event, messages.Refused | messages.Failed):
                self._on_end(f"The retry did not finish: {event.message}", ())
        return True


def _instant(unix: float) -> datetime:
    return datetime.fromtimestamp(unix, UTC)
