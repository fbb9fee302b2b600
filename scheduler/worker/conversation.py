"""One web process on the line: what it says goes to the intake, what it asks is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog

from scheduler.wire.connection import Connection
from scheduler.wire.messages import Answer, AnyMessage, Ask, Cancel, Submit
from scheduler.worker.intake import Intake
from scheduler.worker.outbox import Session

log = structlog.get_logger(__name__)

MAX_QUESTIONS = 64  # in progress on one connection

Answerer = Callable[[Mapping[str, Any]], Awaitable[Any]]


class Conversation:
    """The wire's handler of one connection. `answers`: question -> who answers it."""

    def __init__(self, connection: Connection, peer: str, intake: Intake, answers: Mapping[str, Answerer]) -> None:
        self._connection = connection
        self._peer = peer
        self._intake = intake
        self._answers = answers
        self._session = Session(connection)
        self._questions: set[asyncio.Task[None]] = set()
        log.info("web process connected", peer=peer)

    def on_message(self, message: AnyMessage) -> None:
        if isinstance(message, Submit):
            self._intake.submit(self._session, message)
        elif isinstance(message, Cancel):
            self._intake.cancel(self._session, message.id)
        elif isinstance(message, Ask):
            self._ask(message)
        else:
            self._connection.abort(f"a web process does not say {type(message).__name__}")

    def on_closed(self, reason: str) -> None:
        log.info("web process gone", peer=self._peer, reason=reason, requests=len(self._session.flights))
        self._intake.hang_up(self._session)
        for task in self._questions:
            task.cancel()

    def _ask(self, ask: Ask) -> None:
        if len(self._questions) >= MAX_QUESTIONS:
            self._connection.send(Answer(ask.id, error="too many questions at a time"))
            return
        task = asyncio.create_task(self._answer(ask), name=f"ask-{ask.what}")
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _answer(self, ask: Ask) -> None:
        answerer = self._answers.get(ask.what)
        if answerer is None:
            self._connection.send(Answer(ask.id, error=f"unknown question {ask.what!r}"))
            return
        try:
            answer = Answer(ask.id, value=await answerer(ask.args))
        except Exception:  # the boundary of a question: whoever asked must get an answer
            log.exception("question failed", what=ask.what)
            answer = Answer(ask.id, error="the scheduler could not answer")
        self._connection.send(answer)
