"""Was the contract kept? The rules of `docs/architecture.md`, tier fields, as two functions over one flight.

Streamed: first token by `ttft` and mean time per output token at most `tpot`. Not streamed, n tokens: last token by
`e2e + (n - 1) tpot`. Contract `e2e_total`: last token by `e2e`, whatever n. A request's own `slo_threshold` replaces
`ttft` or the whole bound on the last token. Of several answers n is the length of the longest.
"""

from __future__ import annotations

from scheduler.core.types import Contract, Reason, TierSpec
from scheduler.worker.flight import Flight

# Refusals and ends that count as not attained: they are ours. All other refusals leave the denominator.
OUR_REASONS = frozenset(
    {
        Reason.QUEUE_FULL,
        Reason.ENGINE_NOT_READY,
        Reason.DRAINING,
        Reason.SPOOL_UNAVAILABLE,
        Reason.BUDGET_UNAVAILABLE,
        Reason.QUEUE_TIMEOUT,
        Reason.DEADLINE_INFEASIBLE,
        Reason.DEADLINE_UNREACHABLE,
        Reason.DEGRADED,
    }
)


def miss(flight: Flight, ended: float) -> str:
    """What the contract of a request that ended by itself was broken by: ttft, tpot, e2e, or "" if it was kept."""
    tier = flight.tier
    assert tier is not None  # it ran
    last = flight.last_token if flight.last_token is not None else ended
    first = flight.first_token if flight.first_token is not None else last
    if tier.contract is Contract.E2E_TOTAL:
        return "e2e" if last - flight.arrival > (flight.slo or tier.e2e) else ""
    if not flight.submit.stream:
        return "e2e" if last - flight.arrival > _last_token_bound(flight, tier) else ""
    if first - flight.arrival > (flight.slo or tier.ttft):
        return "ttft"
    return "tpot" if flight.longest > 1 and (last - first) / (flight.longest - 1) > tier.tpot else ""


def judge_cancelled(flight: Flight, now: float) -> tuple[bool | None, str]:
    """(attained, miss reason) of a request whose caller went away; None: it leaves the denominator.

    A stream that had begun is judged by what it delivered; anything else only if its deadline had passed.
    """
    if (
        flight.tier is not None
        and flight.tier.contract is Contract.TTFT_TPOT
        and flight.submit.stream
        and flight.tokens
    ):
        missed = miss(flight, now)
        return not missed, missed
    if flight.deadline is None or now <= flight.deadline:
        return None, ""
    return False, str(Reason.CLIENT_GONE)


def _last_token_bound(flight: Flight, tier: TierSpec) -> float:
    return flight.slo or tier.e2e + max(flight.longest - 1, 0) * tier.tpot
