"""A policy that fails is replaced within the decision, and nothing that waits is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core import policies
from scheduler.core.batcher import InFlight
from scheduler.core.books import Books
from scheduler.core.guard import SLOW_SECONDS, STUCK_SECONDS, PolicyReplaced
from scheduler.core.planner import Planner
from scheduler.core.policies import Blocked, Candidate, Policy
from scheduler.core.types import (
    Dispatch,
    Expire,
    Outcome,
    PolicyConfig,
    PoolCapacity,
    Reason,
    Refusal,
    Request,
    TierSpec,
)
from tests.core.cast import TIERS, dispatched, request
from tests.laws import laws

ROOMY = PoolCapacity(max_seqs=2, step_tokens=512, kv_tokens=64_000, block_size=16, max_model_len=4096)
DONE = Outcome(completion_tokens=10)
FAULTS = (
    *("key", "nan", "admit", "stranger", "due", "overdue", "window_end", "deciding", "candidates", "between", "ghost"),
    *("dispatched", "ended", "next_wakeup"),
)


@dataclass
class Plan:
    """What goes wrong, from which call on; and the CPU seconds that calls burn."""

    fault: str = ""
    good_calls: int = 0
    slow_call: str = "candidates"
    burns: list[float] = field(default_factory=list)  # CPU seconds of its calls; the last figure goes on
    cpu: float = 0.0
    passes: int = 0

    def comes(self, fault: str) -> bool:
        if fault != self.fault:
            return False
        self.good_calls -= 1
        return self.good_calls < 0

    def check(self, fault: str) -> None:
        """The call of that name is made."""
        if fault == self.slow_call and self.burns:
            self.cpu += self.burns.pop(0) if len(self.burns) > 1 else self.burns[0]
        if self.comes(fault):
            raise RuntimeError(f"a fault in {fault}")

    def clock(self) -> float:
        return self.cpu


class Faulty(Policy):
    """First come, first served, and whatever the plan says."""

    def __init__(self, books: Books, plan: Plan) -> None:
        super().__init__(books)
        self.plan = plan

    def key(self, request: Request) -> float:
        self.plan.check("key")
        return float("nan") if self.plan.comes("nan") else request.arrival

    def admit(self, request: Request, now: float) -> Request | Refusal:
        self.plan.check("admit")
        return STRANGER if self.plan.comes("stranger") else request

    def due(self, request: Request) -> float:
        self.plan.check("due")
        return request.arrival + 1.0

    def overdue(self, request: Request, now: float) -> None:
        self.plan.check("overdue")

    def window_end(self) -> None:
        self.plan.check("window_end")

    def deciding(self, now: float) -> None:
        self.plan.check("deciding")

    def candidates(self, now: float) -> Iterator[Candidate | Blocked]:
        self.plan.passes += 1
        self.plan.check("candidates")
        if self.plan.comes("ghost"):
            yield Candidate(STRANGER, Reason.ARRIVAL_ORDER)
        head = self.oldest()
        if head is not None:
            yield Blocked(head, Reason.KV_FULL)
            self.plan.check("between")
            yield Candidate(head, Reason.ARRIVAL_ORDER)

    def dispatched(self, request: Request, now: float) -> None:
        self.plan.check("dispatched")

    def ended(self, flight: InFlight, outcome: Outcome, now: float) -> None:
        self.plan.check("ended")

    def next_wakeup(self, now: float) -> None:
        self.plan.check("next_wakeup")


STRANGER = request("stranger")


def faulty_pool(plan: Plan, **others: Callable[[Books], Policy]) -> Planner:
    """A pool whose policy `faulty` follows the plan; `others` stand in for policies of the product."""
    with patch.dict(policies.POLICIES, {"faulty": lambda books: Faulty(books, plan), **others}):
        return Planner(ROOMY, TIERS, PolicyConfig(name="faulty"), cpu_clock=plan.clock)


def serve(pool: Planner, ids: list[str]) -> list[str]:
    """Let the requests arrive one by one and run everything; answers what ended, and how often."""
    ended: list[str] = []
    running: list[str] = []
    for n in range(3 * len(ids) + 3):
        now = float(n)
        if n < len(ids) and pool.arrive(request(ids[n], "gold", now, deadline=now + 1e3), now) is not None:
            ended.append(ids[n])
        for decision in pool.decide(now):
            if isinstance(decision, Dispatch):
                running.append(decision.request.id)
            elif isinstance(decision, Expire):
                ended.append(decision.request.id)
        pool.next_wakeup(now)
        if n % 2 and running:
            ended.append(running[0])
            pool.finished(running.pop(0), DONE, now)
    return ended


@laws(200)
@given(st.sampled_from(FAULTS), st.integers(0, 12))
def test_nothing_is_lost_wherever_a_policy_fails(fault: str, good_calls: int) -> None:
    """Every arrival ends once, whichever call of the policy raises or answers nonsense, and however late."""
    plan = Plan(fault, good_calls)
    ids = [f"r{n}" for n in range(6)]
    pool = faulty_pool(plan)
    assert sorted(serve(pool, ids)) == ids
    assert pool.waiting() == 0
    if plan.good_calls < 0:
        assert pool.policy == "batching_aware"
        assert [event.name for event in pool.take_events()] == ["faulty"]


def test_a_policy_that_raises_is_replaced_in_the_same_decision_and_the_operator_can_read_why() -> None:
    pool = faulty_pool(Plan("candidates"))
    pool.arrive(request("a"), 0.0)
    assert dispatched(pool.decide(0.0)) == ["a"]
    (event,) = pool.take_events()
    assert event == PolicyReplaced("faulty", "batching_aware", "RuntimeError('a fault in candidates')")
    assert list(pool.take_events()) == [], "an event is told once"


def test_what_waits_is_ordered_by_the_replacement() -> None:
    plan = Plan("candidates", good_calls=100)
    pool = faulty_pool(plan)
    for n in range(2):
        pool.arrive(request(f"running{n}"), 0.0)
    pool.decide(0.0)
    pool.arrive(request("first", "silver", 1.0, deadline=90.0), 1.0)
    pool.arrive(request("urgent", "silver", 2.0, deadline=80.0), 2.0)
    plan.good_calls = 0
    pool.finished("running0", DONE, 3.0)
    assert dispatched(pool.decide(3.0)) == ["urgent"]


def test_if_the_default_policy_fails_too_priority_takes_over() -> None:
    plan = Plan("candidates")
    pool = faulty_pool(plan, batching_aware=lambda books: Faulty(books, plan))
    pool.arrive(request("a"), 0.0)
    with patch.dict(policies.POLICIES, {"batching_aware": lambda books: Faulty(books, plan)}):
        assert dispatched(pool.decide(0.0)) == ["a"]
    assert [event.replacement for event in pool.take_events()] == ["batching_aware", "priority"]


def test_a_policy_that_cannot_even_be_made_is_replaced() -> None:
    def broken(books: Books) -> Policy:
        raise RuntimeError("no model")

    with patch.dict(policies.POLICIES, {"broken": broken}):
        pool = Planner(ROOMY, TIERS, PolicyConfig(name="broken"))
    assert pool.policy == "batching_aware"


def test_the_last_policy_is_not_replaced_and_its_bug_shows() -> None:
    plan = Plan("candidates")
    everyone = {name: lambda books: Faulty(books, plan) for name in ("faulty", "batching_aware", "priority")}
    with patch.dict(policies.POLICIES, everyone):
        pool = Planner(ROOMY, TIERS, PolicyConfig(name="faulty"))
        pool.arrive(request("a"), 0.0)
        with pytest.raises(RuntimeError, match="a fault in candidates"):
            pool.decide(0.0)


def test_a_change_of_configuration_gives_the_policy_another_try() -> None:
    plan = Plan("candidates")
    pool = faulty_pool(plan)
    pool.arrive(request("a"), 0.0)
    pool.decide(0.0)
    plan.fault = ""
    with patch.dict(policies.POLICIES, {"faulty": lambda books: Faulty(books, plan)}):
        pool.reconfigure(TIERS, PolicyConfig(name="faulty"), 1.0)
    assert pool.policy == "faulty"


def test_a_change_of_configuration_leaves_a_policy_that_works_in_place_with_what_it_has_learned() -> None:
    made: list[Books] = []

    def counted(books: Books) -> Policy:
        made.append(books)
        return Faulty(books, Plan())

    with patch.dict(policies.POLICIES, {"faulty": counted}):
        pool = Planner(ROOMY, TIERS, PolicyConfig(name="faulty"))
        pool.reconfigure(TIERS, PolicyConfig(name="faulty", max_batch=1), 1.0)
        assert len(made) == 1
        pool.reconfigure(TIERS, PolicyConfig(name="continuous"), 2.0)
        pool.reconfigure(TIERS, PolicyConfig(name="faulty"), 3.0)
    assert len(made) == 2


def test_the_degradation_level_outlives_a_change_of_tiers_but_not_its_policy() -> None:
    pool = Planner(ROOMY, TIERS, PolicyConfig(name="batching_aware"))
    pool.engine_failed(1.0, "it died")
    pool.reconfigure(TIERS | {"new": TierSpec("new", rank=4)}, PolicyConfig(name="batching_aware"), 2.0)
    assert pool.snapshot(2.0).level == 4
    pool.arrive(request("a", "gold", 2.0), 2.0)
    pool.decide(2.0)
    assert pool.snapshot(2.0).level == 4
    pool.reconfigure(TIERS, PolicyConfig(name="priority"), 3.0)
    assert pool.snapshot(3.0).level == 0, "nobody would take it back"


def test_an_unknown_policy_is_an_error_of_whoever_asks_for_it() -> None:
    with pytest.raises(ValueError, match="unknown policy 'nobody'"):
        Planner(ROOMY, TIERS, PolicyConfig(name="nobody"))


# --- slowness -------------------------------------------------------------------------------------------------------


def passes(pool: Planner, count: int) -> None:
    """So many decisions with one pass over the candidates each: the engine stays full."""
    for n in range(2):
        pool.arrive(request(f"running{n}"), 0.0)
    pool.decide(0.0)
    for n in range(count):
        pool.arrive(request(f"waits{n}", queue_deadline=1e9), 0.0)
        pool.decide(0.0)


def slow_pool(*burns: float, call: str = "candidates") -> Planner:
    """A full pool. From now on the n-th call of that kind burns so many CPU seconds; the last figure goes on."""
    plan = Plan()
    pool = faulty_pool(plan)
    passes(pool, 1)
    plan.burns, plan.slow_call = list(burns), call
    return pool


def choose(pool: Planner, id: str) -> None:
    pool.arrive(request(id, queue_deadline=1e9), 0.0)
    pool.decide(0.0)


SLOW = 1.2 * SLOW_SECONDS


def test_a_policy_that_is_too_slow_is_replaced_within_the_decision_that_it_slows_down() -> None:
    pool = slow_pool(SLOW)
    choose(pool, "a")
    assert pool.policy == "batching_aware"
    (event,) = pool.take_events()
    assert event == PolicyReplaced("faulty", "batching_aware", "candidates took 6.0 ms of CPU")


@pytest.mark.parametrize("slow", [1, 2])
def test_what_befalls_a_single_pass_does_not_cost_the_pool_its_policy(slow: int) -> None:
    pool = slow_pool(*[SLOW] * slow, 0.0)
    choose(pool, "a")
    assert pool.policy == "faulty"


def test_the_slow_passes_of_one_decision_are_not_held_against_the_next() -> None:
    pool = slow_pool(*[SLOW, SLOW, 0.0] * 5, 0.0)
    for n in range(5):
        choose(pool, f"a{n}")
    assert pool.policy == "faulty"


def test_what_a_slow_pass_has_offered_is_not_used() -> None:
    plan = Plan(burns=[SLOW, 0.0])
    pool = faulty_pool(plan)
    pool.arrive(request("a"), 0.0)
    assert dispatched(pool.decide(0.0)) == ["a"]
    assert plan.passes == 2


def test_one_choice_that_takes_ten_times_as_long_replaces_a_policy_at_once() -> None:
    pool = slow_pool(1.01 * STUCK_SECONDS, 0.0)
    choose(pool, "a")
    assert pool.policy == "batching_aware"


@pytest.mark.parametrize("call", ["key", "admit", "due", "deciding", "next_wakeup"])
def test_what_a_policy_is_told_counts_as_well(call: str) -> None:
    pool = slow_pool(SLOW, SLOW, 0.0, SLOW, SLOW, 0.0, SLOW, call=call)
    for n in range(40):
        choose(pool, f"a{n}")
        pool.next_wakeup(0.0)
    (event,) = pool.take_events()
    assert (pool.policy, event.cause) == ("batching_aware", f"{call} took 6.0 ms of CPU")


def test_an_endless_list_of_candidates_ends() -> None:
    plan = Plan()

    class Endless(Policy):
        def candidates(self, now: float) -> Iterator[Candidate | Blocked]:
            while True:
                plan.cpu += 1e-4
                yield Blocked(self.books.queue.heads()[0], Reason.KV_FULL)

    with patch.dict(policies.POLICIES, {"faulty": Endless}):
        pool = Planner(ROOMY, TIERS, PolicyConfig(name="faulty"), cpu_clock=plan.clock)
    pool.arrive(request("a"), 0.0)
    assert dispatched(pool.decide(0.0)) == ["a"]


def test_the_last_policy_may_be_slow() -> None:
    plan = Plan(burns=[1.0])
    everyone = {name: lambda books: Faulty(books, plan) for name in ("faulty", "batching_aware", "priority")}
    with patch.dict(policies.POLICIES, everyone):
        pool = Planner(ROOMY, TIERS, PolicyConfig(name="faulty"), cpu_clock=plan.clock)
        pool.arrive(request("a"), 0.0)
        assert dispatched(pool.decide(0.0)) == ["a"]
    assert pool.policy == "priority"


def test_without_a_clock_nobody_is_too_slow() -> None:
    plan = Plan(burns=[1.0])
    with patch.dict(policies.POLICIES, {"faulty": lambda books: Faulty(books, plan)}):
        pool = Planner(ROOMY, TIERS, PolicyConfig(name="faulty"))
    choose(pool, "a")
    assert pool.policy == "faulty"
