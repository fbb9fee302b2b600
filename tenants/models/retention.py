"""From when on the ledger is kept."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Self

from django.db import models

ONLY_ROW = 1


class Retention(models.Model):
    """One row: rows of the ledger that arrived before `kept_since` have been removed, or are being.

    `removing` is true inside the transaction that removes a batch and nowhere else (`tenants/retention.py`): the
    database's own guard of the ledger lets rows go while it is, and none that arrived at `kept_since` or later.
    """

    objects: ClassVar[models.Manager[Self]] = models.Manager()
    id = models.PositiveSmallIntegerField(primary_key=True, default=ONLY_ROW)
    kept_since = models.DateTimeField()
    removing = models.BooleanField(default=False)

    class Meta:
        constraints = [models.CheckConstraint(condition=models.Q(id=ONLY_ROW), name="retention_has_one_row")]

    def __str__(self) -> str:
        return f"usage since {self.kept_since:%Y-%m-%d %H:%M} UTC"


def kept_since() -> datetime | None:
    """The instant from which on the ledger has every row; None: it has every row there ever was."""
    return Retention.objects.filter(pk=ONLY_ROW).values_list("kept_since", flat=True).first()
