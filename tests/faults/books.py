"""Two witnesses of what was made: the ledger, and the simulated engine's own record. Read as files, by their formats.

Nothing of the product's code takes part, so that a mistake in it cannot hide itself.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.load import Fate, Receipt


@dataclass(frozen=True)
class Row:
    """A usage row. `charge` in 1e-10 of the currency."""

    id: str
    status: str
    prompt_tokens: int
    tokens: int
    charge: int | None
    engine_seconds: float


@dataclass
class Made:
    """What the engine says of one request. `torn`: its engine was killed while it ran."""

    tokens: int
    torn: bool


def ledger(data_dir: Path) -> list[Row]:
    columns = "request_id, status, prompt_tokens, completion_tokens, charge, engine_seconds"
    with closing(sqlite3.connect(f"file:{_database(data_dir)}?mode=ro", uri=True)) as db:
        return [Row(*values) for values in db.execute(f"SELECT {columns} FROM tenants_usagerecord")]


def record(data_dir: Path, model: str = "demo") -> dict[str, Made]:
    """By request. A request that ran in several pieces is counted on from where it was."""
    made: dict[str, Made] = {}
    running: dict[int, Made] = {}  # of the engine whose lines are read, by number
    for line in _lines(data_dir, model):
        if "run" in line:
            running = {}
        elif "id" in line:
            one = running[line["number"]] = made[line["id"]] = Made(line.get("tokens", 0), torn="ended" not in line)
            if not one.torn:
                del running[line["number"]]
        else:
            for number in line["made"]:
                running[number].tokens += 1
    return made


def unsettled(data_dir: Path) -> int:
    """Rows of spools that have no end yet or have not reached the database."""
    count = 0
    for path in (data_dir / "spool").glob("spool-*.sqlite3"):
        with closing(sqlite3.connect(path)) as db:
            for table in ("intents", "usage WHERE stored <> 1"):
                count += db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
    return count


def budgets(data_dir: Path) -> tuple[dict[str, int], int]:
    """What is spent of budgets, by unit, and how much of them is on lease."""
    with closing(sqlite3.connect(f"file:{_database(data_dir)}?mode=ro", uri=True)) as db:
        spent = dict(db.execute("SELECT unit, spent FROM tenants_budgetaccount"))
        (leased,) = db.execute("SELECT COALESCE(SUM(amount), 0) FROM tenants_budgetlease").fetchone()
        return spent, leased


@dataclass
class Audit:
    """Ledger, record and receipts beside each other. `wrong` says in words what does not agree."""

    rows: int = 0
    tokens: int = 0
    interrupted: int = 0
    torn_tokens: int = 0  # of a last step that a kill kept from the scheduler: made, but never handed over
    statuses: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def audit(rows: Iterable[Row], made: dict[str, Made], receipts: Iterable[Receipt]) -> Audit:
    found = Audit()
    by_id: dict[str, Row] = {}
    for row in rows:
        if row.id in by_id:
            found.wrong.append(f"{row.id} is in the ledger twice")
        by_id[row.id] = row
        found.rows += 1
        found.tokens += row.tokens
        found.interrupted += row.status == "interrupted"
        found.statuses[row.status] = found.statuses.get(row.status, 0) + 1
    for id, one in made.items():
        _compare(id, one, by_id.get(id), found)
    for id, row in by_id.items():
        if id not in made and (row.tokens or row.status not in ("interrupted", "aborted")):
            found.wrong.append(f"{id} never reached the engine, the ledger has {row}")
    for receipt in receipts:
        _ask(receipt, by_id.get(receipt.id), found)
    return found


def _compare(id: str, one: Made, row: Row | None, found: Audit) -> None:
    if row is None:
        found.wrong.append(f"{id} made {one.tokens} tokens and is not in the ledger")
        return
    missing = one.tokens - row.tokens
    if missing == 1 and one.torn and row.status == "interrupted":
        # A stream makes one token a step. The engine notes it, then hands it over: the kill came between.
        found.torn_tokens += 1
    elif missing:
        found.wrong.append(f"{id} made {one.tokens} tokens, the ledger has {row.tokens} ({row.status})")


def _ask(receipt: Receipt, row: Row | None, found: Audit) -> None:
    """What a caller has seen is in the ledger."""
    if receipt.fate in (Fate.FORGOTTEN, Fate.WRONG):
        found.wrong.append(f"a caller got no last word: {receipt}")
    elif receipt.fate is Fate.ANSWERED:
        seen = (receipt.prompt_tokens, receipt.tokens)
        if row is None or row.status != "finished" or (row.prompt_tokens, row.tokens) != seen:
            found.wrong.append(f"a caller was answered {receipt}, the ledger has {row}")
    elif receipt.tokens and (row is None or row.tokens < receipt.tokens):
        found.wrong.append(f"a caller received more than is billed: {receipt}, the ledger has {row}")


def _lines(data_dir: Path, model: str) -> Iterator[dict[str, Any]]:
    """Whole lines; a kill may tear the last one of a run."""
    for path in (data_dir / "simulated" / f"{model}.old.jsonl", data_dir / "simulated" / f"{model}.jsonl"):
        for raw in path.read_bytes().split(b"\n") if path.exists() else ():
            try:
                yield json.loads(raw)
            except ValueError:
                continue


def _database(data_dir: Path) -> Path:
    (path,) = data_dir.glob("*.sqlite3")
    return path
