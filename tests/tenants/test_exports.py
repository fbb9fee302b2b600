"""Exports: names stay names, numbers stay numbers, and half of one is never taken for the whole."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.exports import Cell, ExportChangedError, csv_lines, json_lines

NAMES = [
    "=1+1",
    "+1+1",
    "-1+1",
    "@SUM(1)",
    "\t=1+1",
    "\r=1+1",
    "＝1+1",
    " \u3000=1+1",
    'a","=1+1',
    "line1\n=1+1",
    '=HYPERLINK("http://x.example","a")',
]


def as_csv(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    return "".join(csv_lines(columns, rows, len(rows)))


def parsed(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), strict=True))


def test_names_that_look_like_formulas_are_neutralised_and_amounts_are_not() -> None:
    """FR-070."""
    rows = [(name, Decimal("-5.25"), Decimal("1.5"), -3, -0.5) for name in NAMES]
    header, *found = parsed(as_csv(["name", "credit", "amount", "number", "share"], rows))
    assert header == ["name", "credit", "amount", "number", "share", "rows_left"]
    assert len(found) == len(NAMES)
    for name, (shown, *numbers) in zip(NAMES, found, strict=True):
        assert shown == (name if name[0] in "al" else f"'{name}")
        assert numbers[:4] == ["-5.25", "1.5", "-3", "-0.5"]


def test_json_has_names_unchanged() -> None:
    """FR-070."""
    text = "".join(json_lines(["name", "amount"], [(name, Decimal("-5.25")) for name in NAMES], len(NAMES)))
    assert [row["name"] for row in json.loads(text)] == NAMES
    assert {row["amount"] for row in json.loads(text)} == {"-5.25"}


def test_values_of_every_kind_have_one_spelling() -> None:
    at = datetime(2026, 7, 1, 12, tzinfo=UTC)
    row = (None, True, at, Decimal("0.0000012000"), Decimal("100"), Decimal("1E+2"), {"a": "=1"})
    shown = ["", "true", at.isoformat(), "0.0000012", "100", "100", '{"a": "=1"}', "0"]
    assert parsed(as_csv(list("abcdefg"), [row]))[1] == shown


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=5))
def test_a_strict_parser_finds_what_was_written(names: list[str]) -> None:
    """FR-070."""
    _, *found = parsed(as_csv(["name"], [(name,) for name in names]))
    assert [shown.removeprefix("'") for shown, _ in found] == [name.removeprefix("'") for name in names]


@given(count=st.integers(1, 30), data=st.data())
def test_half_an_export_never_looks_complete(count: int, data: st.DataObject) -> None:
    """FR-071."""
    rows = [(number,) for number in range(count)]
    text = as_csv(["number"], rows)
    cut = text[: data.draw(st.integers(1, len(text) - len("\r\n") - 1))]
    assert parsed(text)[-1][-1] == "0"
    assert parsed(cut)[-1][1:] != ["0"]
    document = "".join(json_lines(["number"], rows, count))
    with pytest.raises(json.JSONDecodeError):
        json.loads(document[: data.draw(st.integers(0, len(document) - len("]\n") - 1))])


@pytest.mark.parametrize("count", [2, 4])
def test_an_export_of_rows_that_change_is_cut_off(count: int) -> None:
    """FR-071."""
    sent: list[str] = []
    with pytest.raises(ExportChangedError):
        sent.extend(csv_lines(["number"], [(1,), (2,), (3,)], count))
    assert not sent[-1].endswith(",0\r\n")


def test_an_empty_export_is_whole() -> None:
    assert parsed(as_csv(["number"], [])) == [["number", "rows_left"]]
    assert json.loads("".join(json_lines(["number"], [], 0))) == []
