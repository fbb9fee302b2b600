"""Who owns a set of pools: an epoch from the database, taken by conditional update and held by a lease.

Whatever an owner writes or sends carries its epoch, and a lower one is ignored everywhere. An owner that cannot renew
stops admitting before its lease is over.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db.models import F, Q
from django.utils import timezone

from scheduler.models import SchedulerProcess

# As long as known keys live on without the database. A restart does not wait for it: see `take`.
LEASE_SECONDS = 60.0


class OwnedElsewhereError(Exception):
    """Another process, at another address, holds a lease that is not over."""

    def __init__(self, owner: SchedulerProcess) -> None:
        super().__init__(
            f"Scheduler {owner.name!r} runs at {owner.address} (lease until {owner.lease_until.isoformat()}). "
            "Stop it first, or start this one under another name."
        )


def take(name: str, address: str, *, now: datetime | None = None) -> int:
    """Become the owner and return the new epoch. Raises OwnedElsewhereError.

    A lease of the same address is taken over at once: only one process can listen there, so the former owner is gone.
    """
    at = now or timezone.now()
    blank = SchedulerProcess(name=name, epoch=0, address=address, lease_until=at, started_at=at)
    SchedulerProcess.objects.bulk_create([blank], ignore_conflicts=True)
    while True:
        owner = SchedulerProcess.objects.get(name=name)
        # The condition on the epoch makes sure that of two takers one loses, looks again and finds the other's lease.
        free = SchedulerProcess.objects.filter(
            Q(lease_until__lte=at) | Q(address=address), name=name, epoch=owner.epoch
        )
        if free.update(
            epoch=F("epoch") + 1, address=address, lease_until=at + timedelta(seconds=LEASE_SECONDS), started_at=at
        ):
            return owner.epoch + 1
        owner.refresh_from_db()
        if owner.lease_until > at and owner.address != address:
            raise OwnedElsewhereError(owner)


def renew(name: str, epoch: int, *, now: datetime | None = None) -> bool:
    """Prolong the lease to `LEASE_SECONDS` from now. False: a higher epoch has taken over, stop at once."""
    until = (now or timezone.now()) + timedelta(seconds=LEASE_SECONDS)
    return bool(SchedulerProcess.objects.filter(name=name, epoch=epoch).update(lease_until=until))


def release(name: str, epoch: int, *, now: datetime | None = None) -> None:
    """Let the lease end now, unless somebody has taken over already."""
    SchedulerProcess.objects.filter(name=name, epoch=epoch).update(lease_until=now or timezone.now())
