"""Whether a caller's JSON Schema is one, and of a size that an engine can turn into a grammar.

What is checked here is form: every keyword that holds schemas holds schemas, types exist, patterns can be read and do
not multiply. What an engine makes of it is the engine's to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from harness_web.openai.errors import InvalidRequest

MAX_BYTES = 64 * 1024
MAX_PATTERN = 10_000  # characters of a pattern with its counted repetitions written out

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_COUNTED = re.compile(r"\{(?:\d*,)?(?P<most>\d{1,9}),?\}")


def check_schema(schema: Any, at: str, *, strict: bool = False) -> str:
    """The schema as JSON text. Raises InvalidRequest naming the place below `at` that is no schema.

    `strict`: as OpenAI defines it, every object closes itself and requires all its properties.
    """
    text = msgspec.json.encode(schema)
    if len(text) > MAX_BYTES:
        raise InvalidRequest(f"A schema has at most {MAX_BYTES} bytes.", at)
    waiting = [(schema, at)]
    while waiting:
        one, place = waiting.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            raise InvalidRequest(f"Invalid value for '{place}': a schema is an object or a boolean.", place)
        _check_keywords(one, place)
        if strict:
            _check_strict(one, place)
        waiting += _parts(one, place)
    return text.decode()


def _parts(schema: dict[str, Any], at: str) -> Iterator[tuple[Any, str]]:
    """The schemas inside one, with their places."""
    for name in ONE:
        if name in schema and not (name == "items" and isinstance(schema[name], list)):
            yield schema[name], f"{at}.{name}"
    for name in (*SEVERAL, "items"):
        several = schema.get(name)
        if isinstance(several, list):
            yield from ((part, f"{at}.{name}[{index}]") for index, part in enumerate(several))
    for name in NAMED:
        yield from ((part, f"{at}.{name}.{key}") for key, part in schema.get(name, {}).items())


def _check_keywords(schema: dict[str, Any], at: str) -> None:
    kinds = schema.get("type", [])
    if not all(kind in TYPES for kind in (kinds if isinstance(kinds, list) else [kinds])):
        raise _invalid(at, "type", f"one of {', '.join(TYPES)}, or a list of them")
    for name in SEVERAL:
        if name in schema and not (isinstance(schema[name], list) and schema[name]):
            raise _invalid(at, name, "a list of schemas")
    for name in NAMED:
        if not isinstance(schema.get(name, {}), dict):
            raise _invalid(at, name, "an object of schemas")
    required = schema.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise _invalid(at, "required", "a list of names")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise _invalid(at, "enum", "a list of values")
    if not isinstance(schema.get("$ref", ""), str):
        raise _invalid(at, "$ref", "a reference")
    for name in COUNTS:
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _invalid(at, name, "a count")
    for name in NUMBERS:
        if isinstance(schema.get(name, 0), bool) or not isinstance(schema.get(name, 0), int | float):
            raise _invalid(at, name, "a number")
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", {})):
        _check_pattern(pattern, at)


def _check_strict(schema: dict[str, Any], at: str) -> None:
    if schema.get("type") != "object" and "properties" not in schema:
        return
    if schema.get("additionalProperties") is not False:
        raise _invalid(at, "additionalProperties", "false where 'strict' is true")
    missing = sorted(set(schema.get("properties", {})) - set(schema.get("required", [])))
    if missing:
        raise _invalid(at, "required", f"a list of all properties where 'strict' is true; {missing[0]!r} is missing")


def _check_pattern(pattern: Any, at: str) -> None:
    if not isinstance(pattern, str):
        raise _invalid(at, "pattern", "a regular expression")
    if "\0" in pattern or written_out(pattern) > MAX_PATTERN:
        raise _invalid(at, "pattern", f"a regular expression of at most {MAX_PATTERN} characters, repetitions included")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        raise _invalid(at, "pattern", "a regular expression") from None


def written_out(pattern: str) -> int:
    """Characters of a pattern whose counted repetitions are written out: `(ab{3}){2}` has 8. At most a bit too many."""
    sizes, last, at = [0], 0, 0  # of the open groups, of the last atom
    while at < len(pattern):
        counted = _COUNTED.match(pattern, at)
        if counted:
            times = max(int(counted["most"]), 1)
            sizes[-1] += last * (times - 1)
            last *= times
            at = counted.end()
            continue
        if pattern[at] == "(":
            sizes.append(0)
        elif pattern[at] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        else:
            last = 1
            sizes[-1] += 1
        at += 2 if pattern[at] == "\\" else 1
    return sum(sizes)


def _invalid(at: str, name: str, expected: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{at}.{name}': expected {expected}.", f"{at}.{name}")
