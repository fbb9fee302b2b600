"""The table of compatibility is true: every row is tried on the server, and the page is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness_web.openai.compatibility import CHAT, NEEDED, Parameter, Support, page
from harness_web.openai.schema import ChatRequest
from tests.web.cast import Stage, words

PAGE = Path(__file__).resolve().parents[2] / "docs" / "openai-compatibility.md"
OURS = {"priority", "slo_threshold", "queue_timeout", "simulate", "ignore_eos"}

SAMPLES = [pytest.param(row, sample, id=f"{row.name}-{row.support}") for row in CHAT for sample in row.samples]


async def effect(stage: Stage, **fields: Any) -> Any:
    """What a request comes to: what the scheduler is told, and the kind of answer."""
    reply = await stage.chat(**fields)
    assert reply.status == 200, reply.body
    submit = msgspec.structs.replace(stage.scheduler.submits[-1], id="", age=0.0)
    return submit, reply.headers["content-type"], b'"usage":{' in reply.body


@pytest.mark.parametrize(("row", "sample"), SAMPLES)
async def test_every_field_does_what_the_table_says(stage: Stage, row: Parameter, sample: Any) -> None:
    stage.scheduler.script = words("x")
    needed = NEEDED.get(row.name, {})
    if row.support is Support.REFUSED:
        reply = await stage.chat(**needed | {row.name: sample})
        assert (reply.status, stage.scheduler.submits) == (400, [])
        assert (reply.error["param"] or "").startswith(row.name)
        return
    without, with_it = await effect(stage, **needed), await effect(stage, **needed | {row.name: sample})
    assert (with_it != without) == (row.support is Support.SUPPORTED)


def test_the_table_has_every_field_that_is_read() -> None:
    listed = {row.name for row in CHAT}
    read = set(ChatRequest.__struct_fields__) - OURS
    assert read <= listed
    assert {row.name for row in CHAT if row.support is not Support.IGNORED} == read
    assert all(row.note or row.support is Support.SUPPORTED for row in CHAT), "what is not done has a reason"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m harness_web.openai.compatibility > docs/openai-compatibility.md"
