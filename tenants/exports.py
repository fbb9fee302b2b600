"""Tables for other programs: CSV (RFC 4180) and JSON, line by line, so that a long one needs no memory.

Text in a CSV may come from tenants, and spreadsheets run what looks like a formula: a cell that begins like one gets
an apostrophe in front (OWASP, CSV injection). Numbers are never touched, so that they stay numbers. JSON has every text
unchanged.

An export that was cut off must not look complete. Every row says how many follow it: a file whose last row does not
have 0 in `rows_left` is not whole, and neither is JSON without its last bracket.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

Cell = str | int | float | Decimal | bool | datetime | dict[str, Any] | None

FORMULA_SIGNS = tuple("=+-@\t\r\n＝＋－＠")  # full-width signs too, which spreadsheets take for the plain ones
DROPPED = " \u00a0\u3000"  # white space that spreadsheets drop
ROWS_LEFT = "rows_left"


class ExportChangedError(Exception):
    """The rows of an export are not as many as it began with; what was sent is cut off."""


def csv_lines(columns: Sequence[str], rows: Iterable[Sequence[Cell]], count: int) -> Iterator[str]:
    """A header and `count` rows. Raises ExportChangedError before the last one if there are more or fewer."""
    yield _line([*columns, ROWS_LEFT])
    for left, row in _counted(rows, count):
        yield _line([*map(_csv_cell, row), str(left)])


def json_lines(columns: Sequence[str], rows: Iterable[Sequence[Cell]], count: int) -> Iterator[str]:
    """An array of objects, one a line. Raises as `csv_lines` does."""
    yield "["
    for left, row in _counted(rows, count):
        document = dict(zip(columns, map(_json_cell, row), strict=True)) | {ROWS_LEFT: left}
        yield f"\n{json.dumps(document, ensure_ascii=False)}{',' if left else ''}"
    yield "\n]\n"


def plain(amount: Decimal) -> str:
    """An amount in digits, without an exponent and without zeros that say nothing."""
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _counted(rows: Iterable[Sequence[Cell]], count: int) -> Iterator[tuple[int, Sequence[Cell]]]:
    """Each row and how many follow it. The last one is given away only when it is known to be the last."""
    kept: Sequence[Cell] | None = None
    left = count
    for row in rows:
        if not left:
            raise ExportChangedError("rows have come since it began")
        if kept is not None:
            yield left, kept
        kept, left = row, left - 1
    if left:
        raise ExportChangedError(f"{left} rows have gone since it began")
    if kept is not None:
        yield 0, kept


def _line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\r\n").writerow(cells)
    return buffer.getvalue()


def _csv_cell(cell: Cell) -> str:
    match cell:
        case None:
            return ""
        case str():
            return f"'{cell}" if cell.lstrip(DROPPED).startswith(FORMULA_SIGNS) else cell
        case bool():
            return str(cell).lower()
        case Decimal():
            return plain(cell)
        case datetime():
            return cell.isoformat()
        case dict():
            return json.dumps(cell, ensure_ascii=False)
        case _:
            return repr(cell)


def _json_cell(cell: Cell) -> Any:
    match cell:
        case Decimal():
            return plain(cell)
        case datetime():
            return cell.isoformat()
        case _:
            return cell
