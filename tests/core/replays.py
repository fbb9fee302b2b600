"""Whole replays of a synthetic trace, for tests of what is said about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.core.types import PolicyConfig, TierSpec
from scheduler.simulator.profiles import PROFILES
from scheduler.simulator.replay import Replay, replay
from scheduler.simulator.report import Report
from scheduler.simulator.results import judge
from scheduler.simulator.workload import DEFAULT_TIERS, Demand, build_workload
from tests.core.traces import chat_rows


def replayed(
    policies: Sequence[str] = ("continuous", "priority"),
    count: int = 400,
    rho: float = 1.2,
    tiers: Mapping[str, TierSpec] = DEFAULT_TIERS,
    profile: str = "h100-8b",
    trace: str = "chat.csv.gz",
) -> tuple[Report, list[Replay]]:
    """`count` requests under each policy, without a bound."""
    engine = PROFILES[profile]
    workload = build_workload(chat_rows(count), engine, tiers, Demand(rho=rho))
    replays = [replay(workload, engine, PolicyConfig(name=name)) for name in policies]
    results = {run.policy: judge(run) for run in replays}
    return Report(trace, 1, engine, workload, results, None, "not wanted"), replays
