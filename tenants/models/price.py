"""The price book."""

from __future__ import annotations

from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q

from .change import Configured
from .limit import valid_currency
from .tenant import Tenant
from .tier import Tier


class Price(Configured):
    """What a model costs from an instant on, per million tokens: for everybody, for a tier, or for one tenant.

    Prices are never edited; a new one with a later `effective_from` replaces them. The columns hold 15 digits, which
    SQLite keeps exactly too.
    """

    model = models.CharField(max_length=200)
    tier = models.ForeignKey(Tier, on_delete=models.PROTECT, related_name="prices", null=True, blank=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="prices", null=True, blank=True)
    input_per_mtok = models.DecimalField(max_digits=15, decimal_places=8, validators=[MinValueValidator(0)])
    cached_input_per_mtok = models.DecimalField(max_digits=15, decimal_places=8, validators=[MinValueValidator(0)])
    output_per_mtok = models.DecimalField(max_digits=15, decimal_places=8, validators=[MinValueValidator(0)])
    reasoning_per_mtok = models.DecimalField(
        max_digits=15,
        decimal_places=8,
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="empty: reasoning tokens cost what output tokens cost",
    )
    batch_factor = models.DecimalField(max_digits=6, decimal_places=4, default=1, validators=[MinValueValidator(0)])
    currency = models.CharField(max_length=3, default="USD", validators=[valid_currency])
    effective_from = models.DateTimeField()

    class Meta:
        ordering = ["model", "-effective_from"]
        constraints = [
            models.CheckConstraint(
                condition=Q(tier__isnull=True) | Q(tenant__isnull=True),
                name="price_for_a_tier_or_a_tenant",
                violation_error_message="A price is for a tier or for a tenant, not for both.",
            ),
            models.UniqueConstraint(
                fields=["model", "effective_from"],
                condition=Q(tier__isnull=True, tenant__isnull=True),
                name="price_once_for_all",
            ),
            models.UniqueConstraint(
                fields=["model", "tier", "effective_from"], condition=Q(tier__isnull=False), name="price_once_per_tier"
            ),
            models.UniqueConstraint(
                fields=["model", "tenant", "effective_from"],
                condition=Q(tenant__isnull=False),
                name="price_once_per_tenant",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model} from {self.effective_from:%Y-%m-%d %H:%M} UTC"
