"""A chat completion from the request line to the last byte, on raw ASGI."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import msgspec
import pytest

from harness_web.openai import exchange, sse
from harness_web.openai.errors import ApiError
from scheduler.wire.messages import Accepted, Delta, LimitSpec, Refused, Submit
from tests.web.cast import LIMITS, Scheduler, Stage, accepted, done, fails_after, refuses, until, words

BATCH = {"batch_id": "b1", "batch_size": 1.5, "wait_time": 0.01, "compute_time": 0.2}
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 3,
    "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 1},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


# --- in one piece ---------------------------------------------------------------------------------------------------


async def test_an_answer_in_one_piece_is_openais_body_with_batch_info(stage: Stage) -> None:
    stage.scheduler.script = words("Hel", "lo", "!")
    reply = await stage.chat()
    body = reply.json
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert body["id"] == reply.headers["x-request-id"].replace("req_", "chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "demo")
    assert body["choices"] == [
        {
            "message": {"content": "Hello!", "role": "assistant", "refusal": None},
            "finish_reason": "stop",
            "index": 0,
            "logprobs": None,
        }
    ]
    assert (body["usage"], body["batch_info"]) == (USAGE, BATCH)


async def test_the_scheduler_is_told_what_the_key_entitles_to_and_what_the_body_wishes(stage: Stage) -> None:
    stage.scheduler.script = words("x")
    reply = await stage.chat(
        max_tokens=7,
        temperature=0.5,
        stop="END",
        priority="low",
        slo_threshold=2.5,
        queue_timeout=9,
        simulate={"tokens": 1},
        user="u",
        tier="gold",
    )
    submit = stage.scheduler.submits[0]
    assert submit.id == reply.headers["x-request-id"]
    assert (submit.caller.tenant_slug, submit.caller.tier, submit.caller.key) == ("acme", "vip", "key-acme")
    assert submit.caller.limits == (LimitSpec("tenant", "id-acme", "", "rpm", 600),)
    assert (submit.model, submit.messages) == ("demo", ({"role": "user", "content": "hi"},))
    assert (submit.sampling.max_tokens, submit.sampling.temperature, submit.sampling.stop) == (7, 0.5, ("END",))
    assert (submit.priority, submit.slo_threshold, submit.queue_timeout) == ("low", 2.5, 9.0)
    assert (submit.stream, submit.simulate, submit.attempt) == (False, {"tokens": 1}, 1)
    assert 0 <= submit.age < 5


async def test_every_answer_carries_identity_and_limits(stage: Stage) -> None:
    stage.scheduler.script = words("x")
    for stream in (False, True):
        headers = (await stage.chat(stream=stream)).headers
        assert headers["x-request-id"].startswith("req_")
        assert headers["openai-version"] == "2020-10-01"
        assert headers["openai-organization"] == "acme"
        assert headers["openai-processing-ms"].isdigit()
        assert headers["x-ratelimit-limit-requests"] == str(int(LIMITS["limit-requests"]))
        assert headers["x-ratelimit-reset-requests"] == "100ms"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_degraded_service_says_so_in_its_answers_and_refusals(stage: Stage, stream: bool) -> None:
    def degraded(scheduler: Scheduler, submit: Submit) -> None:
        if len(scheduler.submits) == 1:
            scheduler.say(Accepted(submit.id, "vip", 3, {}, 2), done(submit.id))
        else:
            scheduler.say(Refused(submit.id, "degraded", "Better tiers go first.", degradation=2))

    stage.scheduler.script = degraded
    for status in (200, 503):
        reply = await stage.chat(stream=stream)
        assert (reply.status, reply.headers["x-harness-degradation"]) == (status, "2")
    stage.scheduler.script = words("x")
    assert "x-harness-degradation" not in (await stage.chat(stream=stream)).headers


@pytest.mark.parametrize("salt", ["", "id-acme", "5f7d8a", "\u0000", None, 7])
async def test_fr_079_a_salt_of_the_callers_own_changes_nothing(stage: Stage, salt: Any) -> None:
    """FR-079: it is dropped; what keeps the tenants' prompts apart comes from the scheduler alone."""
    stage.scheduler.script = words("x")
    assert (await stage.chat()).status == (await stage.chat(cache_salt=salt, prompt_cache_key="k")).status == 200
    plain, salted = stage.scheduler.submits
    assert msgspec.structs.replace(salted, id=plain.id, age=plain.age) == plain


async def test_request_ids_are_ours_and_never_the_callers(stage: Stage) -> None:
    stage.scheduler.script = words("x")
    replies = [await stage.chat(headers={"x-request-id": "req_mine"}) for _ in range(2)]
    assert len({reply.headers["x-request-id"] for reply in replies} | {"req_mine"}) == 3


# --- as a stream ----------------------------------------------------------------------------------------------------


async def test_a_stream_has_one_identity_one_role_and_one_finish_reason(stage: Stage) -> None:
    """FR-032."""
    stage.scheduler.script = words("a", "b", "c", reason="length")
    reply = await stage.chat(stream=True)
    assert reply.events[-1] == "[DONE]"
    assert reply.events.count("[DONE]") == 1
    chunks = reply.chunks
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "abc"
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk.get("batch_info") for chunk in chunks] == [None] * (len(chunks) - 1) + [BATCH]


async def test_an_answer_without_a_token_still_has_role_and_finish_reason(stage: Stage) -> None:
    """FR-032, the immediate end."""
    stage.scheduler.script = words()
    chunks = (await stage.chat(stream=True)).chunks
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]


async def test_usage_comes_once_and_only_when_asked_for(stage: Stage) -> None:
    """FR-021."""
    stage.scheduler.script = words("a", "b", "c")
    reply = await stage.chat(stream=True, stream_options={"include_usage": True})
    *others, last = reply.chunks
    assert (last["choices"], last["usage"], last["batch_info"]) == ([], USAGE, BATCH)
    assert all(chunk["usage"] is None and "batch_info" not in chunk for chunk in others)
    assert others[-1]["choices"][0]["finish_reason"] == "stop"


async def test_stream_headers_forbid_buffering(stage: Stage) -> None:
    """FR-033."""
    stage.scheduler.script = words("a")
    headers = (await stage.chat(stream=True)).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache, no-transform"
    assert headers["x-accel-buffering"] == "no"
    assert not {"content-length", "content-encoding", "transfer-encoding", "connection"} & set(headers)


@pytest.mark.parametrize("text", ['"quoted" \\ \n\t', "漢字🎉", "\u2028</script>", "\x00"])
def test_the_quick_way_to_write_a_text_chunk_equals_the_plain_one(text: str) -> None:
    for include_usage in (False, True):
        chunks = sse.Chunks("chatcmpl-1", 5, 'mo"del', include_usage=include_usage)
        plain = chunks._choice(sse.ChunkChoice(delta=sse.ChunkDelta(content=text)))
        assert chunks.text(0, text) == plain
        assert json.loads(plain.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


async def test_fr_010_what_is_no_request_is_refused_before_any_limit_hears_of_it(stage: Stage) -> None:
    """FR-010 i."""
    reply = await stage.chat(messages=[{"role": "user2", "content": "hi"}])
    assert (reply.status, reply.error["param"]) == (400, "messages[0].role")
    assert stage.scheduler.submits == []


async def test_headers_wait_for_the_first_engine_event(stage: Stage) -> None:
    client = stage.open_chat(stream=True)
    submit = (await until(lambda: stage.scheduler.submits))[0]
    stage.scheduler.say(accepted(submit.id))
    await stage.settle()
    assert client.reply.status == 0
    stage.scheduler.say(Delta(submit.id, "a", 1))
    await until(lambda: client.reply.body)
    assert (client.reply.status, client.reply.complete) == (200, False)
    stage.scheduler.say(done(submit.id, 1))
    assert (await client.finish()).complete


async def test_texts_that_piled_up_behind_a_slow_client_share_a_chunk(stage: Stage) -> None:
    client = stage.open_chat(stream=True)
    submit = (await until(lambda: stage.scheduler.submits))[0]
    stage.scheduler.say(accepted(submit.id), Delta(submit.id, "a", 1))
    await until(lambda: client.reply.writes)
    client.reading.clear()
    for number in range(2, 102):
        stage.scheduler.say(Delta(submit.id, "x", number))
    stage.scheduler.say(done(submit.id, 101))
    await stage.settle()
    client.reading.set()
    reply = await client.finish()
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in reply.chunks) == "a" + "x" * 100
    assert len(reply.chunks) < 10


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "fields", "status", "type_", "code"),
    [
        ("model_not_served", {}, 404, "invalid_request_error", "model_not_found"),
        ("context_length_exceeded", {"param": "messages"}, 400, "invalid_request_error", "context_length_exceeded"),
        ("invalid_prompt", {"param": "messages"}, 400, "invalid_request_error", "invalid_prompt"),
        ("limit_too_large", {"param": "max_tokens"}, 400, "invalid_request_error", "request_too_large"),
        ("limit_rpm", {"retry_after": 7.0}, 429, "rate_limit_error", "rate_limit_exceeded"),
        ("limit_tpm", {"retry_after": 7.0}, 429, "rate_limit_error", "rate_limit_exceeded"),
        ("limit_key_spend", {}, 429, "insufficient_quota", "project_spend_limit_exceeded"),
        ("limit_tenant_tokens", {}, 429, "insufficient_quota", "organization_usage_limit_exceeded"),
        ("queue_full", {}, 503, "service_unavailable_error", "server_is_overloaded"),
        ("queue_timeout", {}, 503, "service_unavailable_error", "server_is_overloaded"),
        ("engine_not_ready", {}, 503, "service_unavailable_error", "server_is_overloaded"),
    ],
)
async def test_a_refusal_is_the_same_status_and_body_with_and_without_stream(
    stage: Stage, reason: str, fields: dict[str, Any], status: int, type_: str, code: str
) -> None:
    """FR-030, FR-040."""
    stage.scheduler.script = refuses(reason, **fields)
    whole, streamed = await stage.chat(), await stage.chat(stream=True)
    assert whole.body == streamed.body
    for reply in (whole, streamed):
        assert (reply.status, reply.headers["content-type"]) == (status, "application/json")
        assert (reply.error["type"], reply.error["code"]) == (type_, code)
        retry = status == 503 or reason in ("limit_rpm", "limit_tpm")
        assert reply.headers["x-should-retry"] == ("true" if retry else "false")
        assert ("retry-after" in reply.headers) == retry
    if fields.get("retry_after"):
        assert whole.headers["retry-after"] == "7"


async def test_limits_are_shown_on_a_refusal_too(stage: Stage) -> None:
    stage.scheduler.script = refuses("limit_rpm", limits={"remaining-requests": 0.0, "reset-requests": 7.0})
    headers = (await stage.chat()).headers
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-reset-requests"]) == ("0", "7s")


async def test_a_failure_before_the_first_token_is_a_status(stage: Stage) -> None:
    """FR-030."""
    stage.scheduler.script = fails_after(0)
    for stream in (False, True):
        reply = await stage.chat(stream=stream)
        assert (reply.status, reply.error["type"]) == (502, "server_error")


async def test_a_failure_in_the_middle_is_one_error_event_and_the_end(stage: Stage) -> None:
    """FR-029."""
    stage.scheduler.script = fails_after(7)
    reply = await stage.chat(stream=True)
    *chunks, last = reply.chunks
    assert (reply.status, reply.complete, reply.events[-1]) == (200, True, json.dumps(last, separators=(",", ":")))
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "w1 w2 w3 w4 w5 w6 w7 "
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["type"] == "server_error"


async def test_a_fault_of_ours_in_the_middle_is_an_error_event_too(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-029, the variant: our own serialisation fails."""

    def broken(self: sse.Chunks, done: object) -> bytes:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(sse.Chunks, "end", broken)
    stage.scheduler.script = words("a")
    reply = await stage.chat(stream=True)
    assert reply.complete
    assert reply.chunks[-1]["error"]["code"] == "internal_error"
    assert "secret" not in reply.body.decode()


async def test_a_lost_scheduler_ends_the_stream_with_an_error(stage: Stage) -> None:
    client = stage.open_chat(stream=True)
    submit = (await until(lambda: stage.scheduler.submits))[0]
    stage.scheduler.say(accepted(submit.id), Delta(submit.id, "a", 1))
    await until(lambda: client.reply.body)
    stage.transport.cut()
    reply = await client.finish()
    assert reply.chunks[-1]["error"]["code"] == "server_is_overloaded"


# --- leaving and stalling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "running"])
async def test_a_client_that_leaves_is_cancelled_in_every_phase(stage: Stage, stream: bool, phase: str) -> None:
    """FR-034."""
    client = stage.open_chat(stream=stream)
    submit = (await until(lambda: stage.scheduler.submits))[0]
    stage.scheduler.say(accepted(submit.id))
    if phase == "running":
        stage.scheduler.say(Delta(submit.id, "a", 1))
        await stage.settle()
    client.leave()
    await client.finish()
    await until(lambda: stage.scheduler.cancelled == [submit.id])


async def test_a_client_that_leaves_as_its_request_fails_is_no_fault_of_ours() -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        raise AssertionError(message)

    async def fails() -> None:
        raise ApiError("request_failed", "The engine could not go on.")

    scope = {"method": "POST", "path": "/v1/chat/completions", "headers": []}
    with pytest.raises(ApiError):
        await exchange.Exchange(scope, receive, send).unless_gone(fails())
    gc.collect()  # a task whose error nobody has heard complains when it is collected
    assert faults == []


async def test_a_stream_that_outlasts_the_shutdown_ends_with_an_error_event(stage: Stage) -> None:
    client = stage.open_chat(stream=True)
    submit = (await until(lambda: stage.scheduler.submits))[0]
    stage.scheduler.say(accepted(submit.id), Delta(submit.id, "a", 1))
    await until(lambda: client.reply.writes)
    client.task.cancel()  # as the server does when the grace for what runs is over
    reply = await client.finish()
    assert reply.complete
    assert reply.chunks[-1]["error"]["message"] == "The server is shutting down."
    assert "[DONE]" not in reply.events
    await until(lambda: stage.scheduler.cancelled == [submit.id])


async def test_an_answer_that_outlasts_the_shutdown_is_a_503(stage: Stage) -> None:
    client = stage.open_chat()
    await until(lambda: stage.scheduler.submits)
    client.task.cancel()
    reply = await client.finish()
    assert (reply.status, reply.error["code"]) == (503, "server_is_overloaded")
    assert reply.headers["x-should-retry"] == "true"


async def test_a_client_that_leaves_while_sending_is_no_request(stage: Stage) -> None:
    client = stage.open("POST", "/v1/chat/completions", parts=[])
    client.upload(b'{"model"', more=True)
    client.leave()
    reply = await client.finish()
    assert (reply.status, stage.scheduler.submits) == (0, [])


async def test_a_client_that_stops_reading_is_cancelled(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.Exchange.__init__, "__kwdefaults__", {"body_progress": 30.0, "write_progress": 0.05})
    client = stage.open_chat(stream=True)
    submit = (await until(lambda: stage.scheduler.submits))[0]
    stage.scheduler.say(accepted(submit.id), Delta(submit.id, "a", 1))
    await until(lambda: client.reply.writes)
    client.reading.clear()
    stage.scheduler.say(Delta(submit.id, "b", 2))
    await until(lambda: stage.scheduler.cancelled == [submit.id])
    await client.finish()


async def test_a_body_that_stands_still_times_out(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.Exchange.__init__, "__kwdefaults__", {"body_progress": 0.05, "write_progress": 30.0})
    client = stage.open("POST", "/v1/chat/completions", parts=[])
    client.upload(b'{"model"', more=True)
    reply = await client.finish()
    assert (reply.status, reply.error["code"], reply.headers["connection"]) == (408, "request_timeout", "close")


# --- keep-alives ----------------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse.StreamedAnswer.__init__, "__kwdefaults__", {"silence": 0.02})


async def test_comments_keep_a_silent_stream_open(stage: Stage, impatient: None) -> None:
    client = stage.open_chat(stream=True)
    submit = (await until(lambda: stage.scheduler.submits))[0]
    stage.scheduler.say(accepted(submit.id), Delta(submit.id, "a", 1))
    await until(lambda: client.reply.body.count(sse.KEEP_ALIVE) >= 2)
    stage.scheduler.say(done(submit.id, 1))
    reply = await client.finish()
    assert reply.events[-1] == "[DONE]"


async def test_no_comment_comes_before_the_headers_unless_asked_for(stage: Stage, impatient: None) -> None:
    client = stage.open_chat(stream=True)
    opted_in = stage.open_chat(stream=True, headers={"x-harness-keepalive": "1"})
    await until(lambda: sse.KEEP_ALIVE in opted_in.reply.body)
    assert (client.reply.status, opted_in.reply.status) == (0, 200)
    for submit in stage.scheduler.submits:
        refuses("queue_timeout")(stage.scheduler, submit)
    assert (await client.finish()).status == 503
    assert (await opted_in.finish()).chunks[-1]["error"]["code"] == "server_is_overloaded"


async def test_keep_alives_can_be_declined(stage: Stage, impatient: None) -> None:
    declined = stage.open_chat(stream=True, headers={"x-harness-keepalive": "0"})
    usual = stage.open_chat(stream=True)
    for submit in await until(lambda: stage.scheduler.submits[:2] if len(stage.scheduler.submits) == 2 else []):
        stage.scheduler.say(accepted(submit.id), Delta(submit.id, "a", 1))
    await until(lambda: usual.reply.body.count(sse.KEEP_ALIVE) >= 3)
    for submit in stage.scheduler.submits:
        stage.scheduler.say(done(submit.id, 1))
    assert sse.KEEP_ALIVE not in (await declined.finish()).body
    await usual.finish()
