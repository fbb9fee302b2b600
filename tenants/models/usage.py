"""The ledger: what was used."""

from __future__ import annotations

from django.db import models

from ..scoping import TenantOwned
from .append_only import AppendOnly
from .fields import MoneyField
from .price import Price


class UsageRecord(AppendOnly, TenantOwned):  # type: ignore[misc]  # two managers, of which `objects` is the default
    """One attempt of one request that reached an engine. Names are copied, so that a row outlives what it names.

    Token counts are the engine's own. Times are in seconds, instants in UTC. `charge` is None when no price applied.
    """

    class Status(models.TextChoices):
        FINISHED = "finished", "ended by itself"
        ABORTED = "aborted", "the caller went away"
        FAILED = "failed", "the engine failed"
        INTERRUPTED = "interrupted", "the scheduler stopped"

    request_id = models.CharField(max_length=64)
    attempt = models.PositiveSmallIntegerField(default=1)
    tenant_id = models.CharField(max_length=32)
    tenant_slug = models.CharField(max_length=64)
    key_id = models.CharField(max_length=32)
    key_name = models.CharField(max_length=64)
    project = models.CharField(max_length=64, default="", blank=True, help_text="the caller's own tag")
    tier = models.CharField(max_length=64)
    model = models.CharField(max_length=200)
    deployment = models.CharField(max_length=200)
    status = models.CharField(max_length=16, choices=Status.choices)
    finish_reason = models.CharField(max_length=32, default="", blank=True)
    reason = models.CharField(max_length=64, default="", blank=True)
    stream = models.BooleanField(default=False)
    prompt_tokens = models.PositiveBigIntegerField()
    cached_tokens = models.PositiveBigIntegerField(default=0)
    completion_tokens = models.PositiveBigIntegerField()
    reasoning_tokens = models.PositiveBigIntegerField(default=0)
    arrived_at = models.DateTimeField()
    dispatched_at = models.DateTimeField()
    first_token_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField()
    wait_time = models.FloatField()
    compute_time = models.FloatField()
    batch_id = models.CharField(max_length=64, default="", blank=True)
    batch_size = models.FloatField(default=0.0)
    attained = models.BooleanField(null=True, blank=True)
    miss_reason = models.CharField(max_length=64, default="", blank=True)
    engine_seconds = models.FloatField(default=0.0, help_text="engine time that the request was charged")
    policy_version = models.PositiveBigIntegerField(default=0)
    price = models.ForeignKey(Price, on_delete=models.PROTECT, related_name="+", null=True, blank=True)
    charge = MoneyField(null=True, blank=True)
    currency = models.CharField(max_length=3, default="", blank=True)
    epoch = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["request_id", "attempt"], name="usage_once_per_attempt"),
        ]
        indexes = [
            models.Index(fields=["tenant_id", "arrived_at"], name="usage_tenant_arrived"),
            models.Index(fields=["arrived_at"], name="usage_arrived"),
            models.Index(fields=["ended_at"], name="usage_ended"),
        ]

    def __str__(self) -> str:
        return f"{self.request_id} attempt {self.attempt}"
