"""The one reservation of a pool: when the most urgent request that does not fit will start, and who may pass it.

EASY backfilling (Lifka, 1995): the first request in line that does not fit gets the earliest instant at which enough of
what runs will have ended. Another may go before it only if it has ended by then, or uses what is left over then.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop

from scheduler.core.batcher import Lengths, worst_case_blocks
from scheduler.core.books import Books
from scheduler.core.types import Request

LATE_QUANTILE = 0.9


@dataclass(frozen=True, slots=True)
class Reservation:
    """`spare_*`: what is left over at `start` once the request has what it needs."""

    request: Request
    start: float
    spare_slots: int
    spare_blocks: int


def reserve(books: Books, request: Request, slots: int, blocks: int, lengths: Lengths, now: float) -> Reservation:
    """The earliest start of `request`, which may use `slots` slots and `blocks` blocks of the pool.

    Running requests count with all the blocks that they are expected to fill, until their predicted ends; `lengths`
    answers what they will have produced.
    """
    need = request.sequences * books.capacity.blocks(request.prompt_tokens + books.expected_tokens(request))
    step, next_step, size = books.step_time(), now + books.residual(now), books.capacity.block_size
    flights = []
    for flight in books.batcher.planned(lengths):  # in the hot path of a full engine: few calls
        end = next_step + (flight.expected - flight.tokens) * step
        if flight.first_token is None and (prefill := books.service.prefill_left(flight.request.id)):
            end += books.prefill_seconds(prefill)
        many = flight.request.sequences
        flights.append((end, many * -(-(flight.request.prompt_tokens + flight.expected) // size), many))
    heapify(flights)  # as a rule the first few are enough
    used_slots = books.batcher.sequences
    used_blocks = sum(held for _, held, _ in flights)
    start = now
    while flights and not (used_slots + request.sequences <= slots and used_blocks + need <= blocks):
        start, held, many = heappop(flights)
        used_slots -= many
        used_blocks -= held
    return Reservation(request, start, slots - used_slots - request.sequences, blocks - used_blocks - need)


def may_pass(books: Books, reservation: Reservation, request: Request, now: float) -> bool:
    """Whether dispatching `request` now leaves the reservation where it is."""
    need = worst_case_blocks(books.capacity, request)
    if reservation.spare_slots >= request.sequences and reservation.spare_blocks >= need:
        return True
    tokens = books.expected_tokens(request, LATE_QUANTILE)
    pending = books.service.remaining_prefill()
    seconds = books.residual(now) + books.prefill_seconds(request.prompt_tokens, pending) + tokens * books.step_time()
    return now + seconds * books.steps.quantile(LATE_QUANTILE) <= reservation.start
