"""What the scheduler process reads from and writes to the database, beside the ledger. Blocking: called in a thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from scheduler import config
from scheduler.models import Deployment, DeploymentStatus
from scheduler.worker.configuration import Configuration, DeploymentSpec
from scheduler.worker.ledger import PriceBook
from tenants.models import Price


@dataclass(frozen=True, slots=True)
class Status:
    """How a deployment fares."""

    state: str
    message: str
    hint: str


def load_configuration(pools: Collection[str]) -> Configuration:
    """The configuration in force; of the deployments, those of the named pools (all if none is named)."""
    document = config.current()
    prices = Price.objects.select_related("tenant", "tier")
    return Configuration(
        tiers=document.tier_specs(),
        policy=document.policy_config(),
        deployments=_deployments(pools),
        price=PriceBook(prices).find,
    )


def write_statuses(statuses: Mapping[int, Status], process: str, epoch: int) -> None:
    """Say how deployments fare, by the id of their rows; rows that are gone are left out."""
    for deployment in Deployment.objects.filter(pk__in=statuses):
        status = statuses[deployment.pk]
        DeploymentStatus.objects.update_or_create(
            deployment=deployment,
            defaults={
                "state": status.state,
                "message": status.message,
                "hint": status.hint,
                "process": process,
                "epoch": epoch,
            },
        )


def _deployments(pools: Collection[str]) -> dict[str, DeploymentSpec]:
    """A deployment that names no pool has one of its own, called as its model."""
    rows = Deployment.objects.filter(enabled=True, removed_at__isnull=True)
    return {
        row.model: DeploymentSpec(row.pk, row.model, row.engine, row.options)
        for row in rows
        if not pools or (row.pool or row.model) in pools
    }
