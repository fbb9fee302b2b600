"""The shield between a policy and the engine: slots and KV memory are never given twice.

A policy may be unfair; it cannot be unsafe, because whatever it ranks first must still pass `Batcher.blocked`.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.core.types import PoolCapacity, Reason, Request


@dataclass(slots=True)
class InFlight:
    """A dispatched request and the KV blocks it is known to hold."""

    request: Request
    tokens: int  # produced so far
    blocks: int


class Batcher:
    """What runs in one engine, by our own books. The engine's reports are not needed for it: they may come late."""

    def __init__(self, capacity: PoolCapacity, max_batch: int | None) -> None:
        self._capacity = capacity
        self._max_batch = max_batch
        self._running: dict[str, InFlight] = {}
        self._blocks = 0

    @property
    def capacity(self) -> PoolCapacity:
        return self._capacity

    @property
    def cap(self) -> int:
        """Sequences that may run at a time: the policy's wish, at most what the engine has."""
        if self._max_batch is None:
            return self._capacity.max_seqs
        return max(1, min(self._max_batch, self._capacity.max_seqs))

    @property
    def blocks(self) -> int:
        """KV blocks held by what runs."""
        return self._blocks

    def __len__(self) -> int:
        return len(self._running)

    def running(self) -> list[InFlight]:
        return list(self._running.values())

    def resize(self, capacity: PoolCapacity, max_batch: int | None) -> None:
        """New bounds. What runs keeps running, also above a lowered cap; nothing enters until it fits again."""
        self._capacity = capacity
        self._max_batch = max_batch
        self._blocks = 0
        for flight in self._running.values():
            flight.blocks = capacity.blocks(flight.request.prompt_tokens + max(flight.tokens, 1))
            self._blocks += flight.blocks

    def never_fits(self, request: Request) -> Reason | None:
        """Why the request could not run even on an empty engine; None if it could."""
        if request.worst_case_tokens > self._capacity.max_model_len:
            return Reason.CONTEXT_LENGTH
        if self._capacity.blocks(request.worst_case_tokens) > self._capacity.total_blocks:
            return Reason.NEVER_FITS
        return None

    def blocked(self, request: Request) -> Reason | None:
        """Why the request cannot enter now; None if it can."""
        if len(self._running) >= self.cap:
            return Reason.SLOTS_FULL
        if self._running and self._blocks + self._first_blocks(request) > self._capacity.total_blocks:
            return Reason.KV_FULL
        return None

    def enter(self, request: Request) -> None:
        """The request takes a slot and the blocks of its prompt and first token."""
        blocks = self._first_blocks(request)
        self._running[request.id] = InFlight(request, 0, blocks)
        self._blocks += blocks

    def progress(self, request_id: str, tokens: int) -> None:
        """The request has produced `tokens` so far; unknown ids (just ended) are ignored."""
        flight = self._running.get(request_id)
        if flight is None or tokens <= flight.tokens:
            return
        flight.tokens = tokens
        blocks = self._capacity.blocks(flight.request.prompt_tokens + tokens)
        self._blocks += blocks - flight.blocks
        flight.blocks = blocks

    def leave(self, request_id: str) -> InFlight:
        """The request gives back what it holds. Raises KeyError if it does not run."""
        flight = self._running.pop(request_id)
        self._blocks -= flight.blocks
        return flight

    def _first_blocks(self, request: Request) -> int:
        return self._capacity.blocks(request.prompt_tokens + 1)
