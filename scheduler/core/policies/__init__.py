"""Policies by name: who of the waiting is next. Switchable at run time, on every engine."""

from __future__ import annotations

from scheduler.core.policies.article import Article
from scheduler.core.policies.base import Blocked, Candidate, Evict, Offer, Policy
from scheduler.core.policies.batching_aware import BatchingAware
from scheduler.core.policies.continuous import Continuous
from scheduler.core.policies.dynamic import Dynamic
from scheduler.core.policies.edf import Edf
from scheduler.core.policies.priority import Priority
from scheduler.core.policies.single import Single
from scheduler.core.policies.static import Static
from scheduler.core.policies.wfq import Wfq

__all__ = ["POLICIES", "Blocked", "Candidate", "Evict", "Offer", "Policy", "policy_class"]

POLICIES: dict[str, type[Policy]] = {
    "single": Single,
    "static": Static,
    "dynamic": Dynamic,
    "continuous": Continuous,
    "priority": Priority,
    "edf": Edf,
    "wfq": Wfq,
    "article": Article,
    "batching_aware": BatchingAware,
}


def policy_class(name: str) -> type[Policy]:
    """The policy of that name. Raises ValueError naming those that exist."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
