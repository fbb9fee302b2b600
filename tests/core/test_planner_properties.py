"""Random workloads against the planner. Each test states its invariant in one line."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.lifecycle import State
from scheduler.core.types import Decision, Dispatch, Expire, Lane, Outcome, PolicyConfig, PoolCapacity
from tests.core.cast import TIERS, planner, request
from tests.laws import laws

CAPACITY = PoolCapacity(max_seqs=3, step_tokens=64, kv_tokens=256, block_size=16, max_model_len=200)

arrival = st.tuples(
    st.just("arrive"), st.sampled_from(sorted(TIERS)), st.integers(1, 120), st.integers(1, 60), st.sampled_from(Lane)
)
event = st.one_of(
    arrival,
    st.tuples(st.just("finish"), st.integers(0, 5)),
    st.tuples(st.just("progress"), st.integers(0, 5), st.integers(1, 60)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.floats(0.01, 30.0)),
    st.tuples(st.just("policy"), st.sampled_from(["continuous", "priority"]), st.integers(1, 4)),
)


@dataclass
class Run:
    """Drives one planner through an event log and keeps the books that it is checked against."""

    log: list[tuple]
    policy: str
    now: float = 0.0
    arrived: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    running: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def play(self) -> Run:
        self.pool = planner(self.policy, CAPACITY)
        self.cap = CAPACITY.max_seqs
        for step in self.log:
            self._apply(step)
            self._decide()
        self._finish_everything()
        return self

    def _apply(self, step: tuple) -> None:
        if step[0] == "arrive":
            _, tier, prompt, output, lane = step
            id = f"r{len(self.arrived)}"
            self.arrived.append(id)
            arriving = request(id, tier, self.now, prompt_tokens=prompt, max_tokens=output, lane=lane)
            if self.pool.arrive(arriving, self.now) is not None:
                self.refused.add(id)
        elif step[0] == "finish" and self.running:
            self._end(sorted(self.running)[step[1] % len(self.running)])
        elif step[0] == "progress" and self.running:
            self.pool.progress(sorted(self.running)[step[1] % len(self.running)], step[2], self.now)
        elif step[0] == "cancel" and self.arrived:
            self._cancel(self.arrived[step[1] % len(self.arrived)])
        elif step[0] == "wait":
            self.now += step[1]
        elif step[0] == "policy":
            self.cap = min(step[2], CAPACITY.max_seqs)
            self.pool.reconfigure(TIERS, PolicyConfig(name=step[1], max_batch=step[2]), self.now)

    def _cancel(self, id: str) -> None:
        state = self.pool.cancel(id, self.now)
        if state is State.QUEUED:
            self.ended.append(id)
        elif state is State.RUNNING:
            self._end(id)

    def _end(self, id: str) -> None:
        self.pool.finished(id, Outcome(1), self.now)
        del self.running[id]
        self.ended.append(id)

    def _decide(self) -> None:
        entering = False
        for decision in self.pool.decide(self.now):
            self.decisions.append(decision)
            if isinstance(decision, Dispatch):
                entering = True
                self.running[decision.request.id] = decision.request.prompt_tokens
            elif isinstance(decision, Expire):
                self.ended.append(decision.request.id)
        assert not entering or len(self.running) <= self.cap
        assert self.pool.snapshot(self.now).in_flight == len(self.running)

    def _finish_everything(self) -> None:
        for _ in range(len(self.log) + 1):
            for id in list(self.running):
                self._end(id)
            self._decide()


@laws(150)
@given(st.lists(event, max_size=60), st.sampled_from(["continuous", "priority"]))
def test_every_arrival_ends_in_exactly_one_way(log: list[tuple], policy: str) -> None:
    """Refused, expired, cancelled or finished: once each, and the pool is empty afterwards."""
    run = Run(log, policy).play()
    assert sorted([*run.ended, *run.refused]) == sorted(run.arrived)
    snapshot = run.pool.snapshot(run.now)
    assert snapshot.in_flight == 0
    assert snapshot.kv_reserved == 0
    assert all(tier.waiting == 0 for tier in snapshot.tiers.values())


@laws(100)
@given(st.lists(event, max_size=60), st.sampled_from(["continuous", "priority"]))
def test_the_same_event_log_gives_the_same_decisions(log: list[tuple], policy: str) -> None:
    """Two runs of one log decide alike, to the batch id."""
    assert Run(log, policy).play().decisions == Run(log, policy).play().decisions


@laws(100)
@given(st.lists(arrival, min_size=1, max_size=40))
def test_after_a_decision_the_best_head_cannot_enter(arrivals: list[tuple]) -> None:
    """Work-conserving: a second decision at the same instant, forced by a no-op change, dispatches nothing more."""
    pool = planner("priority", CAPACITY)
    for n, (_, tier, prompt, output, lane) in enumerate(arrivals):
        pool.arrive(request(f"r{n}", tier, float(n), prompt_tokens=prompt, max_tokens=output, lane=lane), float(n))
    pool.decide(50.0)
    pool.reconfigure(TIERS, PolicyConfig(name="priority"), 50.0)
    assert not [d for d in pool.decide(50.0) if isinstance(d, Dispatch)]
