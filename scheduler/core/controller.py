"""The adaptive batch cap: smaller when requests miss because of the batch, larger when none does and some wait.

One knob, one change at a time, and a dwell after each, so that cause and effect stay visible. What shrinks the batch
is what a smaller batch can mend: a pace that is missed, steps that are too long on average (the contract is a mean, so
that single long prefill steps are no reason), memory that the engine had to take back (`docs/scheduling.md`).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.core.types import TierSpec

TICK = 1.0  # seconds
DWELL = 5.0
WINDOW = 30.0  # seconds of completions that count
MIN_COMPLETIONS = 20
MIN_MISSES = 3  # by pace: at an objective of 99.9 % a single one would always be evidence
SHRINK = 0.85
GROW_TICKS = 5
HIGH_PACE, LOW_PACE = 0.95, 0.80  # of the tightest tpot
HIGH_RECOMPUTES, LOW_RECOMPUTES = 0.5, 0.0  # engine recomputes a second
IDLE_BUSY = 0.5
Z = 1.96  # 95 % two-sided


def wilson_upper(successes: int, total: int) -> float:
    """Upper end of Wilson's interval of a share (Wilson, 1927). 1 without observations."""
    if not total:
        return 1.0
    p = successes / total
    centre = p + Z * Z / (2 * total)
    spread = Z * math.sqrt(p * (1 - p) / total + Z * Z / (4 * total * total))
    return (centre + spread) / (1 + Z * Z / total)


@dataclass(frozen=True, slots=True)
class Completion:
    """How one admitted request ended. `missed_pace`: its contract broke while it ran, by the time per token."""

    at: float
    tier: str
    attained: bool
    missed_pace: bool = False


@dataclass(frozen=True, slots=True)
class CapChange:
    """For the log and the console: how many may run from now on, and why."""

    at: float
    before: int
    after: int
    cause: str


@dataclass(slots=True)
class Tally:
    """Completions of a tier in the window, those that were not attained, and those that missed their pace."""

    ended: int = 0
    missed: int = 0
    slow: int = 0

    def count(self, completion: Completion, number: int) -> None:
        self.ended += number
        self.missed += 0 if completion.attained else number
        self.slow += number if completion.missed_pace else 0


@dataclass(frozen=True, slots=True)
class Load:
    """What the controller looks at besides completions. Seconds, recomputes a second, a share 0..1."""

    step_mean: float
    recomputes: float
    busy: float
    backlog: bool


class Controller:
    """`cap` is the number of sequences that may run; it moves between 1 and `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.cap = most
        self._completions: deque[Completion] = deque()
        self._tallies: defaultdict[str, Tally] = defaultdict(Tally)  # of these, by tier
        self._next_tick = 0.0
        self._rest_until = 0.0
        self._good_ticks = 0
        self._recomputing = False

    def resize(self, most: int) -> None:
        """The engine or the operator's cap has changed. A cap that nothing had shrunk follows it."""
        self.cap = most if self.cap == self.most else min(self.cap, most)
        self.most = most

    def completed(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._tallies[completion.tier].count(completion, 1)

    def tick(self, now: float, tiers: Mapping[str, TierSpec], load: Load) -> CapChange | None:
        """Once a second: change the cap or not. Answers a change."""
        if now < self._next_tick:
            return None
        if self._next_tick and now - self._next_tick > WINDOW:
            self.cap = self.most  # after a pause nothing that was learned is known to hold
        self._next_tick = now + TICK
        while self._completions and self._completions[0].at < now - WINDOW:
            old = self._completions.popleft()
            self._tallies[old.tier].count(old, -1)
        self._recomputing = load.recomputes > (LOW_RECOMPUTES if self._recomputing else HIGH_RECOMPUTES)
        if now < self._rest_until:
            return None
        cause = self._too_much(tiers, load)
        if cause is not None:
            return self._set(max(1, int(self.cap * SHRINK)), cause, now)
        self._good_ticks = self._good_ticks + 1 if self._may_grow(tiers, load) else 0
        if self._good_ticks >= GROW_TICKS:
            return self._set(min(self.cap + 1, self.most), "all that run keep their pace and some wait", now)
        return None

    def _set(self, cap: int, cause: str, now: float) -> CapChange | None:
        self._good_ticks = 0
        if cap == self.cap:
            return None
        change = CapChange(now, self.cap, cap, cause)
        self.cap = cap
        self._rest_until = now + DWELL
        return change

    def _too_much(self, tiers: Mapping[str, TierSpec], load: Load) -> str | None:
        if load.step_mean > HIGH_PACE * self._tightest(tiers):
            return "steps are as long as the tightest pace allows"
        if self._recomputing:
            return "the engine takes memory back from running requests"
        for name, tier in tiers.items():
            tally = self._tallies[name]
            if tally.ended < MIN_COMPLETIONS or tally.slow < MIN_MISSES or tally.slow * 2 <= tally.missed:
                continue
            if wilson_upper(tally.ended - tally.missed, tally.ended) < tier.objective:
                return f"tier {name} misses its objective by its pace"
        return None

    def _may_grow(self, tiers: Mapping[str, TierSpec], load: Load) -> bool:
        if self.cap >= self.most or load.step_mean >= LOW_PACE * self._tightest(tiers):
            return False
        for name, tier in tiers.items():
            # Misses in the queue do not count: a batch that is too small makes them, and would stay small for them.
            tally = self._tallies[name]
            if tally.ended and (tally.ended - tally.slow) / tally.ended < tier.objective:
                return False
        return load.backlog or load.busy < IDLE_BUSY

    def _tightest(self, tiers: Mapping[str, TierSpec]) -> float:
        """The shortest time per token that was promised to a tier which is being served."""
        return min((tier.tpot for name, tier in tiers.items() if self._tallies[name].ended), default=math.inf)
