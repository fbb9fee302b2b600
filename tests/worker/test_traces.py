"""What can be read back about a request."""

from __future__ import annotations

import pytest

from .test_preemption import evict, returned, running

pytestmark = pytest.mark.usefixtures("demo")


async def trace(product, answer, *, redacted=False):
    return await product.gateway.find("trace", id=answer.request.id, redacted=redacted)


async def test_a_request_is_explained_from_its_arrival_to_its_end(start):
    async with start() as product:
        await product.ready()
        busy = [product.submit(max_tokens=60) for _ in range(4)]
        await product.until(lambda: all(len(answer.events) > 1 for answer in busy))
        answer = product.submit(tier="free", max_tokens=8)
        await product.until(lambda: answer.kinds() == ["Accepted"])
        assert (await trace(product, answer))["state"] == "live"
        await product.until(answer.done)
        document = await trace(product, answer)
    events = {event["event"]: event for event in document["events"]}
    assert list(events) == ["opened", "queued", "held", "dispatched", "first_token", "ended"]
    assert (document["state"], document["tier"], document["tenant"]) == ("ended", "free", "1")
    assert events["held"]["reason"] == "slots_full"
    assert events["held"]["rounds"] >= 1
    assert events["held"]["until"] <= events["dispatched"]["at"] <= events["first_token"]["at"] <= events["ended"]["at"]
    assert events["dispatched"]["batch_id"] == answer.last.batch.batch_id
    assert events["ended"] == {"at": events["ended"]["at"], "event": "ended", "reason": "finished", "tokens": 8}


async def test_a_refused_request_is_explained_as_well(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(max_tokens=100_000)
        await product.until(answer.done)
        document = await trace(product, answer)
    assert [(event["event"], event["reason"]) for event in document["events"]] == [
        ("opened", None),
        ("ended", answer.last.reason),
    ]


async def test_a_tenant_is_told_nothing_of_others(start):
    async with start() as product:
        await product.ready()
        answer = await running(product)
        evict(product, answer)
        await returned(product, answer)
        await product.until(answer.done)
        whole = await trace(product, answer)
        redacted = await trace(product, answer, redacted=True)
    preempted = next(event for event in whole["events"] if event["event"] == "preempted")
    assert preempted["beneficiary"]
    told = {name for event in redacted["events"] for name in event}
    assert not told & {"beneficiary", "batch_mates", "batch_id"}
    assert [event["event"] for event in redacted["events"]] == [event["event"] for event in whole["events"]]


async def test_nobody_knows_a_request_that_never_came(start):
    async with start() as product:
        await product.ready()
        assert await product.gateway.find("trace", id="req-nobody", redacted=False) is None
