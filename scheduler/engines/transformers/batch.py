"""A padded batch: rows of one width through one forward pass a step, from the prompts to the last end.

░░ padding in front, masked        ▓▓ prompt        ██ answer        ×× computed after the row's end

row 0   ░░░░░░░░▓▓▓▓▓▓██████××××××××
row 1   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓██████████████
row 2   ░░░░▓▓▓▓▓▓▓▓▓▓██××××××××××××
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from scheduler.engines.transformers.sampling import Picker

PAD = 0  # any token: padding is masked, and what follows an end is not read


@dataclass(slots=True, eq=False)
class Row:
    """One request in a batch. `alive`: it has neither ended nor been aborted."""

    id: str
    prompt: list[int]
    picker: Picker
    made: int = 0
    alive: bool = True


class PaddedBatch:
    """Runs its rows together. `step` may run on a thread; everything else must not while it does."""

    def __init__(self, network: Any, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.started = False
        self._network = network
        self.width = max(len(row.prompt) for row in rows)
        padding = [self.width - len(row.prompt) for row in rows]
        self._input = torch.tensor([[PAD] * pad + row.prompt for pad, row in zip(padding, rows, strict=True)])
        self._mask = torch.tensor([[0] * pad + [1] * (self.width - pad) for pad in padding])
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        self._cache = transformers.DynamicCache(config=network.config)

    def __len__(self) -> int:
        """Rows, those that have ended included."""
        return len(self.rows)

    @property
    def alive(self) -> list[Row]:
        return [row for row in self.rows if row.alive]

    def padded_tokens(self) -> int:
        """What the next step computes for nothing."""
        computed = len(self.rows) * (1 if self.started else self.width)
        return computed - sum(1 if self.started else len(row.prompt) for row in self.alive)

    @torch.inference_mode()  # type: ignore[untyped-decorator]  # its type is unknown here
    def step(self) -> list[tuple[Row, int]]:
        """One forward pass: the next token of each row that is alive."""
        logits = self._network(
            input_ids=self._input,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens = [row.picker.pick(logits[n].float()) if row.alive else PAD for n, row in enumerate(self.rows)]
        self._input = torch.tensor(tokens)[:, None]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self._positions = self._positions[:, -1:] + 1
        self.width += 1
        self.started = True
        return [(row, token) for row, token in zip(self.rows, tokens, strict=True) if row.alive]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def keep(self, rows: Sequence[Row]) -> None:
        """Drop all rows but these, and the memory of the others. The width stays."""
        kept = set(map(id, rows))
        indices = torch.tensor([n for n, row in enumerate(self.rows) if id(row) in kept], dtype=torch.long)
        self.rows = [row for row in self.rows if id(row) in kept]
        if not self.rows:
            return
        self._input, self._mask, self._positions = (
            tensor[indices] for tensor in (self._input, self._mask, self._positions)
        )
        if self.started:
            self._cache.batch_select_indices(indices)


def compose(rows: Sequence[Row], max_padding: float) -> list[list[Row]]:
    """Batches of similar lengths: short prompts first, a new batch where padding would exceed its share."""
    batches: list[list[Row]] = []
    tokens = 0
    for row in sorted(rows, key=lambda row: len(row.prompt)):
        tokens += len(row.prompt)
        if not batches or tokens < (1 - max_padding) * (len(batches[-1]) + 1) * len(row.prompt):
            batches.append([])
            tokens = len(row.prompt)
        batches[-1].append(row)
    return batches
