"""What is put right about the ledger without touching it."""

from __future__ import annotations

from typing import ClassVar

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import F, Q

from ..scoping import TenantOwned
from .append_only import AppendOnly
from .fields import DECIMALS, MoneyField
from .limit import valid_currency
from .price import Price


class Adjustment(AppendOnly, TenantOwned):  # type: ignore[misc]  # two managers, of which `objects` is the default
    """An amount beside the rows of the ledger: below zero a tenant is charged less, above zero more.

    `starts_at` and `ends_at` (exclusive) say which usage is meant; `model` is empty where it is not that of one. It
    counts in reports of the time at which it was made, so that none that has been read before changes. Names are
    copied, so that it outlives the tenant. `price` is the one that it corrects, if it corrects one.
    """

    LARGEST: ClassVar = 100_000_000  # of the currency

    tenant_id = models.CharField(max_length=32)
    tenant_slug = models.CharField(max_length=64)
    model = models.CharField(max_length=200, default="", blank=True)
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    amount = MoneyField()
    currency = models.CharField(max_length=3, validators=[valid_currency])
    reason = models.TextField(max_length=2000)
    author = models.CharField(max_length=200)
    at = models.DateTimeField(auto_now_add=True)
    price = models.ForeignKey(Price, on_delete=models.PROTECT, related_name="+", null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(condition=Q(starts_at__lt=F("ends_at")), name="adjustment_of_some_time"),
            models.CheckConstraint(condition=~Q(amount=0), name="adjustment_of_some_amount"),
            models.CheckConstraint(condition=~Q(reason=""), name="adjustment_with_a_reason"),
        ]
        indexes = [
            models.Index(fields=["tenant_id", "at"], name="adjustment_tenant"),
            models.Index(fields=["at"], name="adjustment_at"),
        ]

    def __str__(self) -> str:
        return f"{self.tenant_slug} {self.amount:+f} {self.currency}"

    def clean(self) -> None:
        """Raises ValidationError for what the constraints would refuse without a sentence."""
        if self.starts_at >= self.ends_at:
            raise ValidationError({"ends_at": "The end is not after the start."})
        if not self.reason.strip():
            raise ValidationError({"reason": "Say why."})
        if not self.amount or abs(self.amount) >= self.LARGEST:
            raise ValidationError({"amount": f"Give an amount other than 0 and below {self.LARGEST:,}."})
        if self.amount.scaleb(DECIMALS) % 1:
            raise ValidationError({"amount": f"An amount has at most {DECIMALS} decimals."})
