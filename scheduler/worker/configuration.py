"""What the operators have set, as one frozen value that a scheduler process acts on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.types import PolicyConfig, TierSpec
from tenants.pricing import TokenPrice

PriceFinder = Callable[[str, str, str, float], TokenPrice | None]
"""(model, tier, tenant id, Unix time) -> the price that applies then."""


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """A model to serve. `id` is its row's."""

    id: int
    model: str
    engine: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Configuration:
    """Tiers and policy of one policy version, the deployments of this process, the price book."""

    tiers: Mapping[str, TierSpec] = field(default_factory=dict)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    deployments: Mapping[str, DeploymentSpec] = field(default_factory=dict)
    price: PriceFinder = lambda model, tier, tenant, at: None
