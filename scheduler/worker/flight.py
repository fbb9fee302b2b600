"""One request inside the scheduler process, from Submit to its end.

    RENDERING ──► QUEUED ──► RUNNING ──► ENDED         any state may go to ENDED; nothing leaves it
                     ▲          │
                     └──────────┘ preempted, or its engine died: it goes on later

What a phase implies: QUEUED and RUNNING hold a reservation in `Admission` and are known to the pool's planner; from the
first dispatch on it has an open intent in the spool. `endings.py` is the only code that moves a flight to ENDED.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from scheduler.core.budgets import AccountKey, Spending
from scheduler.core.types import Dispatch, Limit, Reason, StepReport, TierSpec
from scheduler.engines.base import Rendered
from scheduler.wire.messages import Submit
from scheduler.worker.journal import Progress
from tenants.pricing import TokenPrice

if TYPE_CHECKING:
    from scheduler.worker.outbox import Session
    from scheduler.worker.pool import Pool


def sequences_in(report: StepReport) -> int:
    """How many sequences took part in a step; `running` alone lacks those that ended in it."""
    return max(report.running, report.decode_seqs)


@dataclass(slots=True)
class StepTally:
    """Engine steps so far and the sequences in them, for means over an interval."""

    steps: int = 0
    sequences: int = 0

    def add(self, sequences: int) -> None:
        self.steps += 1
        self.sequences += sequences

    def copy(self) -> StepTally:
        return StepTally(self.steps, self.sequences)

    def mean_since(self, before: StepTally) -> float:
        """Mean sequences per step since `before` was copied; 1 when no step was reported in between."""
        steps = self.steps - before.steps
        return max((self.sequences - before.sequences) / steps, 1.0) if steps else 1.0


def _nothing() -> float:
    return 0.0


class Phase(StrEnum):
    RENDERING = "rendering"
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Flight:
    """State of a request. Instants are monotonic seconds, `arrived_at` is the Unix time of `arrival`."""

    submit: Submit
    session: Session
    arrival: float
    arrived_at: float
    limits: tuple[Limit, ...]
    phase: Phase = Phase.RENDERING
    pool: Pool | None = None
    tier: TierSpec | None = None  # the tier it runs as; None until the pool is known to serve it
    service_tier: str = ""  # the same in OpenAI's words
    slo: float | None = None  # the request's own deadline in seconds, within what its tier allows
    deadline: float | None = None  # instant of the contract point; None until the request is queued
    rendered: Rendered | None = None
    max_tokens: int = 0  # of each answer
    price: TokenPrice | None = None  # the one in force when it arrived
    spending: Spending = field(default_factory=Spending)  # the most it may cost, and who pays
    leased: tuple[AccountKey, ...] = ()  # accounts that pay from a lease
    task: asyncio.Task[None] | None = None  # what to cancel: the intake's, then the run's
    # from dispatch on
    dispatch: Dispatch | None = None  # the first one: its batch is the request's
    dispatched: float = 0.0
    engine_priority: int = 0  # of the present run
    serial: int = 0  # of its intent; 0 = none
    policy_version: int = 0
    steps_before: StepTally = field(default_factory=StepTally)
    stop_reason: Reason | None = None  # why the present run was told to stop
    tokens: int = 0  # delivered, of all answers
    made: dict[int, int] = field(default_factory=dict)  # the same by answer
    cached: int = 0  # prompt tokens that the first run did not compute, as reported
    first_token: float | None = None
    last_token: float | None = None
    engine_seconds: float = 0.0  # engine time of the runs that are over
    charged: Callable[[], float] = _nothing  # tells the engine time of the present run
    # for going on after a run that was cut short
    resumable: bool = False
    produced: list[int] = field(default_factory=list)  # ids of all tokens, if it is resumable
    whole: bool = True  # the last text held nothing back
    preempting: bool = False  # it is to leave the engine as soon as its text is whole
    runs: int = 0
    deaths: int = 0  # engines that died under it
    tokens_before: int = 0  # delivered before the present run

    @property
    def id(self) -> str:
        return self.submit.id

    @property
    def tier_name(self) -> str:
        """The tier it runs as, as far as that is known."""
        return self.tier.name if self.tier is not None else self.submit.caller.tier

    @property
    def prompt_tokens(self) -> int:
        return self.rendered.prompt_tokens if self.rendered is not None else 0

    @property
    def cached_tokens(self) -> int:
        """Those of the prompt that were not computed: what the engine reports, held within what is possible."""
        return min(max(self.cached, 0), self.prompt_tokens)

    @property
    def degradation(self) -> int:
        """Level of its pool, 0 to 4: callers are told of it."""
        planner = None if self.pool is None else self.pool.planner
        return 0 if planner is None else planner.books.level

    @property
    def sequences(self) -> int:
        """How many answers it makes."""
        return self.submit.sampling.n

    @property
    def output_bound(self) -> int:
        """The most tokens that all its answers may have together."""
        return self.sequences * self.max_tokens

    @property
    def longest(self) -> int:
        """Tokens of its longest answer so far."""
        return max(self.made.values(), default=0)

    @property
    def run_tokens(self) -> int:
        """What the present run has delivered."""
        return self.tokens - self.tokens_before

    @property
    def can_go_on(self) -> bool:
        """Whether another run can take up where this one stopped, without a token repeated or lost."""
        if not self.tokens:
            return True
        return self.resumable and self.whole and len(self.produced) == self.tokens < self.max_tokens

    def stop(self, reason: Reason) -> None:
        """End the present run. It is cancelled once; a reason to end for good replaces PREEMPTED, never another."""
        cancelled, self.stop_reason = self.stop_reason is not None, self.stronger(reason)
        if not cancelled and self.task is not None:
            self.task.cancel()

    def stronger(self, reason: Reason) -> Reason:
        """Of the reason that the run has and a new one, the one that counts."""
        old = self.stop_reason
        return reason if old is None or old is Reason.PREEMPTED else old

    def advance(self, index: int, tokens: int, now: float) -> None:
        """`tokens` of the answer `index` have been delivered to this process so far."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        self.tokens += tokens - self.made.get(index, 0)
        self.made[index] = tokens

    def progress(self) -> Progress:
        first = self.first_token if self.first_token is not None else self.dispatched
        last = self.last_token if self.last_token is not None else first
        seconds = self.engine_seconds + self.charged()
        return Progress(self.tokens, first - self.dispatched, last - self.dispatched, seconds, self.cached_tokens)

    def end_run(self) -> None:
        """The present run is over: its engine time stays with the flight."""
        self.engine_seconds += self.charged()
        self.charged = _nothing

    def unix(self, instant: float) -> float:
        """A monotonic instant as Unix time, relative to the arrival: a stepped wall clock never reorders a request."""
        return self.arrived_at + (instant - self.arrival)
