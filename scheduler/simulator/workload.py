"""From a trace's rows to requests as the core sees them, the same ones every time.

Who is who is not in a trace: tier, tenant and streaming come from a hash of the seed and the row's number, so that all
policies and all loads see the same requests. Outputs have their true length, which is also their `max_tokens`.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.core.types import OnInfeasible, Request, TierSpec
from scheduler.simulator.profiles import Profile
from scheduler.simulator.trace import TraceRow

DEFAULT_TIERS: dict[str, TierSpec] = {
    tier.name: tier
    for tier in (
        TierSpec(
            "vip", 1, weight=60, floor=0.30, ttft=0.5, e2e=0.5, tpot=0.10, objective=0.999,
            headroom=0.10, reserved_slots=0.125, queue_max_wait=30.0,
        ),
        TierSpec(
            "paid", 2, weight=30, floor=0.15, ttft=2.0, e2e=2.0, tpot=0.15,
            headroom=0.20, reserved_slots=0.125, on_infeasible=OnInfeasible.REJECT, preemptible=True,
        ),
        TierSpec(
            "free", 3, weight=10, floor=0.05, ttft=5.0, e2e=5.0, tpot=0.25, max_tokens=512,
            headroom=0.30, on_infeasible=OnInfeasible.REJECT, preemptible=True, queue_max_wait=120.0,
        ),
    )
}  # fmt: skip
DEFAULT_MIX = (0.2, 0.3, 0.5)  # of the requests, best rank first
TENANTS = 50  # when the trace names none: as many, of which the k-th has a share of 1 / k^1.1
TENANT_EXPONENT = 1.1
CANCEL_WITHIN = 10.0  # seconds; uniform
FULL_BATCH_KV = 0.8  # share of the KV pool that a full batch holds in the measure of load


class WorkloadError(Exception):
    """The rows cannot be offered as asked."""


@dataclass(frozen=True, slots=True)
class Demand:
    """How requests are made of rows. `rho` None: time as in the trace. `mix`: shares by rank, best first."""

    rho: float | None = None
    seed: int = 1
    stream_share: float = 1.0
    length_scale: tuple[float, float] = (1.0, 1.0)  # prompts, outputs
    mix: tuple[float, ...] = ()
    cap_outputs: bool = False  # at the tiers' max_tokens
    max_tokens: int | None = None  # what every request asks for; None: the output that it has, so that this is known
    cancel_share: float = 0.0  # of the requests, whose clients go away within CANCEL_WITHIN of their arrival


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, from 0. `costs`: engine-seconds of each at full batch. `outputs`: tokens that each
    makes. `cancels`: when clients go away, (instant, number of the request). `shortened`: how many rows were longer
    than the engine takes."""

    requests: tuple[Request, ...]
    costs: tuple[float, ...]
    outputs: tuple[int, ...]
    cancels: tuple[tuple[float, int], ...]
    tiers: Mapping[str, TierSpec]
    rho: float
    span: float  # seconds from the first arrival to the last
    shortened: int


def build_workload(
    rows: Sequence[TraceRow], profile: Profile, tiers: Mapping[str, TierSpec], demand: Demand
) -> Workload:
    """Deal, fit and scale. Raises WorkloadError."""
    ranked = sorted(tiers.values(), key=lambda tier: (tier.rank, tier.name))
    mix = _cumulative_mix(demand.mix, len(ranked))
    tenants = list(itertools.accumulate(1 / k**TENANT_EXPONENT for k in range(1, TENANTS + 1)))
    dealt = []  # row, tier, tenant, streamed
    for number, row in enumerate(rows):
        tier_draw, tenant_draw, stream_draw = _draws(demand.seed, number)
        tier = ranked[bisect.bisect_right(mix, tier_draw)]
        tenant = row.tenant or f"tenant-{bisect.bisect_right(tenants, tenant_draw * tenants[-1]) + 1:02d}"
        fitted = _fit(row, profile, demand, tier)
        dealt.append((fitted, tier, tenant, stream_draw < demand.stream_share))
    costs = request_costs([row for row, *_ in dealt], profile)
    span = rows[-1].arrival - rows[0].arrival
    scale = _time_scale(sum(costs), span, demand.rho)
    requests = tuple(
        _request(number, _asked(row, demand, profile), (row.arrival - rows[0].arrival) * scale, tier, tenant, streamed)
        for number, (row, tier, tenant, streamed) in enumerate(dealt)
    )
    return Workload(
        requests,
        tuple(costs),
        tuple(row.output_tokens for row, *_ in dealt),
        _cancels(requests, demand),
        tiers,
        sum(costs) / (span * scale),
        span * scale,
        shortened=sum(1 for row in rows if sum(_scaled(row, demand)) > profile.longest),
    )


def request_costs(rows: Sequence[TraceRow], profile: Profile) -> list[float]:
    """Engine-seconds of each row in a full batch: `P b1 + n b3 + n (P + n/2) b4 + (n + P/step) b0/B*`.

    B* = min(max_seqs, 0.8 x KV pool / mean(P + n)) is how many sequences share a step's base cost.
    """
    capacity, cost = profile.capacity, profile.cost
    mean = sum(row.prompt_tokens + row.output_tokens for row in rows) / len(rows)
    base = cost.base / full_batch(profile, mean)
    return [
        row.prompt_tokens * cost.prefill_token
        + row.output_tokens * cost.decode_seq
        + row.output_tokens * (row.prompt_tokens + row.output_tokens / 2) * cost.kv_token
        + (row.output_tokens + row.prompt_tokens / capacity.step_tokens) * base
        for row in rows
    ]


def full_batch(profile: Profile, mean_tokens: float) -> float:
    """Sequences of `mean_tokens` (prompt and output) that run at once when the engine is full."""
    return min(profile.capacity.max_seqs, FULL_BATCH_KV * profile.capacity.kv_tokens / mean_tokens)


def _cumulative_mix(mix: tuple[float, ...], tiers: int) -> list[float]:
    """Upper ends of the tiers' parts of [0, 1), all but the last."""
    if not mix:
        mix = DEFAULT_MIX if tiers == len(DEFAULT_MIX) else (1.0,) * tiers
    if len(mix) != tiers or min(mix) < 0 or sum(mix) <= 0:
        raise WorkloadError(f"The mix needs a share for each of the {tiers} tiers, best rank first.")
    return [part / sum(mix) for part in itertools.accumulate(mix)][:-1]


def _draws(seed: int, number: int, purpose: str = "") -> tuple[float, float, float]:
    """Three independent uniform numbers in [0, 1) that belong to row `number`, and others for each purpose."""
    digest = hashlib.blake2b(f"{seed}:{number}{purpose}".encode(), digest_size=24).digest()
    first, second, third = (int.from_bytes(digest[at : at + 8], "big") / 2**64 for at in (0, 8, 16))
    return first, second, third


def _scaled(row: TraceRow, demand: Demand) -> tuple[int, int]:
    prompts, outputs = demand.length_scale
    return max(1, round(row.prompt_tokens * prompts)), max(1, round(row.output_tokens * outputs))


def _fit(row: TraceRow, profile: Profile, demand: Demand, tier: TierSpec) -> TraceRow:
    """The row with its lengths scaled, and cut to what the engine takes: first the prompt, then the output."""
    prompt, output = _scaled(row, demand)
    if demand.cap_outputs:
        output = min(output, tier.max_tokens)
    output = min(output, profile.longest - 1)
    return TraceRow(row.arrival, min(prompt, profile.longest - output), output, row.tenant)


def _asked(row: TraceRow, demand: Demand, profile: Profile) -> TraceRow:
    """The row with the output that its client allows for, at most what the engine takes."""
    if demand.max_tokens is None:
        return row
    most = min(max(demand.max_tokens, row.output_tokens), profile.longest - row.prompt_tokens)
    return replace(row, output_tokens=most)


def _cancels(requests: Sequence[Request], demand: Demand) -> tuple[tuple[float, int], ...]:
    if not demand.cancel_share:
        return ()
    drawn = (_draws(demand.seed, number, ":cancel") for number in range(len(requests)))
    return tuple(
        sorted(
            (request.arrival + CANCEL_WITHIN * patience, number)
            for number, (request, (goes, patience, _)) in enumerate(zip(requests, drawn, strict=True))
            if goes < demand.cancel_share
        )
    )


def _time_scale(work: float, span: float, rho: float | None) -> float:
    if span <= 0:
        raise WorkloadError("All requests arrive at the same instant; a load needs arrivals over time.")
    if rho is None:
        return 1.0
    if work <= 0:
        raise WorkloadError("The profile's steps cost nothing, so that there is no load to scale to.")
    return work / span / rho


def _request(number: int, row: TraceRow, arrival: float, tier: TierSpec, tenant: str, stream: bool) -> Request:
    return Request(
        id=str(number),
        tenant=tenant,
        tier=tier.name,
        arrival=arrival,
        prompt_tokens=row.prompt_tokens,
        max_tokens=row.output_tokens,
        stream=stream,
        deadline=tier.deadline(arrival, stream, row.output_tokens, None),
        queue_deadline=arrival + tier.queue_max_wait,
        resumable=True,
    )
