"""A planner with a real step machine under it in virtual time, and books of its own to hold the planner against.

`Plant.play` runs a script of events; after every decision the invariants of `docs/scheduling.md` that can be seen at
one instant are asserted, the others are asserted by the tests on what `Plant` has recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from scheduler.core.controller import CapChange
from scheduler.core.degradation import LevelChange
from scheduler.core.guard import PolicyReplaced
from scheduler.core.lifecycle import State
from scheduler.core.planner import Planner
from scheduler.core.step_model import Coefficients
from scheduler.core.types import (
    Decision,
    Dispatch,
    Expire,
    OnInfeasible,
    Outcome,
    PolicyConfig,
    PoolCapacity,
    Preempt,
    Reason,
    Request,
    StepReport,
    TierSpec,
)
from scheduler.engines.simulated.machine import End, Machine, Sequence, StepCost

CAPACITY = PoolCapacity(max_seqs=8, step_tokens=128, kv_tokens=2048, block_size=16, max_model_len=512)
COST = StepCost(base=0.010, prefill_token=0.0004, decode_seq=0.0005, kv_token=2e-7)
TIERS = {
    "gold": TierSpec(
        "gold", 1, weight=60, floor=0.30, ttft=0.5, e2e=0.5, tpot=0.10, headroom=0.1, reserved_slots=0.125
    ),
    "silver": TierSpec(
        "silver", 2, weight=30, floor=0.15, ttft=2.0, e2e=2.0, tpot=0.15, headroom=0.2, reserved_slots=0.125,
        on_infeasible=OnInfeasible.REJECT, preemptible=True,
    ),
    "bronze": TierSpec(
        "bronze", 3, weight=10, floor=0.05, ttft=5.0, e2e=5.0, tpot=0.25, headroom=0.3,
        on_infeasible=OnInfeasible.REJECT, preemptible=True,
    ),
}  # fmt: skip


def coefficients(cost: StepCost, factor: float = 1.0) -> Coefficients:
    return (cost.base * factor, cost.prefill_token * factor, 0.0, cost.decode_seq * factor, cost.kv_token * factor)


@dataclass(frozen=True)
class Arrival:
    """One request of a script. `output`: what it will produce; `max_tokens`: what it asked for."""

    at: float
    tier: str
    prompt: int
    output: int
    max_tokens: int
    tenant: str = "t1"
    stream: bool = True
    cancel_after: float | None = None


@dataclass
class Fate:
    """What became of a request."""

    arrival: Arrival
    ends: list[str] = field(default_factory=list)  # exactly one in the end
    dispatches: list[tuple[float, Reason]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # cumulative counts as delivered
    evictions: int = 0
    deaths: int = 0  # of engines under it
    first: float | None = None
    last: float | None = None
    request: Request | None = None


@dataclass(frozen=True)
class Trouble:
    """What goes wrong while a script is played.

    Each is a tuple that begins with its instant. `deaths`: seconds until the engine is there again, empty. `stalls`:
    seconds that the running step takes longer. `pauses`: seconds in which the whole process does nothing. `changes`:
    tiers and policy. `slots`: the most sequences from then on. `belief`: predicted over true step time at the start.
    """

    deaths: tuple[tuple[float, float], ...] = ()
    stalls: tuple[tuple[float, float], ...] = ()
    pauses: tuple[tuple[float, float], ...] = ()
    changes: tuple[tuple[float, Mapping[str, TierSpec], PolicyConfig], ...] = ()
    slots: tuple[tuple[float, int], ...] = ()
    belief: float = 1.0


NO_TROUBLE = Trouble()


class Plant:
    """See the module text."""

    def __init__(
        self,
        arrivals: list[Arrival],
        policy: str = "batching_aware",
        tiers: Mapping[str, TierSpec] = TIERS,
        capacity: PoolCapacity = CAPACITY,
        cost: StepCost = COST,
        trouble: Trouble = NO_TROUBLE,
        observe: Callable[[Plant], None] = lambda plant: None,
    ) -> None:
        self.tiers = dict(tiers)
        self.engine = self.capacity = capacity  # what the engine has, and what of it may be used
        believed = coefficients(cost, trouble.belief)
        self.planner = Planner(capacity, tiers, PolicyConfig(name=policy), pool="plant", step_cost=believed)
        self.machine = Machine(capacity, cost)
        self.cost = cost
        self.now = 0.0
        self.busy = 0.0
        self.fates = {f"r{n}": Fate(arrival) for n, arrival in enumerate(arrivals)}
        self.log: list[tuple[float, Decision]] = []
        self.running: dict[str, Sequence] = {}
        self.evicting: str | None = None
        self.alive = True
        self.events: list[PolicyReplaced | LevelChange | CapChange] = []
        self._end: float | None = None
        self._begun = 0.0
        self._context = 0
        self._observe = observe  # called after every decision
        self._events = sorted(
            [(a.at, 0, n, "arrive", f"r{n}") for n, a in enumerate(arrivals)]
            + [
                (a.at + a.cancel_after, 1, n, "cancel", f"r{n}")
                for n, a in enumerate(arrivals)
                if a.cancel_after is not None
            ]
            + [(at, 2, n, "die", "") for n, (at, _) in enumerate(trouble.deaths)]
            + [(at + away, 3, n, "recover", "") for n, (at, away) in enumerate(trouble.deaths)]
            + [(at, 4, n, "stall", "") for n, (at, _) in enumerate(trouble.stalls)]
            + [(at, 5, n, "pause", "") for n, (at, _) in enumerate(trouble.pauses)]
            + [(at, 6, n, "change", "") for n, (at, _, _) in enumerate(trouble.changes)]
            + [(at, 7, n, "slots", "") for n, (at, _) in enumerate(trouble.slots)]
        )
        self._trouble = trouble

    def play(self, until: float = math.inf) -> Plant:
        """Run to the end (or to an instant)."""
        position = 0
        for _ in range(200_000):
            event = self._events[position] if position < len(self._events) else None
            wake = self._wakeup()
            outside = min(event[0] if event else math.inf, math.inf if wake is None else max(wake, self.now))
            if self._end is None and self.alive:
                self._begin()
            at = min(outside, math.inf if self._end is None else self._end)
            if at == math.inf or at > until:
                return self
            self.now = max(at, self.now)
            if self._end is not None and self._end <= outside:
                self._finish()
            elif event is not None and event[0] <= self.now:
                position += 1
                self._apply(event[3], event[4], event[2])
            self._decide()
        raise AssertionError("the plant does not come to rest")

    # --- events -----------------------------------------------------------------------------------------------------

    def _apply(self, kind: str, id: str, number: int) -> None:
        if kind == "arrive":
            self._arrive(id)
        elif kind == "cancel":
            self._cancel(id)
        elif kind == "die":
            self._die()
        elif kind == "recover":
            self._recover()
        elif kind == "stall":
            if self._end is not None:
                self._end += self._trouble.stalls[number][1]
        elif kind == "pause":
            self.now += self._trouble.pauses[number][1]
        elif kind == "slots":
            self.capacity = replace(self.engine, max_seqs=self._trouble.slots[number][1])
            self.planner.resize(self.capacity, self.now)
        else:
            _, tiers, policy = self._trouble.changes[number]
            self.tiers = self.tiers | dict(tiers)
            self.planner.reconfigure(tiers, policy, self.now)

    def _wakeup(self) -> float | None:
        """When the pump would ask again, if nothing happens. An engine that is away is looked for every 50 ms."""
        if not self.alive:
            return self.now + 0.05 if self.planner.waiting() else None
        return self.planner.next_wakeup(self.now)

    def _arrive(self, id: str) -> None:
        arrival = self.fates[id].arrival
        tier = self.tiers[arrival.tier]
        request = Request(
            id=id,
            tenant=arrival.tenant,
            tier=arrival.tier,
            arrival=self.now,
            prompt_tokens=arrival.prompt,
            max_tokens=arrival.max_tokens,
            stream=arrival.stream,
            deadline=tier.deadline(self.now, arrival.stream, arrival.max_tokens, None),
            queue_deadline=self.now + tier.queue_max_wait,
            resumable=True,
        )
        self.fates[id].request = request
        if self.planner.arrive(request, self.now) is not None:
            self.fates[id].ends.append("refused")

    def _cancel(self, id: str) -> None:
        state = self.planner.cancel(id, self.now)
        if state is State.QUEUED:
            self.fates[id].ends.append("cancelled")
        elif state is State.RUNNING:
            self.fates[id].ends.append("aborted")
            self._abort(id)

    def _abort(self, id: str) -> None:
        if self.machine.abort(id) is not None:
            self._left(id)

    def _die(self) -> None:
        """The engine dies with all that it runs: what can goes on with the next one, once."""
        if not self.alive:
            return
        self.alive, self._end = False, None
        self.machine = Machine(self.engine, self.cost)
        self.planner.engine_failed(self.now, "it died")
        for id in list(self.running):
            fate = self.fates[id]
            fate.deaths += 1
            del self.running[id]
            if fate.ends:  # it was being aborted
                self.planner.finished(id, Outcome(0, Reason.CLIENT_GONE), self.now)
            elif fate.deaths > 1:
                fate.ends.append("failed")
                self.planner.finished(id, Outcome(0, Reason.ENGINE_FAILED), self.now)
            else:
                fate.request = self.planner.evicted(id, self.now)
        self.evicting = None

    def _recover(self) -> None:
        if not self.alive:
            self.alive = True
            self.planner.resize(self.capacity, self.now)
            self.planner.engine_recovered(self.now)

    # --- the engine -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        seconds = self.machine.begin(self.now) if self.machine.running or self.machine.waiting else None
        if seconds is not None:
            self._begun, self._end = self.now, self.now + seconds
            self._context = sum(s.prompt_tokens + self.machine.tokens(s) for s in self.machine.running.values())

    def _finish(self) -> None:
        result = self.machine.finish(self.now)
        self.busy += self.now - self._begun
        self._end = None
        self.planner.step(
            StepReport(
                self.now, self.now - self._begun, result.prefill_tokens, result.decode_seqs, len(self.machine.running),
                len(self.machine.waiting), self.machine.kv_usage, result.preemptions, self._context,
            )
        )  # fmt: skip
        ended = {sequence.id for sequence in result.ended}
        for id, sequence in list(self.running.items()):
            self._deliver(id, sequence)
            if id in ended:
                fate = self.fates[id]
                fate.last = self.now
                if not fate.ends:
                    fate.ends.append("finished")
                self._gone(id, Outcome(fate.tokens[-1]))
        for sequence in result.freed:
            self._left(sequence.id)

    def _deliver(self, id: str, sequence: Sequence) -> None:
        fate = self.fates[id]
        already = fate.arrival.output - sequence.target
        produced = already + self.machine.tokens(sequence)
        if fate.ends or id == self.evicting or (fate.tokens and produced <= fate.tokens[-1]) or not produced:
            return
        assert produced == (fate.tokens[-1] if fate.tokens else 0) + 1, "tokens are delivered one by one, without a gap"
        fate.tokens.append(produced)
        if fate.first is None:
            fate.first = self.now
        self.planner.progress(id, self.machine.tokens(sequence), self.now)

    def _left(self, id: str) -> None:
        """An aborted sequence has left the machine."""
        if id == self.evicting and not self.fates[id].ends:
            self.evicting = None
            del self.running[id]
            self.fates[id].request = self.planner.evicted(id, self.now)
            return
        self._gone(id, Outcome(0, Reason.CLIENT_GONE))

    def _gone(self, id: str, outcome: Outcome) -> None:
        if self.evicting == id:
            self.evicting = None
        del self.running[id]
        self.planner.finished(id, outcome, self.now)

    # --- decisions --------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        decisions = self.planner.decide(self.now) if self.alive else self.planner.overdue(self.now)
        for decision in decisions:
            self.log.append((self.now, decision))
            if isinstance(decision, Dispatch):
                self._dispatch(decision)
            elif isinstance(decision, Expire):
                self.fates[decision.request.id].ends.append("expired")
            elif isinstance(decision, Preempt):
                self.evicting = decision.request.id
                self.fates[decision.request.id].evictions += 1
                self._abort(decision.request.id)
        self.events += self.planner.take_events()
        self._check()
        self._observe(self)

    def _dispatch(self, decision: Dispatch) -> None:
        request, fate = decision.request, self.fates[decision.request.id]
        produced = fate.tokens[-1] if fate.tokens else 0
        assert request.prompt_tokens == fate.arrival.prompt + produced
        sequence = Sequence(
            request.id,
            request.prompt_tokens,
            min(fate.arrival.output - produced, request.max_tokens),
            End.LENGTH,
            decision.engine_priority,
            request.arrival,
        )
        fate.dispatches.append((self.now, decision.reason))
        self.running[request.id] = sequence
        self.machine.add(sequence)
        assert len(self.running) <= self.planner.books.batcher.cap, "in flight is within the cap at each dispatch"

    def _check(self) -> None:
        """The in-flight table is the engine's truth; one reservation at most; virtual time never falls."""
        books = self.planner.books
        assert set(self.running) == {flight.request.id for flight in books.batcher.running()}
        assert self.planner.waiting() == sum(books.queue.length(tier) for tier in books.tiers)
        for id, sequence in self.running.items():
            flight = books.batcher.get(id)
            assert flight is not None
            if id != self.evicting and not self.fates[id].ends:
                assert flight.tokens == self.machine.tokens(sequence)


# --- loads, and what came of them -----------------------------------------------------------------------------------


def flood(
    tier: str, rate: float, seconds: float, tenant: str = "t1", prompt: int = 60, output: int = 20
) -> list[Arrival]:
    """Even arrivals of one tier."""
    return [Arrival(n / rate, tier, prompt, output, output, tenant=tenant) for n in range(int(rate * seconds))]


def merged(*parts: list[Arrival]) -> list[Arrival]:
    return sorted((arrival for part in parts for arrival in part), key=lambda arrival: arrival.at)


def rounds(rates: Mapping[str, float], seconds: float, prompt: int, output: int) -> list[Arrival]:
    """All tiers at their rates, one tenant each."""
    return merged(*(flood(tier, rate, seconds, prompt=prompt, output=output) for tier, rate in rates.items()))


def received(plant: Plant) -> dict[str, float]:
    """Engine-seconds by tier."""
    return {name: account.own.meter.read() for name, account in plant.planner.books.service.tiers.items()}


def value(plant: Plant) -> float:
    """Attained requests weighted by tier weight, over all."""
    won = total = 0.0
    for fate in plant.fates.values():
        tier = TIERS[fate.arrival.tier]
        total += tier.weight
        if fate.ends == ["finished"] and fate.first is not None and fate.last is not None:
            pace = (fate.last - fate.first) / max(fate.arrival.output - 1, 1)
            won += tier.weight * (fate.first - fate.arrival.at <= tier.ttft and pace <= tier.tpot)
    return won / total
