"""Limits of tiers, tenants and keys."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q

from .api_key import ApiKey
from .change import Configured
from .fields import DECIMALS
from .tenant import Tenant
from .tier import Tier

LARGEST_AMOUNT = 922_337_203  # of money: what budgets and the ledger can count in their unit
TOKENS = "tokens"  # the unit of what is counted in tokens; that of money is its currency

valid_currency = RegexValidator(r"^[A-Z]{3}\Z", "Use a currency code of three capitals, like USD.")


def valid_alerts(value: Any) -> None:
    if not isinstance(value, list) or len(value) > 10:
        raise ValidationError("Give at most 10 alert levels.")
    if not all(isinstance(level, int | float) and not isinstance(level, bool) and 0 < level <= 1 for level in value):
        raise ValidationError("An alert level is a share above 0 and at most 1.")


class Limit(Configured):
    """One limit of exactly one owner. A tier's limits are defaults for its tenants.

    `rpm`, `tpm` and `concurrency` have a `value` of at least 1. A `budget` has a period and either a `value` in tokens
    or an `amount` in `currency`, and 0 admits nothing; a hard one stops requests, a soft one only alerts.
    """

    class Kind(models.TextChoices):
        RPM = "rpm", "requests per minute"
        TPM = "tpm", "tokens per minute"
        CONCURRENCY = "concurrency", "requests at a time"
        BUDGET = "budget", "budget"

    class Period(models.TextChoices):
        MINUTE = "minute"
        HOUR = "hour"
        DAY = "day"
        WEEK = "week"
        MONTH = "month"
        TOTAL = "total"

    tier = models.ForeignKey(Tier, on_delete=models.CASCADE, related_name="limits", null=True, blank=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="limits", null=True, blank=True)
    key = models.ForeignKey(ApiKey, on_delete=models.CASCADE, related_name="limits", null=True, blank=True)
    model = models.CharField(max_length=200, default="", blank=True, help_text="empty: all models")
    kind = models.CharField(max_length=16, choices=Kind.choices)
    value = models.BigIntegerField(null=True, blank=True, validators=[MinValueValidator(0)])
    # 15 digits: what a DECIMAL column keeps exactly on SQLite too.
    amount = models.DecimalField(
        max_digits=15,
        decimal_places=4,
        null=True,
        blank=True,
        validators=[MinValueValidator(0), MaxValueValidator(LARGEST_AMOUNT)],
    )
    currency = models.CharField(max_length=3, default="", blank=True, validators=[valid_currency])
    period = models.CharField(max_length=8, choices=Period.choices, default="", blank=True)
    hard = models.BooleanField(default=True)
    alerts = models.JSONField(default=list, blank=True, validators=[valid_alerts])

    class Meta:
        ordering = ["id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(tier__isnull=False, tenant__isnull=True, key__isnull=True)
                | Q(tier__isnull=True, tenant__isnull=False, key__isnull=True)
                | Q(tier__isnull=True, tenant__isnull=True, key__isnull=False),
                name="limit_has_one_owner",
                violation_error_message="A limit belongs to exactly one tier, tenant or key.",
            ),
            models.CheckConstraint(
                condition=(
                    Q(value__isnull=False)
                    & (Q(value__gte=1) | Q(value=0, kind="budget"))
                    & Q(amount__isnull=True, currency="")
                )
                | (Q(value__isnull=True, kind="budget", amount__gte=0) & ~Q(currency="")),
                name="limit_has_one_quantity",
                violation_error_message="Give a value of at least 1; for a budget, of at least 0, or an amount.",
            ),
            models.CheckConstraint(
                condition=(Q(kind="budget") & ~Q(period="")) | (~Q(kind="budget") & Q(period="", hard=True)),
                name="limit_period_is_a_budgets",
                violation_error_message="Budgets have a period; other limits have none and are hard.",
            ),
            *(
                models.UniqueConstraint(
                    fields=[owner, "model", "kind", "period", "currency"],
                    condition=Q(**{f"{owner}__isnull": False}),
                    name=f"limit_once_per_{owner}",
                    violation_error_message="There is such a limit already.",
                )
                for owner in ("tier", "tenant", "key")
            ),
        ]

    @property
    def unit(self) -> str:
        """What a budget is counted in."""
        return self.currency or TOKENS

    @property
    def units(self) -> int:
        """How much it allows: requests, tokens, or 1e-10 of the currency."""
        quantity = self.value if self.amount is None else int(Decimal(self.amount).scaleb(DECIMALS))
        assert quantity is not None  # a constraint sees to it
        return quantity

    def __str__(self) -> str:
        quantity = f"{self.amount} {self.currency}" if self.amount is not None else str(self.value)
        return f"{self.kind} {quantity}{f' per {self.period}' if self.period else ''}"
