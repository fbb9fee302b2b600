"""What a chat request may say: field cases FR-043 to FR-050, as far as they concern this route."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from harness_web.openai.errors import InvalidRequest
from harness_web.openai.json_schema import written_out
from harness_web.openai.schema import MAX_DEPTH, ChatRequest, parse_chat
from scheduler.gateway import JsonFormat

USER = {"role": "user", "content": "hi"}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "M", "messages": [USER], **fields}).encode()


def refused(raw: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(raw)
    return caught.value


OPTIONAL = [field for field in ChatRequest.__struct_fields__ if field not in ("model", "messages")]


def test_every_optional_field_may_be_null_and_then_equals_absent() -> None:
    """FR-043."""
    plain = parse_chat(body())
    assert parse_chat(body(**dict.fromkeys(OPTIONAL))) == plain
    for field in OPTIONAL:
        assert parse_chat(body(**{field: None})) == plain


def test_empty_containers_ask_for_nothing() -> None:
    """FR-043."""
    chat = parse_chat(body(logit_bias={}, stop=[], tools=[], functions=[], modalities=[]))
    assert chat.sampling() == parse_chat(body()).sampling()


def test_unknown_fields_are_ignored_whatever_they_hold() -> None:
    parse_chat(body(user="u", metadata={"a": [1, {"b": None}]}, service_tier="auto", store=True))


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "user2", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "bogus"}]}], "messages[0].content[0].type"),
        ([USER, {"role": "user", "content": [{"type": "text"}]}], "messages[1].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "tool", "content": "42"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_calls": []}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "a\0b"}], "messages[0].content"),
        ([USER] * 10_001, "messages"),
    ],
)
def test_messages_that_make_no_sense_are_refused_with_their_place(messages: Any, param: str) -> None:
    """FR-044."""
    assert refused(body(messages=messages)).param == param


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
        [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "42"}],
        [USER, {"role": "assistant", "content": ""}, USER],
        [{"role": "developer", "content": "be brief"}, USER],
        [{"role": "user", "content": "   "}],
        [{"role": "user", "content": "x", "name": "bob"}],
    ],
)
def test_usual_conversations_pass_without_nulls_in_the_prompt(messages: list[dict[str, Any]]) -> None:
    """FR-044."""
    prompt = parse_chat(body(messages=messages)).prompt()
    expected = [{key: value for key, value in message.items() if value is not None} for message in messages]
    assert list(prompt) == expected


@pytest.mark.parametrize("field", ["temperature", "top_p", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", '"0.7"', "true", "[]"])
def test_numbers_that_are_no_numbers_are_refused(field: str, literal: str) -> None:
    """FR-045."""
    error = refused(
        b'{"model":"M","messages":[{"role":"user","content":"hi"}],"%s":%s}' % (field.encode(), literal.encode())
    )
    assert error.shape.status == 400
    if literal in ("1e999", '"0.7"', "true", "[]"):
        assert error.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", 2**63),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("max_completion_tokens", 0),
        ("n", 0),
        ("n", True),
        ("n", 129),
        ("n", 5_000_000),
        ("stop", ["a"] * 5),
        ("stop", ["a"] * 500_000),
        ("stop", ""),
        ("stop", [""]),
        ("stop", "\0"),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 129),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"word": 1}),
        ("priority", "urgent"),
        ("slo_threshold", 0),
        ("slo_threshold", "fast"),
        ("queue_timeout", -1),
        ("simulate", "crash"),
        ("stream", "yes"),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    """FR-045, FR-050."""
    raw = body(**{field: value})
    began = time.process_time()
    assert refused(raw).param == field
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0), ("temperature", 2), ("top_p", 0), ("top_p", 1), ("max_tokens", 1), ("n", 1), ("seed", -1)],
)
def test_edges_of_ranges_are_inside(field: str, value: Any) -> None:
    """FR-045."""
    assert getattr(parse_chat(body(**{field: value})), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
    ],
)
def test_what_is_not_offered_is_refused_and_not_ignored(field: str, value: Any) -> None:
    error = refused(body(**{field: value}))
    assert (error.shape.status, error.shape.code, error.param) == (400, "unsupported_parameter", field)


def test_top_logprobs_need_logprobs_and_have_a_range() -> None:
    """FR-045."""
    assert refused(body(top_logprobs=2)).param == "top_logprobs"
    assert refused(body(logprobs=True, top_logprobs=21)).param == "top_logprobs"


def test_stream_options_need_a_stream() -> None:
    assert refused(body(stream_options={"include_usage": True})).param == "stream_options"
    assert parse_chat(body(stream=True, stream_options={"include_usage": True})).include_usage


def test_the_newer_name_of_the_output_limit_wins() -> None:
    assert parse_chat(body(max_tokens=5, max_completion_tokens=7)).output_limit == 7
    assert parse_chat(body(max_tokens=5)).output_limit == 5
    assert parse_chat(body()).output_limit is None


@pytest.mark.parametrize("raw", [b"", b'{"model":', b"nonsense", b"\xff\xfe{}", b'{"model":"M","messages":[]} x'])
def test_what_is_not_json_is_said_to_be_so(raw: bytes) -> None:
    """FR-038."""
    error = refused(raw)
    assert (error.shape.status, error.shape.code, error.param) == (400, "invalid_json", None)


def test_the_body_must_be_an_object_with_a_model() -> None:
    """FR-038, FR-041."""
    assert refused(b"[]").shape.status == 400
    for model in ("", None, 123):
        assert refused(body(model=model)).param == "model"
    assert refused(b'{"messages":[]}').param == "model"


@pytest.mark.parametrize("text", [r"\ud800", r"a\udc00b", r"\ud800\u0041"])
def test_lone_surrogates_are_not_text(text: str) -> None:
    raw = b'{"model":"M","messages":[{"role":"user","content":"%s"}]}' % text.encode()
    assert refused(raw).shape.code == "invalid_json"


@pytest.mark.parametrize("depth", [100, 1000, 20_000, 1_000_000])
@pytest.mark.parametrize("place", ["body", "unknown", "tools", "schema"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_refused_at_once(depth: int, place: str, opening: str, closing: str) -> None:
    """FR-047."""
    nested = opening * depth + "1" + closing * depth
    shell = {
        "body": "%s",
        "unknown": '{"model":"M","messages":[],"x":%s}',
        "tools": '{"model":"M","messages":[],"tools":[{"function":{"parameters":%s}}]}',
        "schema": '{"model":"M","messages":[],"response_format":{"json_schema":{"schema":%s}}}',
    }[place]
    raw = (shell % nested).encode()
    began = time.process_time()
    assert refused(raw).shape.status == 400
    assert time.process_time() - began < 0.1


def test_moderate_nesting_and_brackets_in_strings_are_no_depth() -> None:
    """FR-047."""
    nested: Any = 1
    for _ in range(MAX_DEPTH - 1):
        nested = [nested]
    parse_chat(body(x=nested))
    parse_chat(body(x=[[]] * 1000, messages=[{"role": "user", "content": '[[{"\\' * 100}]))


def test_top_p_zero_becomes_the_smallest_share() -> None:
    assert 0 < (parse_chat(body(top_p=0)).sampling().top_p or 0) < 1e-6


# --- formats and tools ------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, **more}}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, JsonFormat()),
        (schema_format(None), JsonFormat()),
        (schema_format(SCHEMA, strict=True), JsonFormat(json.dumps(SCHEMA, separators=(",", ":")))),
    ],
)
def test_formats_travel_as_their_schema(wanted: Any, expected: JsonFormat | None) -> None:
    assert parse_chat(body(response_format=wanted)).sampling().format == expected


AT = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"type": "yaml"}, "response_format.type"),
        ({}, "response_format.type"),
        ("json", "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a\n", "schema": {}}}, "response_format.json_schema.name"),
        (schema_format(""), AT),
        (schema_format({"type": "object", "properties": {"a": "oops"}}), f"{AT}.properties.a"),
        (schema_format({"type": "date"}), f"{AT}.type"),
        (schema_format({"type": "string", "pattern": "(["}), f"{AT}.pattern"),
        (schema_format({"type": "string", "pattern": "(a{1,1000}){1,1000}"}), f"{AT}.pattern"),
        (schema_format({"type": "string", "pattern": 5}), f"{AT}.pattern"),
        (schema_format({"patternProperties": {"([": True}}), f"{AT}.pattern"),
        (schema_format({"anyOf": []}), f"{AT}.anyOf"),
        (schema_format({"anyOf": [{"items": 3}]}), f"{AT}.anyOf[0].items"),
        (schema_format({"items": [{"minItems": -1}]}), f"{AT}.items[0].minItems"),
        (schema_format({"$defs": []}), f"{AT}.$defs"),
        (schema_format({"$ref": 1}), f"{AT}.$ref"),
        (schema_format({"required": "a"}), f"{AT}.required"),
        (schema_format({"enum": []}), f"{AT}.enum"),
        (schema_format({"minimum": "1"}), f"{AT}.minimum"),
        (schema_format({"maxLength": True}), f"{AT}.maxLength"),
        (schema_format({"enum": ["x" * 70_000]}), AT),
        (schema_format({"type": "object", "properties": {}}, strict=True), f"{AT}.additionalProperties"),
        (
            schema_format({**SCHEMA, "required": []}, strict=True),
            f"{AT}.required",
        ),
    ],
)
def test_formats_that_are_none_are_refused_with_their_place(wanted: Any, param: str) -> None:
    """FR-048: none of them reaches an engine."""
    began = time.process_time()
    error = refused(body(response_format=wanted))
    assert (error.shape.status, error.param) == (400, param)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function.name"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool(parameters={"type": "nothing"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        (
            {"tools": [tool(parameters={"type": "object"}, strict=True)]},
            "tools[0].function.parameters.additionalProperties",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": tool("g"), "tools": [tool("f")]}, "tool_choice"),
        ({"tool_choice": "maybe", "tools": [tool("f")]}, "tool_choice"),
        (
            {"tool_choice": "required", "tools": [tool("f")], "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
def test_tools_that_are_none_are_refused_with_their_place(fields: dict[str, Any], param: str) -> None:
    assert refused(body(**fields)).param == param


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        (r"\d{4}-\d{2}", 7),
        ("(ab{3}){2}", 8),
        ("((a{10}){10}){10}", 1000),
        ("a{2,}", 2),
        ("{3}", 0),
    ],
)
def test_a_pattern_is_as_long_as_its_repetitions_make_it(pattern: str, size: int) -> None:
    assert written_out(pattern) == size
