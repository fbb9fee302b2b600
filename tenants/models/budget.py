"""What is spent of budgets, and which scheduler process may spend how much of the rest.

Amounts are whole numbers: tokens, or 1e-10 of the currency. `tenants/budgets.py` is the only code that writes here.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q


class BudgetAccount(models.Model):
    """One budget in one of its periods. `spent` is at all times the ledger's sum of what the owner used in the period.

    `limit`, `hard` and `alerts` are what the change `version` made of the budget, as the schedulers were last told.
    """

    tenant_id = models.CharField(max_length=32)
    scope = models.CharField(max_length=8, help_text="tenant or key")
    owner = models.CharField(max_length=32, help_text="id of the tenant or key")
    model = models.CharField(max_length=200, default="", blank=True, help_text="empty: all models")
    unit = models.CharField(max_length=8, help_text="tokens, or the currency, counted in 1e-10")
    period = models.CharField(max_length=8)
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField(null=True, blank=True)
    limit = models.BigIntegerField()
    hard = models.BooleanField(default=True)
    alerts = models.JSONField(default=list, blank=True)
    version = models.PositiveBigIntegerField(default=0)
    spent = models.BigIntegerField(default=0)
    asks = models.PositiveBigIntegerField(default=0, help_text="how often a process asked the others for a part")

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["owner", "scope", "model", "unit", "period", "starts_at"], name="budget_account_once"
            ),
        ]

    def __str__(self) -> str:
        what = f"{self.unit} of {self.model}" if self.model else self.unit
        return f"{self.scope} {self.owner}: {what}, {self.period} from {self.starts_at:%Y-%m-%d %H:%M} UTC"


class BudgetLease(models.Model):
    """What a scheduler process may still spend of an account. It counts as spent for everybody else.

    `amount` shrinks as the usage it paid for reaches the ledger. `turn` and `granted` tell a repeated message from a
    new one. `wanted` is what the process asks the others for, `answered` the last ask of others that it has answered.
    """

    account = models.ForeignKey(BudgetAccount, on_delete=models.CASCADE, related_name="leases")
    process = models.CharField(max_length=100)
    epoch = models.PositiveBigIntegerField()
    amount = models.BigIntegerField(default=0)
    turn = models.PositiveBigIntegerField(default=0)
    granted = models.BigIntegerField(default=0)
    wanted = models.BigIntegerField(default=0)
    answered = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["account", "process", "epoch"], name="budget_lease_once"),
            models.CheckConstraint(condition=Q(amount__gte=0), name="budget_lease_not_negative"),
        ]
        indexes = [
            models.Index(fields=["process", "epoch"], name="budget_lease_owner"),
            models.Index(fields=["account"], condition=Q(wanted__gt=0), name="budget_lease_wanted"),
        ]

    def __str__(self) -> str:
        return f"{self.process} epoch {self.epoch}: {self.amount} of {self.account}"


class BudgetAlert(models.Model):
    """A share of a budget has been spent: told once in a period. `limit` and `spent` are those of that moment."""

    account = models.ForeignKey(BudgetAccount, on_delete=models.CASCADE, related_name="raised")
    level = models.FloatField(help_text="share of the limit")
    limit = models.BigIntegerField()
    spent = models.BigIntegerField()
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-id"]
        constraints = [models.UniqueConstraint(fields=["account", "level"], name="budget_alert_once")]

    def __str__(self) -> str:
        return f"{self.level:.0%} of {self.account}"
