"""Kill processes of a product that works, then compare its books: `python -m tests.faults.killing --kills 200`.

A product of real processes under load. Again and again one of them gets SIGKILL, at a random instant: between two
kills the product sometimes comes back whole, sometimes not yet. In the end the load stops, the product settles, and
ledger, engine record and callers' receipts are laid beside each other.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.faults import books
from tests.faults.books import Audit
from tests.faults.load import Fate, Load
from tests.faults.patient import CONCURRENCY, Patient, installed, wait_for

CALLERS = 20
WEIGHTS = {"scheduler": 10, "web-1": 4, "web-2": 4, "tasks": 1, "beat": 1, "up": 2}
KINDS = (("scheduler",), ("web-1", "web-2"), ("tasks",), ("beat",), ("up",))
AT_LEAST = 2  # kills of each kind, where there are as many
PATIENCE = 0.8  # chance to wait until the product is whole and at work again before the next kill


@dataclass
class Outcome:
    """What a run of kills came to. `wrong` is everything that must not be."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    fates: Counter[Fate] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    audit: Audit = field(default_factory=Audit)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def table(self) -> str:
        audit = self.audit
        lines = {
            "kills": f"{self.kills.total()} ({_counts(self.kills)})",
            "requests": f"{self.fates.total()} ({_counts(self.fates)})",
            "errors": _counts(self.codes) or "none",
            "ledger rows": f"{audit.rows} ({_counts(Counter(audit.statuses))})",
            "interrupted": f"{audit.interrupted}",
            "tokens compared": f"{audit.tokens}",
            "tokens torn": f"{audit.torn_tokens}",
            "wrong": f"{len(self.wrong)}",
            "seconds": f"{self.seconds:.0f} (seed {self.seed})",
        }
        return "\n".join([f"{name:<16}{value}" for name, value in lines.items()] + self.wrong[:20])


def run(kills: int, seed: int, *, most_pause: float = 1.5) -> Outcome:
    """Kill that often and answer what came of it."""
    outcome = Outcome(seed)
    began = time.monotonic()
    with installed() as patient:
        patient.start()
        patient.be_whole()
        with Load(patient.url, patient.keys["prod"], CALLERS, seed) as load:
            _kill_again_and_again(patient, load, outcome, kills, random.Random(seed), most_pause)
            patient.be_whole()
            time.sleep(1.0)  # a last second of work: what is leaked shows only then
        patient.idle()
        outcome.wrong += _leaks(patient)
        patient.idle()
        status = patient.stop()
        if status:
            outcome.wrong.append(f"the product stopped with status {status}")
        rows, made = books.ledger(patient.data_dir), books.record(patient.data_dir)
        outcome.fates = load.fates()
        outcome.codes = Counter(receipt.code for receipt in load.receipts if receipt.code)
        outcome.audit = books.audit(rows, made, load.receipts)
        outcome.wrong += [*outcome.audit.wrong, *_charges(rows), *_budget(patient.data_dir, rows)]
    outcome.seconds = time.monotonic() - began
    return outcome


def victims(kills: int, dice: random.Random) -> list[str]:
    """Who is killed, in order: each kind of process at least twice, beyond that by weight."""
    due = [dice.choice(kind) for kind in KINDS for _ in range(AT_LEAST)] if kills >= AT_LEAST * len(KINDS) else []
    chosen = due + dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=kills - len(due))
    dice.shuffle(chosen)
    return chosen


def _kill_again_and_again(
    patient: Patient, load: Load, outcome: Outcome, kills: int, dice: random.Random, most: float
) -> None:
    for victim in victims(kills, dice):
        if dice.random() < PATIENCE:
            patient.be_whole()
            before = load.answered()
            wait_for(lambda: load.answered() > before)  # noqa: B023 - at once: it is at work again
        time.sleep(dice.uniform(0.0, most))
        wait_for(partial(patient.kill, victim))  # it may not be back from a kill before
        outcome.kills[victim] += 1


def _leaks(patient: Patient) -> Iterator[str]:
    """All slots of the tenant are free: so many requests are served at a time, and one more is not."""
    headers = {"authorization": f"Bearer {patient.keys['prod']}"}
    body = {"model": "demo", "messages": [{"role": "user", "content": "word"}], "max_tokens": 2, "stream": True}
    with httpx.Client(base_url=patient.url, headers=headers, timeout=60) as client, contextlib.ExitStack() as open_now:
        for number in range(CONCURRENCY + 1):
            if number == CONCURRENCY:
                wait_for(lambda: patient.busy() == CONCURRENCY)
            kept = body | {"simulate": {"hang_at": 1}} if number < CONCURRENCY else body | {"stream": False}
            answer = open_now.enter_context(client.stream("POST", "/v1/chat/completions", json=kept))
            wanted = 200 if number < CONCURRENCY else 429
            if answer.status_code != wanted:
                yield f"of {CONCURRENCY} slots, request {number + 1} was answered {answer.status_code}: leaked"


def _charges(rows: list[books.Row]) -> Iterator[str]:
    """Every row costs what its tokens cost: 0.20 and 0.60 per million are 2,000 and 6,000 of 1e-10 each."""
    for row in rows:
        if row.charge != row.prompt_tokens * 2000 + row.tokens * 6000:
            yield f"{row.id} is charged {row.charge} for {row.prompt_tokens} + {row.tokens} tokens"


def _budget(data_dir: Path, rows: list[books.Row]) -> Iterator[str]:
    """What the budgets have as spent is what the ledger has, and nothing is on lease any more."""
    spent, leased = books.budgets(data_dir)
    wanted = {
        "tokens": sum(row.prompt_tokens + row.tokens for row in rows),
        "USD": sum(row.charge or 0 for row in rows),
    }
    if spent != wanted:
        yield f"the budgets have {spent} as spent, the ledger has {wanted}"
    if leased:
        yield f"{leased} of the budgets are still on lease"


def _counts(counter: Counter[Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items(), key=lambda item: str(item[0])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    arguments = parser.parse_args()
    outcome = run(arguments.kills, random.randrange(10**6) if arguments.seed is None else arguments.seed)
    sys.stdout.write(f"{outcome.table()}\n")
    sys.exit(bool(outcome.wrong))


if __name__ == "__main__":
    main()
