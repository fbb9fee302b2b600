"""From records to figures. A request is attained when its tier's contract was kept; a refused one is not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.core.types import Contract, Reason, TierSpec
from scheduler.simulator.replay import Record, Replay

WARM_UP = 60.0  # seconds left out of the shares of engine time, when the run is at least twice as long
ROUNDING = 1e-9  # seconds: sums of step times are not exact
PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}

Percentiles = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class TierResult:
    """`rejected`: refused at arrival, or waited in vain. Latencies in seconds, of requests that ran to their end.

    Shares are of the engine time that all tiers received; `share_expected` is what weights and demand entitle to.
    """

    requests: int
    attained: int
    rejected: int
    ttft: Percentiles
    e2e: Percentiles
    share_expected: float | None
    share_received: float | None

    @property
    def attainment(self) -> float | None:
        return self.attained / self.requests if self.requests else None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """Rates are over the arrival span. `value`: attained requests over all, both weighted by tier weight.

    Averages over the busy time are `mean_batch` (sequences), `mean_kv_usage` (share of the pool) and `mean_waiting`
    (requests in the queue).
    """

    throughput_rps: float
    throughput_tps: float
    goodput_rps: float
    value: float
    preemptions: int
    decision_us: Percentiles
    mean_batch: float
    mean_kv_usage: float
    mean_waiting: float
    busy: float  # share of the run in which a step was running
    duration: float  # seconds from the first arrival to the end of the last step
    tiers: Mapping[str, TierResult]


def judge(replay: Replay) -> PolicyResult:
    """Everything that is reported of one run."""
    tiers, span = replay.workload.tiers, replay.workload.span
    by_tier = {
        name: [record for record in replay.records if record.request.tier == name and counts(record)] for name in tiers
    }
    kept = {name: sum(attained(record, tiers[name]) for record in records) for name, records in by_tier.items()}
    finished = [record for record in replay.records if record.last_token is not None]
    shares = _shares(replay)
    total, busy = replay.timeline.total(), replay.busy or math.inf
    return PolicyResult(
        throughput_rps=len(finished) / span,
        throughput_tps=sum(tokens_of(record) for record in finished) / span,
        goodput_rps=sum(kept.values()) / span,
        value=weighted_value(kept, {name: len(records) for name, records in by_tier.items()}, tiers),
        preemptions=replay.preemptions,
        decision_us=_decision_us(replay),
        mean_batch=total.running / busy,
        mean_kv_usage=total.kv_usage / busy,
        mean_waiting=total.waiting / busy,
        busy=replay.busy / replay.ended_at if replay.ended_at else 0.0,
        duration=replay.ended_at,
        tiers={name: _tier_result(by_tier[name], kept[name], *shares[name]) for name in tiers},
    )


def attained(record: Record, tier: TierSpec) -> bool:
    """Was the contract kept? Streams: first token in time, and the mean pace; others: last token in time."""
    if record.first_token is None or record.last_token is None:
        return False
    request = record.request
    if tier.contract is Contract.E2E_TOTAL or not request.stream:
        return record.last_token <= request.deadline + ROUNDING
    allowed = (tokens_of(record) - 1) * tier.tpot + ROUNDING
    return record.first_token <= request.deadline + ROUNDING and record.last_token - record.first_token <= allowed


def tokens_of(record: Record) -> int:
    """Output tokens of a request that has run to its end."""
    return record.request.max_tokens if record.output is None else record.output


def counts(record: Record) -> bool:
    """False if the client went away before anything was missed: nobody can say whether the contract would be kept."""
    if record.cancelled is None:
        return True
    if record.request.stream and record.first_token is not None:
        return record.first_token > record.request.deadline
    return record.cancelled > record.request.deadline


def weighted_value(kept: Mapping[str, float], total: Mapping[str, int], tiers: Mapping[str, TierSpec]) -> float:
    """What was kept over all there was, both weighted by the tiers' weights; 0 if nothing has weight."""
    everything = sum(tiers[name].weight * count for name, count in total.items())
    return sum(tiers[name].weight * count for name, count in kept.items()) / everything if everything else 0.0


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the ordered values do not exceed; None without values."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else None


def latencies(records: Iterable[Record]) -> tuple[list[float], list[float]]:
    """TTFT and E2E of the records that ran to their end, each in ascending order."""
    ended = [record for record in records if record.first_token is not None and record.last_token is not None]
    ttft = sorted(record.first_token - record.request.arrival for record in ended if record.first_token is not None)
    e2e = sorted(record.last_token - record.request.arrival for record in ended if record.last_token is not None)
    return ttft, e2e


def water_fill(demand: Mapping[str, float], weights: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Divide `capacity` by weight; what a tier does not need goes to the others, by weight again.

    Tiers of weight 0 get what is left when all others have what they need.
    """
    given = dict.fromkeys(demand, 0.0)
    left = min(capacity, sum(demand.values()))
    for background in (False, True):
        open_tiers = {name for name in demand if (weights[name] == 0) is background and demand[name] > 0}
        while open_tiers and left > 0:
            weight = {name: 1.0 if background else weights[name] for name in open_tiers}
            level = left / sum(weight.values())
            full = {name for name in open_tiers if demand[name] <= level * weight[name]}
            if not full:
                return given | {name: level * weight[name] for name in open_tiers}
            for name in full:
                given[name] = demand[name]
                left -= demand[name]
            open_tiers -= full
    return given


def _tier_result(records: list[Record], kept: int, expected: float | None, received: float | None) -> TierResult:
    ttft, e2e = latencies(records)
    return TierResult(
        requests=len(records),
        attained=kept,
        rejected=sum(record.refusal is not None for record in records),
        ttft=_percentiles(ttft),
        e2e=_percentiles(e2e),
        share_expected=expected,
        share_received=received,
    )


def _shares(replay: Replay) -> dict[str, tuple[float | None, float | None]]:
    """(expected, received) shares of the engine time by tier, without the first minute of arrivals.

    Demand is what a tier's requests used, and for those that did not run, what they would have used: their cost at
    full batch, corrected by how much more than that the others really used. A request that its tier refuses because
    even an idle engine would be too late for it is no demand, nor is what a client that went away left unserved.
    """
    tiers, span = replay.workload.tiers, replay.workload.span
    start = WARM_UP if span >= 2 * WARM_UP else 0.0
    counted = [record for record in replay.records if record.request.arrival >= start]
    received = dict.fromkeys(tiers, 0.0)
    unserved = dict.fromkeys(tiers, 0.0)
    served_cost = 0.0
    for record in counted:
        received[record.request.tier] += record.service
        if record.refusal is Reason.DEADLINE_UNREACHABLE or record.cancelled is not None:
            continue
        if record.last_token is None:
            unserved[record.request.tier] += record.cost
        else:
            served_cost += record.cost
    total = sum(received.values())
    if not total or not served_cost:
        return dict.fromkeys(tiers, (None, None))
    demand = {name: received[name] + unserved[name] * total / served_cost for name in tiers}
    expected = water_fill(demand, {name: tier.weight for name, tier in tiers.items()}, total)
    return {name: (expected[name] / total, received[name] / total) for name in tiers}


def _percentiles(ordered: Sequence[float]) -> Percentiles:
    return {name: percentile(ordered, share) for name, share in PERCENTILES.items()}


def _decision_us(replay: Replay) -> Percentiles:
    ordered = [nanoseconds / 1000 for nanoseconds in sorted(replay.decision_ns)]
    return {name: percentile(ordered, PERCENTILES[name]) for name in ("p50", "p99")}
