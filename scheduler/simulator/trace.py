"""Request traces: gzip-compressed or plain CSV with one row per request."""

from __future__ import annotations

import csv
import gzip
import itertools
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")
# Sources that quantise their arrivals carry a second column in which the ticks are spread; it is the one to replay.
SPREAD = "arrival_spread_s"
GZIP_MAGIC = b"\x1f\x8b"
# Far beyond any trace; what is larger is a mistake, and arithmetic on it would overflow.
MOST_SECONDS = 1e12
MOST_TOKENS = 10**9


class TraceError(Exception):
    """The file is no trace; the message names the file and the place."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `arrival` in seconds from the trace's own zero, lengths in tokens; `tenant` "" if unknown."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` rows of the file, in order of arrival.

    Columns: `arrival_s`, `prompt_tokens`, `output_tokens`, optionally `tenant`; others are ignored. Raises TraceError.
    """
    try:
        with _open(path) as file:
            rows = list(_rows(csv.DictReader(file, strict=True), path, limit))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise TraceError(f"{path} cannot be read as a trace: {error}") from error
    if not rows:
        raise TraceError(f"{path} has no requests.")
    return sorted(rows, key=lambda row: row.arrival)


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        compressed = file.read(2) == GZIP_MAGIC
    if compressed:
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _rows(reader: csv.DictReader[str], path: Path, limit: int | None) -> Iterable[TraceRow]:
    columns = reader.fieldnames or ()
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        found = ", ".join(columns) or "nothing"
        raise TraceError(f"{path} lacks the column {missing[0]}: its first line has {found[:200]}.")
    arrival = SPREAD if SPREAD in columns else "arrival_s"
    for record in itertools.islice(reader, limit):
        try:
            yield _row(record, arrival)
        except (TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {reader.line_num}: {error}") from error


def _row(record: Mapping[str, str | None], arrival: str) -> TraceRow:
    row = TraceRow(
        arrival=float(record[arrival] or ""),
        prompt_tokens=int(record["prompt_tokens"] or ""),
        output_tokens=int(record["output_tokens"] or ""),
        tenant=record.get("tenant") or "",
    )
    if not abs(row.arrival) <= MOST_SECONDS:  # nor if it is no number
        raise ValueError(f"the arrival {row.arrival} is no instant.")
    if row.prompt_tokens < 1 or row.output_tokens < 1:
        raise ValueError("a request has at least one prompt token and one output token.")
    if max(row.prompt_tokens, row.output_tokens) > MOST_TOKENS:
        raise ValueError(f"a request has at most {MOST_TOKENS:,} prompt tokens and as many output tokens.")
    return row
