"""The shield between a policy and the engine: slots and KV memory are never given twice.

A policy may be unfair; it cannot be unsafe, because whatever it ranks first must still pass `Batcher.blocked`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from scheduler.core.kv_forecast import Forecast
from scheduler.core.types import PoolCapacity, Reason, Request, TierSpec

Lengths = Callable[[Request, int], int]  # request, produced -> tokens that it will have produced in the end
RECHECK_TOKENS = 32  # a running request's expected length is asked anew after this many tokens, or a quarter more


@dataclass(slots=True)
class InFlight:
    """A dispatched request and the KV blocks it is known to hold. Tokens are those of one of its sequences."""

    request: Request
    dispatched: float
    tokens: int = 0  # produced so far
    blocks: int = 0
    first_token: float | None = None
    expected: int = 0  # tokens that it will have produced in the end, as it was asked last
    recheck: int = 0  # tokens at which `expected` is old

    def remaining(self, lengths: Lengths) -> int:
        """Tokens still to come. Asking for lengths is costly, so that an answer is kept for a while."""
        if self.tokens >= self.recheck:
            self.expected = max(lengths(self.request, self.tokens), self.tokens)
            self.recheck = min(self.tokens + max(RECHECK_TOKENS, self.tokens // 4), self.expected)
        return self.expected - self.tokens

    def sequences(self) -> list[tuple[int, int]]:
        """Tokens to come and blocks held of each of its sequences, by the length that was expected last."""
        many = self.request.sequences
        return [(self.expected - self.tokens, self.blocks // many)] * many


class Batcher:
    """What runs in one engine, by our own books. The engine's reports are not needed for it: they may come late."""

    def __init__(self, capacity: PoolCapacity, max_batch: int | None) -> None:
        self._capacity = capacity
        self._max_batch = max_batch
        self._running: dict[str, InFlight] = {}
        self._per_tier: Counter[str] = Counter()  # sequences
        self._blocks = 0
        self._worst = 0  # blocks if everything produced all it may
        self._context = 0
        self._forecast: Forecast | None = None  # of what runs; None: to be made anew
        self._forecast_of = 0  # requests that are in it, the first ones of `_running`
        self._behind: float | None = None  # see `next_behind`; None: to be found anew
        self.sequences = 0  # that run
        self.decoding = 0  # sequences that have their first token

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

    @property
    def context(self) -> int:
        """KV tokens of what decodes."""
        return self._context

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def get(self, request_id: str) -> InFlight | None:
        return self._running.get(request_id)

    def running(self) -> list[InFlight]:
        return list(self._running.values())

    def planned(self, lengths: Lengths) -> list[InFlight]:
        """What runs, each with an expected length that is not old."""
        flights = self.running()
        for flight in flights:
            if flight.tokens >= flight.recheck:  # here, because a call for each would be half of a decision's time
                flight.remaining(lengths)
        return flights

    def count(self, tier: str) -> int:
        """Running sequences of a tier."""
        return self._per_tier[tier]

    def resize(self, capacity: PoolCapacity, max_batch: int | None) -> None:
        """New bounds. What runs keeps running, also above a lowered cap; nothing enters until it fits again."""
        self._outdated()
        self._capacity = capacity
        self._max_batch = max_batch
        self._blocks = self._worst = 0
        for flight in self._running.values():
            request = flight.request
            flight.blocks = request.sequences * capacity.blocks(request.prompt_tokens + max(flight.tokens, 1))
            self._blocks += flight.blocks
            self._worst += worst_case_blocks(capacity, request)

    def never_fits(self, request: Request) -> Reason | None:
        """Why the request could not run even on an empty engine; None if it could."""
        capacity = self._capacity
        if request.longest_context > capacity.max_model_len:
            return Reason.CONTEXT_LENGTH
        if request.sequences > capacity.max_seqs or worst_case_blocks(capacity, request) > capacity.total_blocks:
            return Reason.NEVER_FITS
        return None

    def blocked(self, request: Request) -> Reason | None:
        """Why the request cannot enter now; None if it can."""
        if self._running and self.sequences + request.sequences > self.cap:
            return Reason.SLOTS_FULL
        if self._running and self._blocks + self._first_blocks(request) > self._capacity.total_blocks:
            return Reason.KV_FULL
        return None

    def reserved_against(self, request: Request, better: list[TierSpec]) -> Reason | None:
        """Whether the free slots are kept for `better` tiers, best first: what each has reserved and does not use.

        A rank that runs more than its own part uses up the part of the next one, never that of a better one. A request
        of several sequences that never has room beside what is kept may run alone: it would wait for ever.
        """
        kept = over = 0.0
        for one in better:
            free = one.reserved_slots * self.cap - self._per_tier[one.name] - over
            kept, over = kept + max(free, 0.0), max(-free, 0.0)
        room = self.cap - int(kept)
        if self.sequences + request.sequences <= room:
            return None
        alone = not self._running and request.sequences > max(room, 1)
        return None if alone else Reason.SLOTS_RESERVED

    def forecast(self, request: Request, headroom: float, lengths: Lengths) -> Reason | None:
        """Whether memory at its future peak leaves `headroom` free with the request added; alone it may have all."""
        if not self._running:
            return None
        limit = (1 - headroom) * self._capacity.total_blocks
        if self._worst + worst_case_blocks(self._capacity, request) <= limit:
            return None  # even the worst case fits: no need to look at each request
        first = self._capacity.blocks(request.prompt_tokens + 1)
        fits = self._current_forecast(lengths).fits(lengths(request, 0), first, limit, request.sequences)
        return None if fits else Reason.KV_FULL

    def peak_share(self, lengths: Lengths) -> float:
        """The future peak of what runs, as a share of the pool."""
        return self._current_forecast(lengths).peak / max(self._capacity.total_blocks, 1)

    def next_behind(self, tiers: Mapping[str, TierSpec]) -> float:
        """The earliest instant at which an open stream that got no more tokens would be behind the pace of its tier.

        Infinite while no stream is open. A change of the tiers is told by `resize`.
        """
        if self._behind is None:
            self._behind = min(
                [
                    flight.first_token + flight.tokens * tiers[flight.request.tier].tpot
                    for flight in self._running.values()
                    if flight.first_token is not None
                ],
                default=math.inf,
            )
        return self._behind

    def enter(self, request: Request, now: float) -> None:
        """The request takes a slot and the blocks of its prompt and first token."""
        blocks = self._first_blocks(request)
        self._running[request.id] = InFlight(request, now, blocks=blocks)
        self._per_tier[request.tier] += request.sequences
        self.sequences += request.sequences
        self._blocks += blocks
        self._worst += worst_case_blocks(self._capacity, request)

    def progress(self, request_id: str, tokens: int, now: float) -> bool:
        """The request has produced `tokens` so far. True at its first token; unknown ids (just ended) are ignored.

        Its answers are taken to be of one length: who has ended early is not told.
        """
        flight = self._running.get(request_id)
        if flight is None:
            return False
        request = flight.request
        many = request.sequences
        if many > 1:
            tokens = request.per_sequence(tokens)
        if tokens <= flight.tokens:
            return False
        self._outdated()
        first = flight.first_token is None
        if first:
            flight.first_token = now
            self.decoding += many
            self._context += many * request.prompt_tokens
        self._context += many * (tokens - flight.tokens)
        flight.tokens = tokens
        blocks = many * self._capacity.blocks(request.prompt_tokens + tokens)
        self._blocks += blocks - flight.blocks
        flight.blocks = blocks
        return first

    def leave(self, request_id: str) -> InFlight:
        """The request gives back what it holds. Raises KeyError if it does not run."""
        self._outdated()
        flight = self._running.pop(request_id)
        request = flight.request
        self._per_tier[request.tier] -= request.sequences
        self.sequences -= request.sequences
        self._blocks -= flight.blocks
        self._worst -= worst_case_blocks(self._capacity, request)
        if flight.first_token is not None:
            self.decoding -= request.sequences
            self._context -= request.sequences * (request.prompt_tokens + flight.tokens)
        return flight

    def _current_forecast(self, lengths: Lengths) -> Forecast:
        if self._forecast is None:
            planned = self.planned(lengths)
            if self.sequences == len(planned):  # one each, as a rule: a call for each would take half as long again
                sequences = [(one.expected - one.tokens, one.blocks) for one in planned]
            else:
                sequences = [one for flight in planned for one in flight.sequences()]
            self._forecast = Forecast(sequences, self._capacity.block_size)
            self._forecast_of = len(self._running)
        for flight in islice(self._running.values(), self._forecast_of, None):  # what has entered since
            flight.remaining(lengths)
            for one in flight.sequences():
                self._forecast.add(*one)
        self._forecast_of = len(self._running)
        return self._forecast

    def _outdated(self) -> None:
        self._forecast = None
        self._behind = None

    def _first_blocks(self, request: Request) -> int:
        return request.sequences * self._capacity.blocks(request.prompt_tokens + 1)


def worst_case_blocks(capacity: PoolCapacity, request: Request) -> int:
    """KV blocks that the request holds if all its answers are as long as they may be."""
    return request.sequences * capacity.blocks(request.longest_context)
