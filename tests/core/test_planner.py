from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from scheduler.core import policies
from scheduler.core.lifecycle import IllegalTransition, State
from scheduler.core.planner import QUEUE_BYTES
from scheduler.core.policies import Blocked, Candidate, Evict, Offer, Policy
from scheduler.core.types import (
    Dispatch,
    Expire,
    Hold,
    Outcome,
    PolicyConfig,
    PoolCapacity,
    Preempt,
    Reason,
    StepReport,
)
from tests.core.cast import CAPACITY, TIERS, dispatched, planner, request

DONE = Outcome(completion_tokens=10)


def test_requests_run_in_order_of_arrival_under_continuous() -> None:
    pool = planner("continuous")
    for id, tier, at in [("a", "bronze", 0.0), ("b", "gold", 0.1), ("c", "silver", 0.2)]:
        assert pool.arrive(request(id, tier, at), at) is None
    assert dispatched(pool.decide(0.3)) == ["a", "b"]
    pool.finished("a", DONE, 1.0)
    assert dispatched(pool.decide(1.0)) == ["c"]


def test_the_best_rank_runs_first_under_priority() -> None:
    pool = planner("priority")
    for id, tier, at in [("a", "bronze", 0.0), ("b", "silver", 0.1), ("c", "gold", 0.2)]:
        pool.arrive(request(id, tier, at), at)
    assert dispatched(pool.decide(0.3)) == ["c", "b"]


def test_requests_of_one_decision_share_a_batch_and_the_next_decision_has_another() -> None:
    pool = planner()
    pool.arrive(request("a"), 0.0)
    pool.arrive(request("b"), 0.0)
    pool.arrive(request("c"), 0.0)
    first = [d for d in pool.decide(0.0) if isinstance(d, Dispatch)]
    pool.finished("a", DONE, 1.0)
    second = [d for d in pool.decide(1.0) if isinstance(d, Dispatch)]
    assert len({d.batch_id for d in first}) == 1
    assert second[0].batch_id != first[0].batch_id


def test_the_engine_priority_orders_by_deadline() -> None:
    pool = planner()
    pool.arrive(request("late", "bronze"), 0.0)
    pool.arrive(request("soon", "gold"), 0.0)
    late, soon = (d for d in pool.decide(0.0) if isinstance(d, Dispatch))
    assert soon.engine_priority < late.engine_priority


def test_a_full_batch_holds_the_head_and_says_why() -> None:
    pool = planner()
    for id in "abc":
        pool.arrive(request(id), 0.0)
    holds = [d for d in pool.decide(0.0) if isinstance(d, Hold)]
    assert [(hold.request.id, hold.reason) for hold in holds] == [("c", Reason.SLOTS_FULL)]


def test_a_head_behind_the_ranked_one_is_told_so() -> None:
    pool = planner("priority", max_batch=1)
    pool.arrive(request("x", "gold"), 0.0)
    pool.decide(0.0)
    pool.arrive(request("a", "gold"), 0.0)
    pool.arrive(request("b", "bronze"), 0.0)
    reasons = {d.request.id: d.reason for d in pool.decide(0.1) if isinstance(d, Hold)}
    assert reasons == {"a": Reason.SLOTS_FULL, "b": Reason.RANKED_BEHIND}


def test_memory_that_runs_out_holds_the_head_until_a_request_leaves() -> None:
    pool = planner(capacity=PoolCapacity(max_seqs=8, step_tokens=64, kv_tokens=64, block_size=16, max_model_len=64))
    pool.arrive(request("a", prompt_tokens=40), 0.0)
    pool.arrive(request("b", prompt_tokens=40), 0.0)
    decisions = pool.decide(0.0)
    assert dispatched(decisions) == ["a"]
    assert [d.reason for d in decisions if isinstance(d, Hold)] == [Reason.KV_FULL]
    pool.finished("a", DONE, 1.0)
    assert dispatched(pool.decide(1.0)) == ["b"]


def test_produced_tokens_count_as_memory() -> None:
    pool = planner(capacity=PoolCapacity(max_seqs=8, step_tokens=64, kv_tokens=64, block_size=16, max_model_len=64))
    pool.arrive(request("a", prompt_tokens=10, max_tokens=40), 0.0)
    pool.decide(0.0)
    pool.progress("a", 39, 1.0)
    pool.arrive(request("b", prompt_tokens=10), 1.0)
    assert dispatched(pool.decide(1.0)) == []


def test_a_request_alone_always_runs_if_it_can_fit_at_all() -> None:
    pool = planner(capacity=PoolCapacity(max_seqs=8, step_tokens=64, kv_tokens=64, block_size=16, max_model_len=64))
    pool.arrive(request("a", prompt_tokens=63, max_tokens=1), 0.0)
    assert dispatched(pool.decide(0.0)) == ["a"]


@pytest.mark.parametrize(
    ("capacity", "reason"),
    [(CAPACITY, Reason.CONTEXT_LENGTH), (replace(CAPACITY, max_model_len=4096), Reason.NEVER_FITS)],
)
def test_what_can_never_fit_is_refused_without_retry(capacity: PoolCapacity, reason: Reason) -> None:
    refusal = planner(capacity=capacity).arrive(request("a", prompt_tokens=300, max_tokens=100), 0.0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == (reason, None)


def test_a_full_queue_refuses_with_the_time_until_half_of_it_has_gone() -> None:
    pool = planner(max_batch=1)
    for n in range(8):
        pool.arrive(request(f"warm{n}", "bronze", float(n)), float(n))
        pool.decide(float(n))
        pool.finished(f"warm{n}", DONE, float(n))
    pool.arrive(request("running", "bronze", 8.0), 8.0)
    pool.decide(8.0)
    for n in range(3):
        assert pool.arrive(request(f"waits{n}", "bronze", 8.0), 8.0) is None
    refusal = pool.arrive(request("late", "bronze", 8.0), 8.0)
    assert refusal is not None
    assert refusal.reason is Reason.QUEUE_FULL
    assert refusal.retry_after == pytest.approx(1.5)  # one dispatch a second, three waiting


def test_the_expected_wait_is_the_queue_at_the_pace_since_it_began() -> None:
    pool = planner(max_batch=1)
    assert pool.expected_wait("bronze", 0.0) == 0.0
    pool.arrive(request("first", "bronze", 0.0), 0.0)
    assert pool.expected_wait("bronze", 0.0) is None  # nobody knows: nothing has ever been dispatched
    pool.decide(0.0)
    pool.finished("first", DONE, 0.0)
    for n in range(3):
        pool.arrive(request(f"{n}", "bronze", 1000.0), 1000.0)
    for n, at in enumerate((1000.0, 1002.0)):
        pool.decide(at)
        pool.finished(f"{n}", DONE, at)
    assert pool.expected_wait("bronze", 1002.0) == pytest.approx(2.0)  # the long pause before is no part of the pace
    assert pool.expected_wait("gold", 1002.0) == 0.0


def test_prompts_that_wait_in_a_tier_take_bounded_memory() -> None:
    pool = planner(max_batch=1)
    half = QUEUE_BYTES // 2
    for id in ("runs", "a", "b"):
        assert pool.arrive(request(id, prompt_bytes=half), 0.0) is None
        pool.decide(0.0)
    refusal = pool.arrive(request("c", prompt_bytes=half), 0.0)
    assert refusal is not None and refusal.reason is Reason.QUEUE_FULL
    assert pool.arrive(request("other", "gold", prompt_bytes=half), 0.0) is None  # a tier's flood is its own
    pool.cancel("a", 0.0)
    assert pool.arrive(request("c", prompt_bytes=half), 0.0) is None


def test_a_prompt_that_waits_alone_may_take_any_memory() -> None:
    assert planner().arrive(request("a", prompt_bytes=2 * QUEUE_BYTES), 0.0) is None


def test_a_request_that_waits_too_long_expires_at_its_instant_and_not_before() -> None:
    pool = planner(max_batch=1)
    pool.arrive(request("a"), 0.0)
    pool.decide(0.0)
    pool.arrive(request("b", queue_deadline=5.0), 0.0)
    assert pool.next_wakeup(0.0) == 5.0
    assert not [d for d in pool.decide(4.999) if isinstance(d, Expire)]
    expired = [d for d in pool.decide(5.0) if isinstance(d, Expire)]
    assert [(d.request.id, d.reason) for d in expired] == [("b", Reason.QUEUE_TIMEOUT)]
    assert pool.cancel("b", 5.0) is State.UNKNOWN


def test_cancel_removes_a_waiting_request_and_leaves_a_running_one_to_the_engine() -> None:
    pool = planner(max_batch=1)
    pool.arrive(request("a"), 0.0)
    pool.decide(0.0)
    pool.arrive(request("b"), 0.0)
    assert pool.cancel("b", 0.1) is State.QUEUED
    assert pool.cancel("a", 0.1) is State.RUNNING
    assert pool.snapshot(0.1).in_flight == 1
    pool.finished("a", DONE, 0.2)
    assert pool.snapshot(0.2).in_flight == 0


def test_a_slot_is_released_once() -> None:
    pool = planner()
    pool.arrive(request("a"), 0.0)
    pool.decide(0.0)
    pool.finished("a", DONE, 1.0)
    with pytest.raises(IllegalTransition):
        pool.finished("a", DONE, 1.0)


def test_an_id_that_is_alive_cannot_arrive_again() -> None:
    pool = planner()
    pool.arrive(request("a"), 0.0)
    with pytest.raises(IllegalTransition):
        pool.arrive(request("a"), 0.0)


def test_switching_the_policy_loses_nothing_and_takes_effect_at_once() -> None:
    pool = planner("continuous", replace(CAPACITY, max_seqs=3), max_batch=1)
    pool.arrive(request("running"), 0.0)
    pool.decide(0.0)
    pool.arrive(request("a", "bronze", 0.1), 0.1)
    pool.arrive(request("b", "gold", 0.2), 0.2)
    pool.reconfigure(TIERS, PolicyConfig(name="priority", max_batch=3), 0.3)
    assert dispatched(pool.decide(0.3)) == ["b", "a"]


def test_lowering_the_batch_cap_lets_running_requests_end() -> None:
    pool = planner(max_batch=2)
    for id in "abc":
        pool.arrive(request(id), 0.0)
    pool.decide(0.0)
    pool.reconfigure(TIERS, PolicyConfig(name="continuous", max_batch=1), 0.1)
    pool.finished("a", DONE, 0.2)
    assert dispatched(pool.decide(0.2)) == []
    pool.finished("b", DONE, 0.3)
    assert dispatched(pool.decide(0.3)) == ["c"]


def test_a_tier_that_is_removed_keeps_its_waiting_requests() -> None:
    pool = planner("priority", max_batch=1)
    pool.arrive(request("running"), 0.0)
    pool.decide(0.0)
    pool.arrive(request("a", "bronze"), 0.0)
    tiers = {name: spec for name, spec in TIERS.items() if name != "bronze"}
    pool.reconfigure(tiers, PolicyConfig(name="priority", max_batch=1), 0.1)
    pool.finished("running", DONE, 0.2)
    assert dispatched(pool.decide(0.2)) == ["a"]
    pool.finished("a", DONE, 0.3)
    pool.reconfigure(tiers, PolicyConfig(name="priority"), 0.4)
    with pytest.raises(KeyError):
        pool.effective_tier("bronze", None)


@pytest.mark.parametrize(
    ("own", "priority", "effective"),
    [
        ("silver", None, "silver"),
        ("silver", "high", "silver"),
        ("silver", "normal", "silver"),
        ("silver", "low", "bronze"),
        ("gold", "normal", "silver"),
        ("bronze", "high", "bronze"),
    ],
)
def test_priority_may_lower_a_request_but_never_raise_it(own: str, priority: str | None, effective: str) -> None:
    assert planner().effective_tier(own, priority).name == effective


def test_an_idle_engine_waits_for_company_only_inside_the_window() -> None:
    pool = planner(max_wait_ms=50.0)
    pool.arrive(request("a"), 0.0)
    assert [d.reason for d in pool.decide(0.0) if isinstance(d, Hold)] == [Reason.WAIT_WINDOW]
    assert pool.next_wakeup(0.0) == pytest.approx(0.05)
    assert dispatched(pool.decide(0.05)) == ["a"]


def test_a_full_batch_does_not_wait_for_company() -> None:
    pool = planner(max_wait_ms=50.0)
    pool.arrive(request("a"), 0.0)
    pool.arrive(request("b"), 0.0)
    assert dispatched(pool.decide(0.0)) == ["a", "b"]


def test_draining_empties_the_queue_and_leaves_what_runs() -> None:
    pool = planner(max_batch=1)
    for id in "abc":
        pool.arrive(request(id), 0.0)
    pool.decide(0.0)
    assert [waiting.id for waiting in pool.drain(0.1)] == ["b", "c"]
    assert pool.snapshot(0.1).in_flight == 1
    assert pool.cancel("b", 0.1) is State.UNKNOWN


def test_the_snapshot_counts_by_tier_and_shows_the_oldest_wait() -> None:
    pool = planner(max_batch=1)
    pool.arrive(request("a", "gold", 0.0), 0.0)
    pool.decide(0.0)
    pool.arrive(request("b", "bronze", 1.0), 1.0)
    pool.arrive(request("c", "bronze", 2.0), 2.0)
    snapshot = pool.snapshot(4.0)
    assert (snapshot.tiers["gold"].running, snapshot.tiers["gold"].waiting) == (1, 0)
    assert (snapshot.tiers["bronze"].waiting, snapshot.tiers["bronze"].oldest_wait) == (2, 3.0)
    assert snapshot.tiers["silver"].waiting == 0


def test_a_dead_engine_is_level_four_until_a_minute_after_it_is_back() -> None:
    pool = planner("batching_aware")
    pool.engine_failed(1.0, "it died")
    pool.decide(1.0)
    assert pool.snapshot(1.0).level == 4
    pool.engine_recovered(5.0)
    pool.decide(64.0)
    assert pool.snapshot(64.0).level == 4
    pool.decide(66.0)
    assert pool.snapshot(66.0).level == 0
    assert [(change.before, change.after) for change in pool.take_events()] == [(0, 4), (4, 0)]


def test_while_nothing_can_be_dispatched_waiting_still_ends() -> None:
    pool = planner()
    pool.arrive(request("a", queue_deadline=5.0), 0.0)
    assert pool.overdue(4.0) == []
    (end,) = pool.overdue(5.0)
    assert isinstance(end, Expire)
    assert end.reason is Reason.QUEUE_TIMEOUT


def test_what_a_running_request_is_charged_can_be_asked_before_it_ends() -> None:
    pool = planner()
    pool.arrive(request("a"), 0.0)
    pool.decide(0.0)
    pool.step(StepReport(at=0.1, elapsed=0.1, prefill_tokens=10, decode_seqs=0, running=1, waiting=0, kv_usage=0.1))
    assert pool.meter("a")() == pytest.approx(0.1)


class Evicting(Policy):
    """Has the first that runs make place for the head of gold, and offers what waits in silver meanwhile."""

    def candidates(self, now: float) -> Iterator[Offer]:
        for head in self.books.queue.heads():
            if head.tier == "silver":
                yield Candidate(head, Reason.FAIR_TURN)
                continue
            yield Blocked(head, Reason.SLOTS_FULL)
            if self.books.evicting is None:
                yield Evict(head, self.books.batcher.running()[0].request)


def test_an_eviction_is_carried_out_also_if_another_request_is_dispatched_in_the_same_decision() -> None:
    with patch.dict(policies.POLICIES, {"evicting": Evicting}):
        pool = planner("evicting")
    pool.arrive(request("runs", "silver"), 0.0)
    pool.decide(0.0)
    pool.arrive(request("urgent", "gold", 1.0), 1.0)
    pool.arrive(request("passes", "silver", 1.0), 1.0)
    decisions = pool.decide(1.0)
    assert dispatched(decisions) == ["passes"]
    assert [(d.request.id, d.beneficiary.id) for d in decisions if isinstance(d, Preempt)] == [("runs", "urgent")]
