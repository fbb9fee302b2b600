"""Synthetic traces for the simulator: chat-like lengths, bursty arrivals, always the same for a seed."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from scheduler.simulator.trace import TraceRow


def chat_rows(count: int, seed: int = 7) -> list[TraceRow]:
    """Gamma gaps with a squared coefficient of variation of 2, log-normal lengths; one request a second on average."""
    source = random.Random(seed)
    arrival, rows = 0.0, []
    for _ in range(count):
        arrival += source.gammavariate(0.5, 2.0)
        prompt = min(int(source.lognormvariate(6.7, 0.9)) + 1, 8000)
        output = min(int(source.lognormvariate(4.8, 0.8)) + 1, 900)
        rows.append(TraceRow(round(arrival, 3), prompt, output))
    return rows


def write_trace(path: Path, rows: list[TraceRow]) -> Path:
    lines = [f"{row.arrival:.3f},{row.prompt_tokens},{row.output_tokens}" for row in rows]
    with gzip.open(path, "wt") as file:
        file.write("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    return path
