"""Policies by name: who of the waiting heads is next. Switchable at run time, on every engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from scheduler.core.policies.continuous import Continuous
from scheduler.core.policies.priority import Priority
from scheduler.core.types import Reason, Request, TierSpec


class Policy(Protocol):
    """Orders, never acts: slots, memory and limits are enforced outside it (`batcher.py`)."""

    def key(self, request: Request) -> float:
        """Order inside a (tier, lane), smallest first. Must not change while the request waits."""
        ...

    def rank(self, heads: list[Request], tiers: Mapping[str, TierSpec]) -> list[tuple[Request, Reason]]:
        """The heads that may be dispatched now, best first. What is left out stays behind the first one."""
        ...


POLICIES: dict[str, type[Policy]] = {
    "continuous": Continuous,
    "priority": Priority,
}


def create_policy(name: str) -> Policy:
    """The policy of that name. Raises ValueError naming those that exist."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
