"""The batch scheduler of the founding articles, rule by rule, as a baseline.

    - the best rank that waits is served first, in order of arrival, in batches of its own
    - a batch holds at most 32 requests (`max_batch`), one of the best rank at most 8
    - an idle engine waits at most 50 ms (`max_wait_ms`) for a batch to fill
    - a batch of `size` requests with `tokens` tokens takes a x size + b x tokens seconds, by least squares over the
      last 1,000 batches
    - a batch is as large as its estimate stays within 70 % of the time that its oldest request has left
    - after ten batches of others, one goes to the worst rank

Where the rules leave a choice, the kinder reading is taken, so that the baseline is as strong as it can be. Batches
overlap while fewer than `max_batch` requests run: on an engine that batches by iteration, waiting for the end of a
batch would only lose. Estimate and deadline speak of the same point, the first token of a stream and the last of any
other answer. The articles search the size by bisection; a batch that grows from the front while the estimate holds
has the same size, because the estimate grows with each request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.core.batcher import InFlight
from scheduler.core.books import Books
from scheduler.core.policies.base import Blocked, Candidate, Offer, Policy
from scheduler.core.types import Outcome, Reason, Request

MAX_BATCH = 32
BEST_RANK_BATCH = 8
MAX_WAIT = 0.050  # seconds
DEADLINE_SHARE = 0.70
BATCHES_REMEMBERED = 1000
WORST_RANK_EVERY = 10  # batches of other ranks


@dataclass(slots=True)
class Batch:
    """The requests of one decision. `tokens`: those that its seconds are explained by."""

    rank: int
    oldest: Request
    opened: float
    size: int = 0
    tokens: int = 0  # as expected
    left: int = 0  # requests that have not ended
    counted: int = 0  # requests that came to their contract point
    seen: int = 0  # tokens of those
    reached: float = 0.0  # the last of their contract points


class LatencyModel:
    """seconds = a x size + b x tokens, least squares without a constant over the last batches, never negative."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int, float]] = deque()
        self._ss = self._st = self._tt = 0
        self._sy = self._ty = 0.0

    def learn(self, size: int, tokens: int, seconds: float) -> None:
        """A batch of `size` requests with `tokens` tokens took so long."""
        self._samples.append((size, tokens, seconds))
        self._add(size, tokens, seconds, 1)
        if len(self._samples) > BATCHES_REMEMBERED:
            self._add(*self._samples.popleft(), -1)

    def predict(self, size: int, tokens: int) -> float:
        """Seconds; 0 while nothing is known."""
        a, b = self._fit()
        return a * size + b * tokens

    def _add(self, size: int, tokens: int, seconds: float, sign: int) -> None:
        self._ss += sign * size * size
        self._st += sign * size * tokens
        self._tt += sign * tokens * tokens
        self._sy += sign * size * seconds
        self._ty += sign * tokens * seconds

    def _fit(self) -> tuple[float, float]:
        """The best (a, b) with neither below 0; on the edge one of them explains everything."""
        if not self._samples:
            return 0.0, 0.0
        determinant = self._ss * self._tt - self._st * self._st
        if determinant > 0:
            a = (self._tt * self._sy - self._st * self._ty) / determinant
            b = (self._ss * self._ty - self._st * self._sy) / determinant
            if a >= 0 and b >= 0:
                return a, b
            if a < 0 and self._tt:
                return 0.0, max(self._ty, 0.0) / self._tt
        return max(self._sy, 0.0) / self._ss, 0.0


class Article(Policy):
    """See the module text."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._model = LatencyModel()
        self._batch: Batch | None = None  # the one that this decision makes
        self._batches: dict[str, Batch] = {}  # of each running request
        self._since_worst = 0  # batches
        self._more = False  # the batch of this decision was closed with more to take

    def max_wait(self) -> float:
        return super().max_wait() or MAX_WAIT

    def deciding(self, now: float) -> None:
        self._batch = None
        self._more = False

    def candidates(self, now: float) -> Iterator[Offer]:
        batch, rank = self._batch, self._turn()
        head = self._head(rank if batch is None else batch.rank)
        size = 1 if head is None else head.sequences
        if len(self.books.batcher) and self.books.batcher.sequences + size > self._most():
            if head is not None:
                yield Blocked(head, Reason.SLOTS_FULL)
        elif head is not None and (batch is None or self._holds(batch, head, now)):
            yield Candidate(head, Reason.RANK_ORDER)
        elif (first := head or self._head(rank)) is not None:
            self._more = True
            yield Blocked(first, Reason.BATCH_CLOSED)

    def next_wakeup(self, now: float) -> float | None:
        """At once, if the next batch can be made: one decision makes one batch."""
        return now if self._more else None

    def dispatched(self, request: Request, now: float) -> None:
        if self._batch is None:
            self._batch = Batch(self.books.tier(request).rank, request, now)
            self._since_worst = 0 if self._batch.rank == self._worst_rank() else self._since_worst + 1
        batch = self._batches[request.id] = self._batch
        batch.size += 1
        batch.left += 1
        batch.tokens += self._expected_tokens(request)

    def ended(self, flight: InFlight, outcome: Outcome, now: float) -> None:
        batch = self._batches.pop(flight.request.id, None)
        if batch is None:
            return
        batch.left -= 1
        if flight.first_token is not None:
            batch.counted += 1
            batch.seen += flight.request.prompt_tokens + (0 if flight.request.stream else outcome.completion_tokens)
            batch.reached = max(batch.reached, flight.first_token if flight.request.stream else now)
        if not batch.left and batch.counted:
            self._model.learn(batch.counted, batch.seen, batch.reached - batch.opened)

    # --- details ----------------------------------------------------------------------------------------------------

    def _head(self, rank: int | None) -> Request | None:
        """The first request of a rank."""
        heads = [head for head in self.books.queue.heads() if self.books.tier(head).rank == rank]
        return min(heads, key=lambda head: (head.arrival, head.id), default=None)

    def _turn(self) -> int | None:
        """The best rank that waits, or the worst if it is its turn."""
        waiting = {tier.rank for tier in self.books.tiers.values() if self.books.queue.length(tier.name)}
        worst = self._worst_rank()
        return worst if worst in waiting and self._since_worst >= WORST_RANK_EVERY else min(waiting, default=None)

    def _worst_rank(self) -> int:
        return max(tier.rank for tier in self.books.tiers.values())

    def _most(self) -> int:
        """Requests that may run at a time, and the largest batch."""
        return min(self.books.config.max_batch or MAX_BATCH, self.books.batcher.cap)

    def _holds(self, batch: Batch, request: Request, now: float) -> bool:
        """Whether one more request is in time for the oldest of the batch."""
        best = min(tier.rank for tier in self.books.tiers.values())
        if batch.size >= (min(BEST_RANK_BATCH, self._most()) if batch.rank == best else self._most()):
            return False
        estimate = self._model.predict(batch.size + 1, batch.tokens + self._expected_tokens(request))
        return estimate <= DEADLINE_SHARE * (batch.oldest.deadline - now)

    def _expected_tokens(self, request: Request) -> int:
        """Tokens up to the contract point, of all its answers: what `ended` will see."""
        produced = 0 if request.stream else request.sequences * self.books.expected_tokens(request)
        return request.prompt_tokens + produced
