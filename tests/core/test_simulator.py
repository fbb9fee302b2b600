"""Trace, workload, replay and figures, without the command line."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.policies.priority import Priority
from scheduler.core.service import FLOOR_CLAMP
from scheduler.core.types import Contract, Decision, PolicyConfig, Preempt, Reason, Request, TierSpec
from scheduler.simulator import replay as replay_module
from scheduler.simulator.engine_curve import EngineCurve
from scheduler.simulator.profiles import PROFILES, ProfileError, load_profile
from scheduler.simulator.replay import Record, Replay, ReplayError, replay
from scheduler.simulator.results import PolicyResult, attained, judge, percentile, water_fill
from scheduler.simulator.trace import TraceError, TraceRow, read_trace
from scheduler.simulator.workload import DEFAULT_TIERS, Demand, Workload, WorkloadError, build_workload
from tests.core.traces import chat_rows, write_trace

H100 = PROFILES["h100-8b"]
CPU = PROFILES["cpu-sim"]


def workload(rho: float | None = 1.0, count: int = 300, **demand: object) -> Workload:
    return build_workload(chat_rows(count), H100, DEFAULT_TIERS, Demand(rho=rho, **demand))  # type: ignore[arg-type]


def run(policy: str, rho: float, count: int) -> Replay:
    return replay(workload(rho, count), H100, PolicyConfig(name=policy))


# --- traces ---------------------------------------------------------------------------------------------------------


def test_rows_come_in_order_of_arrival_and_the_limit_counts_rows_of_the_file(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.csv.gz", [TraceRow(2, 5, 6), TraceRow(1, 7, 8), TraceRow(0, 1, 1)])
    assert read_trace(path, limit=2) == [TraceRow(1, 7, 8), TraceRow(2, 5, 6)]


def test_spread_arrivals_are_preferred_and_tenants_kept_and_plain_files_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,arrival_spread_s,prompt_tokens,output_tokens,tenant,source\n0,1.5,3,4,acme,x\n")
    assert read_trace(path) == [TraceRow(1.5, 3, 4, "acme")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "lacks the column arrival_s: its first line has nothing"),
        (b"arrival_s,prompt_tokens\n1,2\n", "lacks the column output_tokens"),
        (b"arrival_s,prompt_tokens,output_tokens\n", "has no requests"),
        (b"arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,x,2\n", "line 3: invalid literal"),
        (b"arrival_s,prompt_tokens,output_tokens\n0,1\n", "line 2"),
        (b"arrival_s,prompt_tokens,output_tokens\nnan,1,1\n", "no instant"),
        (b"arrival_s,prompt_tokens,output_tokens\n0,1,1\n1e308,1,1\n", "line 3: the arrival 1e\\+308 is no instant"),
        (b"arrival_s,prompt_tokens,output_tokens\n0,0,1\n", "at least one prompt token"),
        (b"arrival_s,prompt_tokens,output_tokens\n0,1,1" + 400 * b"0" + b"\n", "at most 1,000,000,000"),
        (b"\xff\xfe\x00garbage\x80", "cannot be read as a trace"),
        (b"\x1f\x8bno gzip after all", "cannot be read as a trace"),
        (
            gzip.compress(b"arrival_s,prompt_tokens,output_tokens\n" + b"0,1,1\n" * 999)[:-20],
            "cannot be read as a trace",
        ),
    ],
)
def test_what_is_no_trace_is_refused_with_the_place(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read_trace(path)


def test_a_trace_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfarrival_s,prompt_tokens,output_tokens\n0,3,4\n")
    assert read_trace(path) == [TraceRow(0.0, 3, 4)]


def test_a_missing_trace_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.csv"):
        read_trace(tmp_path / "absent.csv")


# --- profiles -------------------------------------------------------------------------------------------------------


def test_every_profile_says_where_its_figures_come_from() -> None:
    assert {"a10g-7b", "a100-8b", "h100-8b", "h200-8b", "h100-70b-tp4"} <= set(PROFILES)
    assert all(profile.basis for profile in PROFILES.values())


def test_a_profile_file_holds_the_options_of_a_simulated_engine(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("step: {base: 0.01, decode_seq: 0.001}\nmax_seqs: 4\n")
    profile = load_profile(str(path))
    assert (profile.name, profile.capacity.max_seqs, profile.cost.base, profile.derived) == ("mine", 4, 0.01, False)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max_sqs: 4", "max_sqs"),
        ("- 1", "must hold the options"),
        ("{", "cannot be read"),
        ("step: {}", "base must be"),
    ],
)
def test_a_bad_profile_file_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ProfileError, match=says):
        load_profile(str(path))


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ProfileError, match="h100-8b"):
        load_profile("h900")


# --- workload -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.5, 1.3])
def test_time_is_scaled_so_that_the_offered_work_is_rho_of_the_span(rho: float) -> None:
    made = workload(rho)
    assert sum(made.costs) / (made.requests[-1].arrival - made.requests[0].arrival) == pytest.approx(rho)
    assert made.rho == pytest.approx(rho)


def test_the_cost_of_a_request_follows_the_published_formula() -> None:
    rows = [TraceRow(0, 1000, 200), TraceRow(10, 1000, 200)]
    made = build_workload(rows, H100, DEFAULT_TIERS, Demand())
    batch = min(256, 0.8 * 400_000 / 1200)
    cost = 1000 * 27e-6 + 200 * 50e-6 + 200 * (1000 + 100) * 40e-9 + (200 + 1000 / 8192) * 0.007 / batch
    assert made.costs == pytest.approx((cost, cost))
    assert made.span == 10


def test_tiers_are_dealt_20_30_50_and_the_seed_alone_decides() -> None:
    counts = dict.fromkeys(DEFAULT_TIERS, 0)
    made = workload(count=4000)
    for request in made.requests:
        counts[request.tier] += 1
    assert [round(count / 4000, 1) for count in counts.values()] == [0.2, 0.3, 0.5]
    assert workload(count=50).requests == workload(count=50).requests
    assert [r.tier for r in workload(count=50).requests] == [r.tier for r in made.requests[:50]]
    assert [r.tier for r in workload(count=50, seed=2).requests] != [r.tier for r in made.requests[:50]]


def test_a_mix_of_one_tier_leaves_nothing_for_the_others() -> None:
    assert {request.tier for request in workload(mix=(0.0, 1.0, 0.0)).requests} == {"paid"}
    with pytest.raises(WorkloadError, match="share for each of the 3 tiers"):
        workload(mix=(0.5, 0.5))


def test_tenants_of_the_trace_are_kept_and_others_are_few_with_one_large() -> None:
    rows = [replace(row, tenant="acme") for row in chat_rows(3)]
    assert {r.tenant for r in build_workload(rows, H100, DEFAULT_TIERS, Demand()).requests} == {"acme"}
    drawn = [request.tenant for request in workload(count=2000).requests]
    assert len(set(drawn)) == 50
    assert 0.2 < drawn.count("tenant-01") / 2000 < 0.35


def test_lengths_are_scaled_and_cut_to_what_the_engine_takes() -> None:
    rows = [TraceRow(0, 100, 10), TraceRow(1, 90_000, 10), TraceRow(2, 10, 90_000)]
    made = build_workload(rows, CPU, DEFAULT_TIERS, Demand(length_scale=(0.5, 2.0)))
    assert [(r.prompt_tokens, r.max_tokens) for r in made.requests] == [(50, 20), (5980, 20), (1, 5999)]
    assert made.shortened == 2


def test_outputs_are_capped_by_the_tier_only_if_asked() -> None:
    rows = [TraceRow(0, 10, 900), TraceRow(1, 10, 900)]
    free = Demand(mix=(0, 0, 1))
    assert build_workload(rows, H100, DEFAULT_TIERS, free).requests[0].max_tokens == 900
    assert build_workload(rows, H100, DEFAULT_TIERS, replace(free, cap_outputs=True)).requests[0].max_tokens == 512


def test_unstreamed_requests_are_due_with_their_last_token() -> None:
    made = workload(stream_share=0.0, mix=(1, 0, 0))
    request = made.requests[5]
    assert not request.stream
    assert request.deadline == pytest.approx(request.arrival + 0.5 + (request.max_tokens - 1) * 0.10)


def test_rows_that_all_arrive_at_once_have_no_load() -> None:
    with pytest.raises(WorkloadError, match="same instant"):
        build_workload([TraceRow(1, 2, 3)], H100, DEFAULT_TIERS, Demand(rho=1.0))


# --- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["continuous", "priority"])
def test_every_request_ends_once_and_all_engine_time_is_accounted_for(policy: str) -> None:
    done = run(policy, rho=1.5, count=400)
    assert all((record.last_token is None) == (record.refusal is not None) for record in done.records)
    assert done.preemptions == 0
    assert sum(record.service for record in done.records) == pytest.approx(done.busy)
    assert done.timeline.total().busy == pytest.approx(done.busy)


def test_the_same_workload_gives_the_same_records() -> None:
    first, second = run("priority", 1.2, 300), run("priority", 1.2, 300)
    assert first.records == second.records


def test_a_lone_request_takes_one_prefill_step_and_then_a_step_a_token() -> None:
    rows = [TraceRow(0, 1000, 11), TraceRow(100, 1000, 11)]
    made = build_workload(rows, H100, DEFAULT_TIERS, Demand())
    record = replay(made, H100, PolicyConfig(name="continuous")).records[0]
    prefill = 0.007 + 1000 * 27e-6
    decode = 10 * (0.007 + 50e-6 + (1000 + 5.5) * 40e-9)
    assert record.first_token == pytest.approx(prefill)
    assert record.last_token == pytest.approx(prefill + decode)
    assert record.service == pytest.approx(prefill + decode)


class EvictingPlanner(replay_module.Planner):
    """Evicts each request once, when it has made ten tokens; at once if no step runs, else at the step's end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tokens: dict[str, int] = {}
        self.evicted_once: dict[str, Request] = {}

    def progress(self, request_id: str, tokens: int, now: float) -> None:
        super().progress(request_id, tokens, now)
        self._tokens[request_id] = tokens

    def decide(self, now: float) -> list[Decision]:
        decisions = super().decide(now)
        for flight in self.books.batcher.running():
            request = flight.request
            if not request.evictions and request.id not in self.evicted_once and self._tokens.get(request.id, 0) >= 10:
                self.evicted_once[request.id] = request
                decisions.append(Preempt(request, request))
        return decisions


def test_an_evicted_request_goes_on_where_it_was_and_its_time_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run("continuous", 1.2, 60)
    monkeypatch.setattr(replay_module, "Planner", EvictingPlanner)
    done = run("continuous", 1.2, 60)
    assert done.preemptions > 10
    assert all(record.last_token is not None for record in done.records)
    assert done.busy > plain.busy  # what it had made is computed again
    assert sum(record.service for record in done.records) == pytest.approx(done.busy)


def figures(policy: str, rho: float) -> PolicyResult:
    """On the small engine, where a few hundred requests are enough to fill every queue."""
    demand = Demand(rho=rho, length_scale=(1 / 8, 1 / 4))
    return judge(replay(build_workload(chat_rows(600), CPU, DEFAULT_TIERS, demand), CPU, PolicyConfig(name=policy)))


def test_well_below_capacity_fcfs_keeps_nearly_all_promises_and_shares_are_as_demanded() -> None:
    result = figures("continuous", 0.4)
    assert result.value > 0.9
    assert all(tier.share_received == pytest.approx(tier.share_expected) for tier in result.tiers.values())


def test_above_capacity_fcfs_fails_everybody_and_strict_priority_first_the_worst_rank() -> None:
    fcfs, strict = figures("continuous", 1.5), figures("priority", 1.5)
    assert max(tier.attainment or 0 for tier in fcfs.tiers.values()) < 0.3
    assert (strict.tiers["vip"].attainment or 0) > (fcfs.tiers["vip"].attainment or 0) + 0.15
    assert (strict.tiers["free"].attainment or 0) < 0.3
    assert strict.value > 2 * fcfs.value
    assert strict.goodput_rps > fcfs.goodput_rps


def test_a_tight_kv_pool_makes_the_engine_recompute() -> None:
    tight = replace(H100, capacity=replace(H100.capacity, kv_tokens=24_000, max_model_len=16_000))
    made = build_workload(chat_rows(300), tight, DEFAULT_TIERS, Demand(rho=1.2))
    assert replay(made, tight, PolicyConfig(name="continuous")).preemptions > 0


@pytest.mark.parametrize(("wake", "says"), [(None, "nothing would ever wake"), (0.5, "again and again")])
def test_a_planner_that_leaves_requests_waiting_is_an_error(
    monkeypatch: pytest.MonkeyPatch, wake: float | None, says: str
) -> None:
    monkeypatch.setattr(replay_module.Planner, "decide", lambda self, now: [])
    monkeypatch.setattr(replay_module.Planner, "next_wakeup", lambda self, now: wake)
    monkeypatch.setattr(replay_module, "STALL_DECISIONS", 100)
    with pytest.raises(ReplayError, match=says):
        run("continuous", 1.0, count=10)


def test_a_policy_that_fails_in_a_replay_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Priority, "candidates", lambda self, now: 1 / 0)
    with pytest.raises(ReplayError, match="ZeroDivisionError"):
        run("priority", 1.0, count=10)


def test_requests_make_their_output_and_no_more_whatever_they_ask_for() -> None:
    known, unknown = workload(count=40), workload(count=40, max_tokens=4096)
    assert {request.max_tokens for request in unknown.requests} == {4096}
    assert unknown.costs == known.costs
    records = replay(unknown, H100, PolicyConfig(name="continuous")).records
    assert [record.output for record in records] == [request.max_tokens for request in known.requests]


def test_clients_that_go_away_free_what_they_hold_and_leave_the_denominator_if_nothing_was_missed() -> None:
    made = workload(rho=1.5, count=400, cancel_share=0.5)
    done = replay(made, H100, PolicyConfig(name="batching_aware"))
    gone = [record for record in done.records if record.cancelled is not None]
    assert 50 < len(gone) < len(made.cancels)  # the others had ended before their client went
    assert all(record.last_token is None and record.cancelled > record.request.arrival for record in gone)
    unfinished_prefills = done.busy - sum(record.service for record in done.records)
    assert 0 <= unfinished_prefills < 0.01 * done.busy
    missed = [one for one in gone if (one.first_token or one.cancelled or 0) > one.request.deadline]
    counted = sum(tier.requests for tier in judge(done).tiers.values())
    assert counted == 400 - len(gone) + len(missed)


def test_a_floor_that_is_withheld_is_seen() -> None:
    """Strict priority starves the worst rank while a better one floods; the default policy keeps its floor."""
    flood = workload(rho=2.0, count=3000, mix=(0.9, 0.0, 0.1))
    strict = replay(flood, H100, PolicyConfig(name="priority"))
    fair = replay(flood, H100, PolicyConfig(name="batching_aware"))
    assert fair.floor_debt["free"] < 2 * FLOOR_CLAMP < strict.floor_debt["free"]


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rho", "served"),
    [
        (1.0, (1, 1, 1)),
        (1.2, (1, 1, 0.67)),
        (1.5, (1, 1, 0.33)),
        (2.0, (1, 0.75, 0.15)),
        (3.0, (1, 0.33, 0.07)),
    ],
)
def test_water_filling_serves_tiers_by_weight(rho: float, served: tuple[float, ...]) -> None:
    demand = {"vip": 0.2 * rho, "paid": 0.3 * rho, "free": 0.5 * rho}
    given = water_fill(demand, {"vip": 60, "paid": 30, "free": 10}, 1.0)
    assert [round(given[tier] / demand[tier], 2) for tier in demand] == [pytest.approx(part) for part in served]


def test_a_tier_without_weight_gets_what_is_left() -> None:
    assert water_fill({"a": 0.5, "background": 2.0}, {"a": 1, "background": 0}, 1.0) == {"a": 0.5, "background": 0.5}
    assert water_fill({"a": 2.0, "background": 2.0}, {"a": 1, "background": 0}, 1.0) == {"a": 1.0, "background": 0.0}


def test_refused_work_is_demand_unless_even_an_idle_engine_would_have_been_too_late_for_it() -> None:
    done = replay(workload(rho=0.5, mix=(0, 1, 1)), H100, PolicyConfig(name="continuous"))
    lost = max((one for one in done.records if one.request.tier == "paid"), key=lambda one: one.cost)
    lost.last_token, lost.service, lost.refusal = None, 0.0, Reason.DEADLINE_INFEASIBLE
    paid = judge(done).tiers["paid"]
    assert (paid.share_expected or 0) > (paid.share_received or 0) + 0.001
    lost.refusal = Reason.DEADLINE_UNREACHABLE
    paid = judge(done).tiers["paid"]
    assert paid.share_expected == pytest.approx(paid.share_received)


def record(first: float, last: float, tier: TierSpec, stream: bool = True, tokens: int = 11) -> Record:
    deadline = tier.deadline(0.0, stream, tokens, None)
    request = Request("r", "t", tier.name, 0.0, 10, tokens, stream, deadline, 60.0)
    return Record(request, 0.0, first_token=first, last_token=last)


def test_a_stream_is_attained_by_its_first_token_and_its_mean_pace() -> None:
    vip = DEFAULT_TIERS["vip"]
    assert attained(record(0.5, 1.5, vip), vip)
    assert not attained(record(0.51, 1.5, vip), vip)
    assert not attained(record(0.4, 1.41, vip), vip)


def test_an_unstreamed_answer_is_attained_by_its_last_token() -> None:
    vip = DEFAULT_TIERS["vip"]
    assert attained(record(1.4, 1.5, vip, stream=False), vip)
    assert not attained(record(0.1, 1.51, vip, stream=False), vip)


def test_a_total_contract_is_kept_by_the_last_token_whatever_the_length() -> None:
    total = replace(DEFAULT_TIERS["vip"], contract=Contract.E2E_TOTAL, e2e=3.0)
    assert attained(record(2.9, 3.0, total), total)
    assert not attained(record(0.1, 3.1, total), total)


def test_a_refused_request_is_not_attained() -> None:
    vip = DEFAULT_TIERS["vip"]
    refused = replace(record(0, 0, vip), first_token=None, last_token=None, refusal=Reason.QUEUE_FULL)
    assert not attained(refused, vip)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.99) == 4
    assert percentile([], 0.5) is None


def test_batching_raises_throughput_up_to_a_full_batch() -> None:
    curve = EngineCurve.of(workload(), H100)
    assert curve.speed_up[0] == 1
    assert curve.speed_up == sorted(curve.speed_up)
    assert curve.utilisation == sorted(curve.utilisation)
    assert 0 < curve.utilisation[0] < curve.utilisation[-1] < 1
    assert curve.token_time == sorted(curve.token_time)
