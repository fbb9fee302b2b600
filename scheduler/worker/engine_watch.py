"""Whether an engine does what engines do: make steps while it has something to do, and take in what it is given.

Two troubles are seen from outside. *Silence*: no step and no token for five times the predicted step, and for no less
than ten seconds, while something runs; such an engine is dead. *Crowding*: the engine's own queue, in which nobody can
be put before another any more, holds more than two requests for three steps; nothing is dispatched until it holds one
at most. A policy that hands over more than a step can hold crowds the engine again as soon as it may: crowdings less
than ten seconds apart are one episode, and an episode is one alarm.

After a death only a part of the engine is used, in case it was too much for it: half of its sequences and nine tenths
of its memory for each death, and a tenth more for every five minutes without another. The next engine is started with
the same part of its step, which it keeps for its life. With the third death within ten minutes somebody must look:
nothing more is given back until the deployment is changed or started anew.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from scheduler.core.types import PoolCapacity, StepReport

SILENT_STEPS = 5.0  # predicted steps
SILENT_SECONDS = 10.0  # and no less: a pause of the operating system is no death
CROWD = 2  # requests in the engine's own queue; more are too many
CROWDED_STEPS = 3
CLEARED = 1  # so few end a crowding: a queue between two and three would switch dispatching on and off
EPISODE_GAP = 10.0  # seconds without crowding that end an episode
DEATH_MEMORY = 600.0  # seconds
STABLE = 300.0  # seconds without a death, for each tenth that is given back
GIVEN_BACK = 0.1
LESS_MEMORY = 0.9
ALARM_DEATHS = 3  # within DEATH_MEMORY


class EngineWatch:
    """Of one engine, from its start to its end."""

    def __init__(self) -> None:
        self._alive_at: float | None = None  # None: it has nothing to do
        self._crowd_steps = 0  # in a row with too many in its queue
        self._crowded = False
        self._crowded_at = -math.inf  # when it was crowded last

    @property
    def crowded(self) -> bool:
        """Nothing may be dispatched: the engine does not keep up with what it has."""
        return self._crowded

    def stepped(self, report: StepReport) -> bool:
        """A step. True if an episode of crowding begins with it: the one alarm of that episode."""
        self._alive_at = report.at
        before = self._crowded
        self._crowd_steps = self._crowd_steps + 1 if report.waiting > CROWD else 0
        if self._crowd_steps >= CROWDED_STEPS:
            self._crowded = True
        elif report.waiting <= CLEARED:
            self._crowded = False
        if not self._crowded:
            return False
        begins = not before and report.at - self._crowded_at > EPISODE_GAP
        self._crowded_at = report.at
        return begins

    def alive(self, now: float) -> None:
        """A token has come."""
        self._alive_at = now

    def idle(self) -> None:
        """It has nothing to do: its silence means nothing, and its queue is empty whatever it said last."""
        self._alive_at = None
        self._crowd_steps = 0
        self._crowded = False

    def silence(self, now: float, step: float) -> float | None:
        """Seconds of silence, if that is too much for an engine whose next step should take `step` seconds."""
        if self._alive_at is None:
            self._alive_at = now
        silent = now - self._alive_at
        return silent if silent > max(SILENT_SECONDS, SILENT_STEPS * step) else None


class Caution:
    """How much of an engine is used, by how often it has died."""

    def __init__(self) -> None:
        self.alarmed = False
        self._share = 1.0  # of sequences and step
        self._memory = 1.0
        self._since = 0.0  # of the last change
        self._deaths: deque[float] = deque()  # of the last ten minutes

    def died(self, now: float) -> bool:
        """Another death. True if there are so many that somebody must look."""
        while self._deaths and self._deaths[0] < now - DEATH_MEMORY:
            self._deaths.popleft()
        self._deaths.append(now)
        self._share /= 2
        self._memory *= LESS_MEMORY
        self._since = now
        self.alarmed = self.alarmed or len(self._deaths) >= ALARM_DEATHS
        return self.alarmed

    def capacity(self, whole: PoolCapacity, now: float) -> PoolCapacity:
        """The part of `whole` that is used now. Whatever the model allows for one request still fits."""
        self._give_back(now)
        tokens = max(int(whole.kv_tokens * self._memory), min(whole.kv_tokens, whole.max_model_len))
        return replace(whole, max_seqs=max(int(whole.max_seqs * self._share), 1), kv_tokens=tokens)

    def step_tokens(self, whole: PoolCapacity, now: float) -> int | None:
        """With which step an engine is to be started whose own would be that of `whole`; None: with its own.

        Each of its sequences needs a token of the step.
        """
        self._give_back(now)
        return None if self._share >= 1.0 else max(int(whole.step_tokens * self._share), whole.max_seqs)

    def _give_back(self, now: float) -> None:
        while not self.alarmed and self._share < 1.0 and now - self._since >= STABLE:
            self._share = min(round(self._share + GIVEN_BACK, 6), 1.0)
            self._memory = min(self._memory + GIVEN_BACK, 1.0)
            self._since += STABLE
