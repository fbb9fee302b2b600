"""Policies by name: who of the waiting is next. Switchable at run time, on every engine."""

from __future__ import annotations

from scheduler.core.books import Books
from scheduler.core.policies.base import Blocked, Candidate, Policy
from scheduler.core.policies.batching_aware import BatchingAware
from scheduler.core.policies.continuous import Continuous
from scheduler.core.policies.priority import Priority

__all__ = ["POLICIES", "Blocked", "Candidate", "Policy", "create_policy"]

POLICIES: dict[str, type[Policy]] = {
    "continuous": Continuous,
    "priority": Priority,
    "batching_aware": BatchingAware,
}


def create_policy(name: str, books: Books) -> Policy:
    """The policy of that name. Raises ValueError naming those that exist."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](books)
