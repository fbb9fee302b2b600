"""Several answers, log-probabilities and tool calls on the wire: FR-024, FR-032, FR-036."""

from __future__ import annotations

import json
from typing import Any

from scheduler.gateway import LikelyToken, TokenLogprob, ToolCallDelta
from scheduler.wire.messages import BatchInfo, Delta, Done, Submit
from tests.web.cast import Scheduler, Stage, accepted, until

BATCH = BatchInfo("b1", 1.5, 0.01, 0.2)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_a", "get_b")
]


def two_answers(scheduler: Scheduler, submit: Submit) -> None:
    scheduler.say(
        accepted(submit.id),
        Delta(submit.id, "a0", 1, 0),
        Delta(submit.id, "b0", 2, 1),
        Delta(submit.id, " b1", 3, 1, "stop"),
        Delta(submit.id, " a1", 4, 0),
        Done(submit.id, "length", 3, 5, 1, BATCH, " a2", 0),
    )


def by_answer(chunks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    choices: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    return choices


async def test_every_answer_is_a_choice_with_its_own_reason(stage: Stage) -> None:
    stage.scheduler.script = two_answers
    body = (await stage.chat(n=2)).json
    assert [(one["index"], one["message"]["content"], one["finish_reason"]) for one in body["choices"]] == [
        (0, "a0 a1 a2", "length"),
        (1, "b0 b1", "stop"),
    ]
    assert body["usage"]["completion_tokens"] == 5
    assert stage.scheduler.submits[0].sampling.n == 2


async def test_every_chunk_names_its_answer_and_every_answer_is_a_stream_of_its_own(stage: Stage) -> None:
    stage.scheduler.script = two_answers
    reply = await stage.chat(n=2, stream=True, stream_options={"include_usage": True})
    assert reply.events[-1] == "[DONE]"
    choices = by_answer(reply.chunks)
    assert set(choices) == {0, 1}
    for own, text, reason in ((choices[0], "a0 a1 a2", "length"), (choices[1], "b0 b1", "stop")):
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + [reason]
    assert reply.chunks[-1]["usage"]["completion_tokens"] == 5


async def test_an_answer_that_says_nothing_has_role_and_reason_too(stage: Stage) -> None:
    def script(scheduler: Scheduler, submit: Submit) -> None:
        scheduler.say(accepted(submit.id), Delta(submit.id, "", 0, 1, "stop"), Done(submit.id, "stop", 3, 0, 0, BATCH))

    stage.scheduler.script = script
    for own in by_answer((await stage.chat(n=2, stream=True)).chunks).values():
        assert [choice["delta"] for choice in own] == [{"role": "assistant", "content": ""}, {}]
        assert own[-1]["finish_reason"] == "stop"


async def test_what_piled_up_behind_a_slow_client_is_one_chunk_for_each_answer(stage: Stage) -> None:
    client = stage.open_chat(n=2, stream=True)
    submit = (await until(lambda: stage.scheduler.submits))[0]
    stage.scheduler.say(accepted(submit.id), Delta(submit.id, "a", 1, 0))
    await until(lambda: client.reply.writes)
    client.reading.clear()
    for number in range(100):
        stage.scheduler.say(Delta(submit.id, "x", number, number % 2))
    stage.scheduler.say(Delta(submit.id, "", 101, 0, "stop"), Done(submit.id, "stop", 3, 101, 0, BATCH, "", 1))
    await stage.settle()
    client.reading.set()
    reply = await client.finish()
    texts = {
        index: "".join(choice["delta"].get("content", "") for choice in own)
        for index, own in by_answer(reply.chunks).items()
    }
    assert texts == {0: "a" + "x" * 50, 1: "x" * 50}
    assert len(reply.chunks) < 12


# --- log-probabilities ------------------------------------------------------------------------------------------------

CHOSEN, OTHER = LikelyToken("ü", -0.5, (195, 188)), LikelyToken("\ufffd", -2.0, None)
CONTENT = {
    "token": "ü",
    "logprob": -0.5,
    "bytes": [195, 188],
    "top_logprobs": [
        {"token": "ü", "logprob": -0.5, "bytes": [195, 188]},
        {"token": "\ufffd", "logprob": -2.0, "bytes": None},
    ],
}


def likely(scheduler: Scheduler, submit: Submit) -> None:
    one = TokenLogprob(CHOSEN, (CHOSEN, OTHER))
    scheduler.say(
        accepted(submit.id),
        Delta(submit.id, "ü", 1, logprobs=(one,)),
        Done(submit.id, "stop", 3, 2, 0, BATCH, "ü", logprobs=(one,)),
    )


async def test_log_probabilities_have_openais_shape_in_one_piece_and_in_parts(stage: Stage) -> None:
    stage.scheduler.script = likely
    whole = (await stage.chat(logprobs=True, top_logprobs=2)).json["choices"][0]
    assert whole["logprobs"] == {"content": [CONTENT, CONTENT], "refusal": None}
    chunks = (await stage.chat(logprobs=True, top_logprobs=2, stream=True)).chunks
    parts = [chunk["choices"][0] for chunk in chunks]
    told = [part["logprobs"]["content"] for part in parts if part["logprobs"]]
    assert told == [[CONTENT], [CONTENT]]
    assert "".join(part["delta"].get("content", "") for part in parts) == "üü"
    assert [submit.sampling.logprobs for submit in stage.scheduler.submits] == [2, 2]


async def test_log_probabilities_come_only_when_asked_for(stage: Stage) -> None:
    stage.scheduler.script = likely
    assert (await stage.chat()).json["choices"][0]["logprobs"] is None
    assert stage.scheduler.submits[0].sampling.logprobs is None
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in (await stage.chat(stream=True)).chunks)


# --- tool calls -------------------------------------------------------------------------------------------------------


def two_calls(scheduler: Scheduler, submit: Submit) -> None:
    scheduler.say(
        accepted(submit.id),
        Delta(submit.id, "", 1, tool_calls=(ToolCallDelta(0, "call_1", "get_a"),)),
        Delta(submit.id, "", 2, tool_calls=(ToolCallDelta(0, arguments='{"x"'), ToolCallDelta(0, arguments=": 1}"))),
        Delta(submit.id, "", 3, tool_calls=(ToolCallDelta(1, "call_2", "get_b", '{"y": "'),)),
        Delta(submit.id, "", 4, tool_calls=(ToolCallDelta(1, arguments='ü"}'),)),
        Done(submit.id, "tool_calls", 3, 5, 0, BATCH),
    )


def assembled(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a stream as a client assembles them by index; id, type and name come once."""
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if part["index"] not in calls:
                assert part["id"]
                assert part["type"] == "function"
                assert part["function"]["name"]
                calls[part["index"]] = {key: value for key, value in part.items() if key != "index"}
                continue
            assert set(part) == {"index", "function"}
            assert set(part["function"]) == {"arguments"}
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return [calls[index] for index in sorted(calls)]


async def test_streamed_tool_calls_are_those_of_the_answer_in_one_piece(stage: Stage) -> None:
    """FR-036."""
    stage.scheduler.script = two_calls
    choice = (await stage.chat(tools=TOOLS)).json["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    calls = choice["message"]["tool_calls"]
    assert [(one["id"], one["type"], one["function"]["name"]) for one in calls] == [
        ("call_1", "function", "get_a"),
        ("call_2", "function", "get_b"),
    ]
    assert [json.loads(one["function"]["arguments"]) for one in calls] == [{"x": 1}, {"y": "ü"}]
    chunks = (await stage.chat(tools=TOOLS, stream=True)).chunks
    assert assembled(chunks) == calls
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)


async def test_tools_travel_with_the_choice_among_them(stage: Stage) -> None:
    stage.scheduler.script = two_calls
    choices: list[Any] = [
        None,
        "auto",
        "required",
        {"type": "function", "function": {"name": "get_b"}},
        "none",
    ]
    for choice in choices:
        await stage.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    travelled = [submit.sampling.tools for submit in stage.scheduler.submits]
    assert [tools and tools.choice for tools in travelled] == ["auto", "auto", "required", "named:get_b", None]
    assert all(json.loads(tools.functions) == TOOLS and not tools.parallel for tools in travelled if tools)
