"""Grammars are tried out in a process that may die of them; nobody else does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio

from scheduler.engines.grammar_box import TOO_COMPLEX, GrammarBox

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]  # the library comes with the engine

LETTERS = ["<end>", *map(chr, range(32, 127)), '{"', '": ', "true", "aaaa"]
FINE: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
# Any part of any repetition may be missing, so that they can be told apart in very many ways.
HOSTILE: dict[str, Any] = {"type": "string", "pattern": "(a?b?c?d?){5000}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box() -> AsyncIterator[GrammarBox]:
    import xgrammar

    box = GrammarBox(xgrammar.TokenizerInfo(LETTERS, stop_token_ids=[0]).serialize_json())
    await box.start()
    yield box
    await box.aclose()


def child(box: GrammarBox) -> psutil.Process:
    assert box._child is not None
    return psutil.Process(box._child.pid)


async def test_what_compiles_is_not_refused(box: GrammarBox) -> None:
    assert await box.refusal("json", json.dumps(FINE)) is None
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": FINE}}
    assert await box.refusal("tag", json.dumps(tag)) is None


@pytest.mark.parametrize(
    ("kind", "spec"), [("json", '{"type": "string", "pattern": "(["}'), ("json", "not json"), ("tag", '{"type": "x"}')]
)
async def test_what_cannot_be_read_is_refused_with_a_reason_and_by_the_same_child(
    box: GrammarBox, kind: str, spec: str
) -> None:
    pid = child(box).pid
    refusal = await box.refusal(kind, spec)
    assert refusal not in (None, TOO_COMPLEX)
    assert "\n" not in str(refusal)
    assert child(box).pid == pid


async def test_what_is_too_large_is_refused_and_the_next_one_is_not(box: GrammarBox) -> None:
    assert await box.refusal("json", json.dumps(HOSTILE)) == TOO_COMPLEX
    other = {**FINE, "title": "tried after it"}
    assert await box.refusal("json", json.dumps(other)) is None


async def test_a_verdict_is_kept(box: GrammarBox) -> None:
    first = [await box.refusal("json", json.dumps(one)) for one in (FINE, HOSTILE)]
    await box.aclose()
    again = [await box.refusal("json", json.dumps(one)) for one in (FINE, HOSTILE)]
    assert first == again
    assert box._child is None, "nobody had to be asked"


async def test_a_child_that_died_has_a_successor(box: GrammarBox) -> None:
    await box.start()
    child(box).kill()
    other = {**FINE, "title": "asked after a death"}
    assert await box.refusal("json", json.dumps(other)) in (None, TOO_COMPLEX)
    other = {**FINE, "title": "asked of its successor"}
    assert await box.refusal("json", json.dumps(other)) is None


async def test_a_child_ends_when_nobody_can_ask_it_any_more(box: GrammarBox) -> None:
    await box.start()
    process = child(box)
    assert box._child is not None
    assert box._child.stdin is not None
    box._child.stdin.close()
    await asyncio.wait_for(box._child.wait(), 30)
    assert not process.is_running()
