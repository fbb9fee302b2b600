"""Several answers, formats and tools through the official client, against uvicorn and a scheduler process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from pydantic import BaseModel

from tests.web.product import Product, eventually, installed

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello there friend"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind}},
                "required": [key],
                "additionalProperties": False,
            },
        },
    }
    for name, key, kind in (("get_a", "x", "integer"), ("get_b", "y", "string"))
]
CALLS = {
    "tool_calls": [
        {"name": "get_a", "arguments": ['{"x"', ": 1}"]},
        {"name": "get_b", "arguments": ['{"y": "', 'ü"}']},
    ]
}


class Weather(BaseModel):
    city: str
    degrees: int


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    with installed() as product:
        product.start()
        yield product


@pytest.fixture
def client(product: Product) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=product.url + "/v1", api_key=product.keys["acme/prod"]) as client:
        yield client


def test_usage_of_several_answers_counts_the_prompt_once(client: openai.OpenAI) -> None:
    """FR-024."""
    whole = client.chat.completions.create(model="demo", messages=HELLO, n=2, max_tokens=8)
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=HELLO, n=2, max_tokens=8, stream=True, stream_options=options
        )
    )
    one = client.chat.completions.create(model="demo", messages=HELLO, n=1, max_tokens=8)
    assert one.usage is not None
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.prompt_tokens == one.usage.prompt_tokens == 3
        assert (usage.completion_tokens, usage.total_tokens) == (16, 19)
    assert [(choice.index, choice.finish_reason) for choice in whole.choices] == [(0, "length"), (1, "length")]
    ends = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted((choice.index, choice.finish_reason) for choice in ends) == [(0, "length"), (1, "length")]


def test_leaving_a_stream_of_several_answers_ends_all_of_them(client: openai.OpenAI, product: Product) -> None:
    """FR-034, v."""
    with client.chat.completions.with_streaming_response.create(
        model="demo", messages=HELLO, n=2, max_tokens=1000, stream=True
    ) as response:
        request_id = response.headers["x-request-id"]
        next(response.iter_lines())
    record = eventually(lambda: (found := product.record(request_id)) and found["ended"] and found)
    assert record["outcome"] == "aborted"
    assert record["ended_step"] - record["aborted_step"] <= 1
    eventually(lambda: product.running() == 0)


def test_the_clients_helper_puts_streamed_tool_calls_together(client: openai.OpenAI) -> None:
    """FR-036."""
    with client.chat.completions.stream(
        model="demo", messages=HELLO, tools=TOOLS, extra_body={"simulate": CALLS}
    ) as run:
        for _ in run:
            pass
        streamed = run.get_final_completion().choices[0]
    whole = client.chat.completions.create(
        model="demo", messages=HELLO, tools=TOOLS, extra_body={"simulate": CALLS}
    ).choices[0]
    for choice in (streamed, whole):
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        calls = choice.message.tool_calls or []
        assert [(one.function.name, json.loads(one.function.arguments)) for one in calls if one.type == "function"] == [
            ("get_a", {"x": 1}),
            ("get_b", {"y": "ü"}),
        ]
        assert len({one.id for one in calls}) == 2


def test_a_tool_result_goes_back_in_a_conversation(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="demo", messages=HELLO, tools=TOOLS, tool_choice="required")
    message = first.choices[0].message
    assert message.tool_calls
    conversation: Any = [
        *HELLO,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "forty two"},
    ]
    second = client.chat.completions.create(model="demo", messages=conversation, tools=TOOLS, max_tokens=3)
    assert second.choices[0].message.content == "w0 w1 w2"
    assert second.usage is not None
    assert second.usage.prompt_tokens == 5


def test_the_clients_helper_parses_a_document_of_its_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="demo", messages=HELLO, response_format=Weather, max_tokens=50)
    assert answer.choices[0].message.parsed == Weather(city="", degrees=0)


def test_log_probabilities_are_what_the_client_reads(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="demo", messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=3
    ).choices[0]
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert "".join(token.token for token in tokens) == choice.message.content
    assert all(len(token.top_logprobs) == 2 and token.bytes == list(token.token.encode()) for token in tokens)


def test_the_service_tier_of_the_answer_is_what_it_ran_as(client: openai.OpenAI, product: Product) -> None:
    tiers: Any = (None, "auto", "priority", "flex")
    ran = [
        client.chat.completions.create(model="demo", messages=HELLO, max_tokens=1, service_tier=tier).service_tier
        for tier in tiers
    ]
    assert ran == ["priority", "priority", "priority", "flex"]
    free = openai.OpenAI(base_url=product.url + "/v1", api_key=product.keys["globex/prod"])
    with free, pytest.raises(openai.BadRequestError) as refused:
        free.chat.completions.create(model="demo", messages=HELLO, max_tokens=1, service_tier="priority")
    assert (refused.value.param, refused.value.code) == ("service_tier", "service_tier_not_allowed")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"32000": 1}}, "logit_bias"),
        ({"n": 3}, "n"),
        ({"n": 2, "max_tokens": 4000}, "n"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": "#"}}}},
            "response_format",
        ),
    ],
)
def test_what_only_the_model_can_refuse_is_refused_before_anything_is_billed(
    client: openai.OpenAI, product: Product, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=HELLO, extra_body=fields)
    assert refused.value.param == param
    request_id = refused.value.response.headers["x-request-id"]
    assert product.record(request_id) is None, "no engine has seen it"
