"""What every benchmark does with its numbers: a table for people, a JSON file in `benchmarks/results/` for scripts."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Spread:
    """What several rounds gave: their median, and the range they stayed in."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Spread:
        return cls(median(rounds), min(rounds), max(rounds))

    def __format__(self, number: str) -> str:
        return f"{self.middle:{number}} ({self.low:{number}} to {self.high:{number}})"


def percentile(values: Sequence[float], percent: int) -> float:
    """`values` must be at least two."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    print(f"\n{title}")
    for row in (headings, *rows):
        first, *rest = (
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]))


def keep(name: str, results: Any) -> None:
    """Write `results` with what is known of the machine they come from."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }
    report = {"benchmark": name, "at": round(time.time()), "machine": machine, "results": results}
    path.write_text(json.dumps(report, indent=2, default=vars) + "\n")
    print(f"\nwritten to {path.relative_to(RESULTS.parent.parent)}", flush=True)


def on_separate_cores(start: Callable[[], None]) -> str:
    """Call `start`, whose child processes then have all cores but one, and keep that one for this process.

    Answers a sentence on what was done. With a single core nothing can be kept apart.
    """
    if sys.platform != "linux" or len(cores := sorted(os.sched_getaffinity(0))) < 2:
        start()
        return "server and client share the cores"
    *servers, client = cores
    os.sched_setaffinity(0, servers)
    start()
    os.sched_setaffinity(0, {client})
    return f"server on core {', '.join(map(str, servers))}, client on core {client}"
