"""Hypothesis strategies for every message, built from the structs themselves: a new field is covered at once."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from scheduler.wire.messages import AnyMessage

# The machine may be busy: a slow example is no failure. A fixture is one conversation that all examples go through.
property_test = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

INTEGERS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)  # a NaN is not equal to itself
TEXTS = st.text(max_size=20)
ANYTHING = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: INTEGERS,
    float: FLOATS,
    str: TEXTS,
    type(None): st.none(),
    Any: ANYTHING,
}


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    if kind in SIMPLE:
        return SIMPLE[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([of_type(argument) for argument in arguments])
    if origin is tuple:
        return st.lists(of_type(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=3)
    assert issubclass(kind, msgspec.Struct), f"no strategy for {kind}"
    fields = msgspec.structs.fields(kind)
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: of_type(hints[field.name]) for field in fields})


MESSAGE_TYPES: tuple[type[msgspec.Struct], ...] = typing.get_args(AnyMessage)
MESSAGES = st.one_of([of_type(kind) for kind in MESSAGE_TYPES])
