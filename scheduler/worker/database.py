"""What the scheduler process reads from and writes to the database, beside the ledger. Blocking: called in a thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from scheduler import config
from scheduler.models import Deployment, DeploymentStatus
from scheduler.worker.configuration import Configuration, DeploymentSpec
from tenants.pricing import PriceBook, TokenPrice


@dataclass(frozen=True, slots=True)
class Status:
    """How a deployment fares."""

    state: str
    message: str
    hint: str


def load_configuration(pools: Collection[str]) -> Configuration:
    """The configuration in force; of the deployments, those of the named pools (all if none is named)."""
    document = config.current()
    book = PriceBook.load()

    def price(model: str, tier: str, tenant: str, at: float) -> TokenPrice | None:
        found = book.find(model, tier, tenant, datetime.fromtimestamp(at, UTC))
        return None if found is None else TokenPrice.of(found)

    return Configuration(
        tiers=document.tier_specs(),
        policy=document.policy_config(),
        deployments=_deployments(pools),
        price=price,
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
