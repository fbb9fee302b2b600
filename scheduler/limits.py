"""A caller's limits over all scheduler processes: each knows what went through it, and together they know all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.wire.messages import Limits, LimitState, QueueState

BUDGET = "budget"


def merged(answers: Sequence[Limits]) -> Limits:
    """The answers of all processes to one question about one caller, at least one, as one."""
    limits = tuple(_limit(states) for states in zip(*(answer.limits for answer in answers), strict=True))
    by_model: dict[str, list[QueueState]] = {}
    for answer in answers:
        for queue in answer.queues:
            by_model.setdefault(queue.model, []).append(queue)
    return Limits(
        max(answer.at for answer in answers), limits, tuple(_queue(by_model[name]) for name in sorted(by_model))
    )


def _limit(states: Sequence[LimitState]) -> LimitState:
    first = states[0]
    # What is spent of a budget is the database's figure, the same for all; rates and reservations are each one's own.
    used = max(one.used for one in states) if first.kind == BUDGET else sum(one.used for one in states)
    reserved = sum(one.reserved for one in states)
    return LimitState(
        first.scope,
        first.owner,
        first.model,
        first.kind,
        first.unit,
        first.period,
        first.limit,
        used,
        reserved,
        max(first.limit - used - reserved, 0),
        max(_known(one.reset for one in states), default=None),
    )


def _queue(states: Sequence[QueueState]) -> QueueState:
    """A request goes to one of the processes that serve the model; the shortest wait is what it may hope for."""
    return QueueState(
        states[0].model,
        sum(one.waiting for one in states),
        sum(one.running for one in states),
        min(_known(one.expected_wait for one in states), default=None),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
