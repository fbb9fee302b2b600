"""The smallest document of a schema, judged by an independent reader of schemas."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from scheduler.engines.simulated.document import NoDocument, smallest

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 2}, "age": {"type": "integer", "minimum": 18}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        PERSON,
        {"type": "array", "items": PERSON, "minItems": 2},
        {"type": ["number", "null"], "exclusiveMinimum": 3, "maximum": 10},
        {"type": "integer", "maximum": -5},
        {"enum": ["red", "green"]},
        {"const": {"a": [1]}},
        {"anyOf": [False, {"type": "boolean"}]},
        {"allOf": [PERSON, {"required": ["name"]}]},
        {"$defs": {"p": PERSON}, "type": "object", "properties": {"one": {"$ref": "#/$defs/p"}}, "required": ["one"]},
    ],
)
def test_it_is_a_document_of_the_schema(schema: Any) -> None:
    jsonschema.validate(smallest(schema), schema)


LISTS: dict[str, Any] = {"type": "integer"}
for _ in range(12):
    LISTS = {"type": "array", "items": LISTS, "minItems": 10}


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        {"$ref": "#/$defs/nobody"},
        {"$ref": "https://example.org/schema"},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "items": False, "minItems": 1},
        LISTS,
    ],
)
def test_what_has_no_small_document_is_said_to_have_none(schema: Any) -> None:
    with pytest.raises(NoDocument):
        smallest(schema)
