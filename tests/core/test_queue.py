from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.queue import WaitingQueue
from scheduler.core.types import Lane
from tests.core.cast import request


def test_equal_keys_leave_in_order_of_arrival() -> None:
    queue = WaitingQueue(lambda _: 0.0)
    for id in "abc":
        queue.push(request(id))
    left = []
    while heads := queue.heads():
        left.append(heads[0].id)
        queue.remove(heads[0].id)
    assert left == ["a", "b", "c"]


def test_each_lane_of_each_tier_has_a_head() -> None:
    queue = WaitingQueue(lambda waiting: waiting.arrival)
    queue.push(request("short", "gold"))
    queue.push(request("long", "gold", lane=Lane.LONG))
    queue.push(request("other", "bronze"))
    assert {head.id for head in queue.heads()} == {"short", "long", "other"}


def test_an_id_cannot_wait_twice() -> None:
    queue = WaitingQueue(lambda waiting: waiting.arrival)
    queue.push(request("a"))
    with pytest.raises(ValueError, match="waiting already"):
        queue.push(request("a"))


def test_rekeying_orders_what_waits_anew() -> None:
    queue = WaitingQueue(lambda waiting: waiting.arrival)
    queue.push(request("early", arrival=1.0, deadline=9.0))
    queue.push(request("urgent", arrival=2.0, deadline=3.0))
    assert queue.heads()[0].id == "early"
    queue.rekey(lambda waiting: waiting.deadline)
    assert queue.heads()[0].id == "urgent"


def test_memory_follows_what_waits_not_what_has_passed() -> None:
    queue = WaitingQueue(lambda waiting: waiting.arrival)
    queue.push(request("first", arrival=0.0))
    for n in range(10_000):
        passing = request(f"r{n}", arrival=float(n + 1))
        queue.push(passing)
        queue.remove(passing.id)
    heaps = [*queue._lanes.values(), *queue._tenants.values(), *queue._arrivals.values(), queue._instants]
    entries = sum(len(heap) for heap in heaps)
    assert entries < 500


operation = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 20), st.floats(0, 100), st.floats(0, 100)),
    st.tuples(st.just("remove"), st.integers(0, 20)),
    st.tuples(st.just("expire"), st.floats(0, 100)),
)


@given(st.lists(operation, max_size=80))
def test_the_queue_behaves_like_a_plain_list(operations: list[tuple]) -> None:
    """Same head, same length, same oldest and same expiry as a list searched from end to end."""
    queue = WaitingQueue(lambda waiting: waiting.arrival)
    model: list = []
    for step in operations:
        if step[0] == "push" and f"r{step[1]}" not in queue:
            waiting = request(f"r{step[1]}", arrival=step[2], queue_deadline=step[3])
            queue.push(waiting)
            model.append(waiting)
        elif step[0] == "remove" and model:
            queue.remove(model.pop(step[1] % len(model)).id)
        elif step[0] == "expire":
            expected = {waiting.id for waiting in model if waiting.queue_deadline <= step[1]}
            assert {waiting.id for waiting in queue.pop_due(step[1])} == expected
            for id in expected:
                queue.remove(id)
            model = [waiting for waiting in model if waiting.id not in expected]
        assert len(queue) == queue.length("silver") == len(model)
        assert queue.oldest_arrival("silver") == min((waiting.arrival for waiting in model), default=None)
        assert queue.next_due() == min((waiting.queue_deadline for waiting in model), default=None)
        assert [head.arrival for head in queue.heads()] == sorted(waiting.arrival for waiting in model)[:1]
        assert list(queue) == model
