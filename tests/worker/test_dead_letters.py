"""Requests that died of us: written down, bounded, and run again."""

from __future__ import annotations

import json

import msgspec
import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError

from scheduler import dead_letters
from scheduler.gateway import Caller, JsonFormat, Sampling, Submit, Tools
from scheduler.models import DeadLetter
from tenants.models import UsageRecord

from .conftest import limit

pytestmark = pytest.mark.usefixtures("demo")


async def letter(product, **where):
    """The one letter, once it is written."""

    async def written():
        return await DeadLetter.objects.filter(**where).acount() == 1

    await product.until(written)
    return await DeadLetter.objects.aget(**where)


async def died_waiting(product, **changes):
    """A request that has waited too long, and what kept it from its turn."""
    running = [product.submit(max_tokens=400) for _ in range(4)]
    await product.until(lambda: all(len(answer.events) > 1 for answer in running))
    answer = product.submit(queue_timeout=0.5, **changes)
    await product.until(answer.done)
    assert answer.last.reason == "queue_timeout"
    for one in running:
        await one.hang_up()
    return answer


async def retried(product, row):
    """The answer of the scheduler process, and the letter once the retry is over."""
    answer = await product.gateway.ask("retry_dead_letter", id=row.pk)

    async def over():
        state = await DeadLetter.objects.aget(pk=row.pk)
        return bool(state.answer) or state.state == DeadLetter.State.OPEN

    await product.until(over)
    return answer, await DeadLetter.objects.aget(pk=row.pk)


async def test_what_waited_too_long_is_a_letter_with_its_cause(start):
    async with start() as product:
        await product.ready()
        answer = await died_waiting(product, tier="free")
        row = await letter(product)
    assert (row.request_id, row.cause, row.state) == (answer.request.id, "waited_too_long", "open")
    assert (row.tenant_id, row.tenant_slug, row.key_id, row.tier, row.model) == ("1", "acme", "7", "free", "demo")
    assert "waited 0.5 s" in row.message
    assert (row.died_at - row.submitted_at).total_seconds() == pytest.approx(0.5, abs=0.05)


async def test_a_request_under_which_two_engines_died_is_not_tried_a_third_time(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(simulate={"crash_at": 0})
        await product.until(answer.done)
        assert answer.last.reason == "engine_failed"
        row = await letter(product)
        await product.settled()
        product.assert_nothing_is_held()
        assert (await UsageRecord.objects.aget()).completion_tokens == 0
        metrics = await product.gateway.ask("metrics")
    assert row.cause == "crashed_engine_twice"
    assert 'harness_engine_deaths_total{model="demo"} 2.0' in metrics


async def test_a_request_that_cannot_go_on_is_a_letter_too(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(simulate={"crash_at": 2})
        await product.until(answer.done)
        row = await letter(product)
    assert row.cause == "not_resumable"


async def test_a_retry_runs_the_same_request_and_keeps_its_answer_instead_of_the_prompt(start):
    async with start() as product:
        await product.ready()
        sampling = Sampling(max_tokens=6, stop=("w4",), logit_bias={7: 1.5})
        died = await died_waiting(product, words=5, sampling=sampling, limits=(limit("rpm", 100),))
        row = await letter(product)
        submission = dead_letters.unpack(row.payload, "again")
        assert (submission.sampling, submission.caller) == (died.request.sampling, died.request.caller)
        answer, row = await retried(product, row)
        await product.settled()
        usage = await UsageRecord.objects.aget(request_id=answer["retried_as"])
        product.assert_nothing_is_held()
    assert (row.state, row.retried_as, row.payload) == ("retried", answer["retried_as"], "")
    assert json.loads(row.answer) == {
        "text": "w0 w1 w2 w3 ",
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "completion_tokens": 5,
    }
    assert (usage.status, usage.tenant_id, usage.completion_tokens) == ("finished", "1", 5)


async def test_a_retry_keeps_every_answer_and_what_it_calls(start):
    tools = Tools('[{"type": "function", "function": {"name": "now"}}]', "required")
    sampling = Sampling(max_tokens=6, n=2, logprobs=2, format=JsonFormat(), tools=tools)
    async with start() as product:
        await product.ready()
        await died_waiting(product, sampling=sampling)
        row = await letter(product)
        assert dead_letters.unpack(row.payload, "again").sampling == sampling
        _, row = await retried(product, row)
    call = {"text": "", "tool_calls": [{"name": "now", "arguments": "{}"}], "finish_reason": "tool_calls"}
    kept = json.loads(row.answer)
    assert {key: kept[key] for key in call} == call
    assert kept["others"] == [call]


async def test_a_retry_that_dies_opens_its_letter_again_and_makes_no_other(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(simulate={"crash_at": 2})
        await product.until(answer.done)
        row = await letter(product)
        await product.ready()
        _, row = await retried(product, row)
        assert row.state == "open"
        assert "did not finish" in row.message
        assert await DeadLetter.objects.acount() == 1


async def test_a_letter_whose_retry_the_process_did_not_survive_is_open_again(start):
    async with start() as product:
        await product.ready()
        await died_waiting(product)
        row = await letter(product)
        other = await DeadLetter.objects.aget(pk=row.pk)
        other.pk, other.model = None, "elsewhere"
        await other.asave()
        for one in (row, other):
            await sync_to_async(dead_letters.claim)(one.pk, "died-with-it")
    async with start() as product:
        await product.ready()
        row = await DeadLetter.objects.aget(pk=row.pk)
        assert (row.state, "scheduler stopped" in row.message) == ("open", True)
        assert (await DeadLetter.objects.aget(pk=other.pk)).state == "retried", "another process serves that model"
        _, row = await retried(product, row)
        assert (row.state, json.loads(row.answer)["completion_tokens"]) == ("retried", 4)


async def test_a_letter_of_before_budgets_can_be_read():
    caller, said = Caller("1", "acme", "7", "vip"), ({"role": "user", "content": "x"},)
    submit = Submit("a", 1, 0.0, caller, "demo", said, Sampling(), stream=False)
    document = json.loads(dead_letters.pack(submit))
    del document["caller"]["budgets"]
    assert dead_letters.unpack(json.dumps(document), "b") == msgspec.structs.replace(submit, id="b")


async def test_a_letter_is_retried_once_and_an_unknown_one_not_at_all(start):
    async with start() as product:
        await product.ready()
        await died_waiting(product)
        row = await letter(product)
        await retried(product, row)
        assert "only an open one" in (await product.gateway.ask("retry_dead_letter", id=row.pk))["refused"]
        assert "no such" in (await product.gateway.ask("retry_dead_letter", id=10**9))["refused"]


async def test_a_request_that_is_too_large_is_not_kept_and_says_so(start):
    async with start() as product:
        await product.ready()
        big = ({"role": "user", "content": "漢" * 30_000},)
        await died_waiting(product, messages=big)
        row = await letter(product)
        assert row.payload == ""
        assert "too large" in (await product.gateway.ask("retry_dead_letter", id=row.pk))["refused"]


async def test_letters_wait_for_a_database_that_is_away(start, monkeypatch):
    write, tries = dead_letters.write, []

    def away_twice(letters):
        tries.append(letters)
        if len(tries) <= 2:
            raise OperationalError("no such host")
        write(letters)

    monkeypatch.setattr(dead_letters, "write", away_twice)
    async with start() as product:
        await product.ready()
        await died_waiting(product)
        await letter(product)
    assert len(tries) >= 3
    assert await DeadLetter.objects.acount() == 1, "a write that the end of the process cuts short is repeated"


async def test_a_letter_that_is_written_again_is_there_once(start, monkeypatch):
    async with start() as product:
        await product.ready()
        put = []
        write = dead_letters.write
        monkeypatch.setattr(dead_letters, "write", lambda letters: (put.append(letters), write(letters)))
        await died_waiting(product)
        await letter(product)
        await sync_to_async(write)(put[0])
        assert await DeadLetter.objects.acount() == 1


async def test_only_the_newest_letters_are_kept(start, monkeypatch):
    monkeypatch.setattr(dead_letters, "KEPT", 3)
    async with start() as product:
        await product.ready()
        await died_waiting(product)
        row = await letter(product)
        fields = {
            name: getattr(row, name)
            for name in dead_letters.Letter.__dataclass_fields__  # the columns that a letter brings
        }
        for number in range(5):
            one = dead_letters.Letter(**fields | {"request_id": f"flood-{number}"})
            await sync_to_async(dead_letters.write)([one])
        kept = [row.request_id async for row in DeadLetter.objects.all()]
    assert kept == ["flood-4", "flood-3", "flood-2"]


async def test_a_discarded_letter_forgets_what_was_asked(start):
    async with start() as product:
        await product.ready()
        await died_waiting(product)
        row = await letter(product)
    assert await sync_to_async(dead_letters.discard)(row.pk) is True
    assert await sync_to_async(dead_letters.discard)(row.pk) is False
    row = await DeadLetter.objects.aget(pk=row.pk)
    assert (row.state, row.payload) == ("discarded", "")
