"""A decision trace as it is told to operators, and to the tenant whose request it is."""

from __future__ import annotations

from typing import Any

from scheduler.core.trace import Entry, Trace


def trace_document(trace: Trace, *, redacted: bool) -> dict[str, Any]:
    """Seconds count from the arrival, `arrived_at` is Unix time. Redacted: nothing that tells of other requests."""
    return {
        "request_id": trace.id,
        "sampled": True,
        "tenant": trace.tenant,
        "tier": trace.tier,
        "model": trace.model,
        "arrived_at": trace.opened_at,
        "state": "ended" if trace.ended else "live",
        "events": [_event(entry, trace.opened, redacted=redacted) for entry in trace.entries],
    }


def _event(entry: Entry, opened: float, *, redacted: bool) -> dict[str, Any]:
    event: dict[str, Any] = {"at": entry.at - opened, "event": entry.event, "reason": entry.reason or None}
    if entry.until is not None:
        event |= {"until": entry.until - opened, "rounds": entry.rounds}
    if entry.event == "dispatched" and not redacted:
        event |= {"batch_id": entry.batch_id, "batch_mates": entry.mates}
    if entry.event in ("preempted", "returned", "ended"):
        event["tokens"] = entry.tokens
    if entry.beneficiary and not redacted:
        event["beneficiary"] = entry.beneficiary
    return event
