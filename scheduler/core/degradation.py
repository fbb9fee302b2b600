"""The degradation ladder: what is given up, in which order, when load exceeds what can be promised.

Five levels. The driver is u, the larger of the forecast memory peak and of the predicted wait over the deadline of
every rank but the worst. A level is entered after u has been high for a while and left after it has been low for
longer; two changes never lie closer together than the dwell, except jumps up to levels 3 and 4. Only what was looked at
counts: after a pause in the looks the time begins anew.
"""

from __future__ import annotations

from dataclasses import dataclass

DWELL = 1.0  # seconds between two changes of level
PAUSE = 3.0  # seconds without a look, after which nothing is known of the time before
RECOMPUTES_PER_SECOND = 3.0
PROBE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Enter a level when u is above `enter` for `enter_for` seconds; leave it when below `leave` for `leave_for`."""

    level: int
    enter: float
    enter_for: float
    leave: float
    leave_for: float


DEFAULT_RULES = (
    Rule(1, enter=0.90, enter_for=2.0, leave=0.80, leave_for=10.0),
    Rule(2, enter=0.95, enter_for=1.0, leave=0.88, leave_for=10.0),
    Rule(3, enter=1.00, enter_for=0.0, leave=1.00, leave_for=10.0),
)


@dataclass(frozen=True, slots=True)
class Pressure:
    """What the ladder looks at: `peak` forecast memory over the pool, `wait` over deadline, recomputes a second."""

    peak: float
    wait: float
    recomputes: float = 0.0

    @property
    def u(self) -> float:
        return max(self.peak, self.wait)


@dataclass(frozen=True, slots=True)
class LevelChange:
    """For the log and the console: when, from where to where, and why."""

    at: float
    before: int
    after: int
    cause: str


class Ladder:
    """The level of one pool. `engine_failed` and `engine_recovered` move it to level 4 and back."""

    def __init__(self, rules: tuple[Rule, ...] = DEFAULT_RULES) -> None:
        self.level = 0
        self._rules = {rule.level: rule for rule in rules}
        self._high_since: dict[int, float] = {}
        self._low_since: float | None = None
        self._looked_at = float("-inf")
        self._changed_at = float("-inf")
        self._failed = False
        self._probe_ok_since: float | None = None

    def engine_failed(self, now: float, cause: str) -> LevelChange | None:
        """Out of memory, dead or without a step: nothing is promised any more."""
        self._failed, self._probe_ok_since = True, None
        return self._move(4, now, cause) if self.level != 4 else None

    def engine_recovered(self, now: float) -> None:
        """A probe succeeded; level 4 is left after a minute of that."""
        self._failed, self._probe_ok_since = False, now

    def update(self, now: float, pressure: Pressure) -> LevelChange | None:
        """Look at the pressure; answers a change of level."""
        if now - self._looked_at > PAUSE:
            self._forget()
        self._looked_at = now
        if self.level == 4:
            return self._leave_failure(now)
        wanted = self._wanted(now, pressure)
        if wanted > self.level:
            if wanted < 3 and now - self._changed_at < DWELL:
                return None
            return self._move(wanted, now, f"u {pressure.u:.2f}, recomputes {pressure.recomputes:.1f}/s")
        return self._descend(now, pressure)

    def _wanted(self, now: float, pressure: Pressure) -> int:
        wanted = 0
        for level, rule in self._rules.items():
            high = pressure.u > rule.enter if level < 3 else _overfull(pressure)
            if not high:
                self._high_since.pop(level, None)
                continue
            since = self._high_since.setdefault(level, now)
            if now - since >= rule.enter_for:
                wanted = max(wanted, level)
        return wanted

    def _descend(self, now: float, pressure: Pressure) -> LevelChange | None:
        if not self.level:
            return None
        rule = self._rules[self.level]
        low = pressure.u < rule.leave if self.level < 3 else not _overfull(pressure)
        if not low:
            self._low_since = None
            return None
        if self._low_since is None:
            self._low_since = now
        if now - self._low_since < rule.leave_for or now - self._changed_at < DWELL:
            return None
        return self._move(self.level - 1, now, f"u {pressure.u:.2f} for {rule.leave_for:.0f} s")

    def _leave_failure(self, now: float) -> LevelChange | None:
        if self._failed or self._probe_ok_since is None or now - self._probe_ok_since < PROBE_SECONDS:
            return None
        return self._move(0, now, "the engine has been well for a minute")

    def _move(self, level: int, now: float, cause: str) -> LevelChange:
        change = LevelChange(now, self.level, level, cause)
        self.level = level
        self._changed_at = now
        self._forget()
        return change

    def _forget(self) -> None:
        """The time at which u rose or fell counts from the next look."""
        self._low_since = None
        self._high_since.clear()


def _overfull(pressure: Pressure) -> bool:
    return pressure.peak > 1.0 or pressure.recomputes > RECOMPUTES_PER_SECOND
