"""What the schedulers serve, how they decide, and which process owns what."""

from __future__ import annotations

from django.core.validators import RegexValidator
from django.db import models

from tenants.models import Configured

valid_model_name = RegexValidator(
    r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}\Z",
    "Use letters, digits, dots, colons, slashes, hyphens and underscores, 1 to 200 characters.",
)


class Deployment(Configured):
    """A model served by an engine. A removed one keeps its row until it is deployed again."""

    model = models.CharField(max_length=200, unique=True, validators=[valid_model_name])
    engine = models.CharField(max_length=64)
    options = models.JSONField(default=dict, blank=True, help_text="the engine's own options")
    pool = models.CharField(max_length=64, default="", blank=True, help_text="empty: a pool of its own")
    enabled = models.BooleanField(default=True)
    removed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["model"]

    def __str__(self) -> str:
        return self.model


class DeploymentStatus(models.Model):
    """How a deployment fares, as the scheduler that runs it says. Not configuration: writing it is no change."""

    class State(models.TextChoices):
        STARTING = "starting"
        READY = "ready"
        FAILED = "failed"
        DRAINING = "draining"
        STOPPED = "stopped"

    deployment = models.OneToOneField(Deployment, on_delete=models.CASCADE, related_name="status")
    state = models.CharField(max_length=16, choices=State.choices)
    message = models.TextField(default="", blank=True)
    hint = models.TextField(default="", blank=True)
    process = models.CharField(max_length=100, default="", blank=True)
    epoch = models.PositiveBigIntegerField(default=0)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        verbose_name_plural = "deployment statuses"

    def __str__(self) -> str:
        return f"{self.deployment} {self.state}"


class PolicyVersion(models.Model):
    """A snapshot of everything that scheduling depends on, as `GET /v1/config` shows it. The newest is in force."""

    version = models.PositiveBigIntegerField(unique=True)
    document = models.JSONField()
    policy = models.JSONField()
    reason = models.TextField(default="", blank=True)
    actor = models.CharField(max_length=200, default="", blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-version"]

    def __str__(self) -> str:
        return f"policy version {self.version}"


class DeadLetter(models.Model):
    """A request that died of us. `payload` and `answer` are JSON as text: texts of callers may hold any character.

    `payload` is what a retry needs, the prompt included; it is forgotten when a retry has finished or the letter is
    discarded, and it is empty for a request that was too large to be kept.
    """

    class Cause(models.TextChoices):
        WAITED_TOO_LONG = "waited_too_long", "waited too long"
        CRASHED_ENGINE_TWICE = "crashed_engine_twice", "engines died under it twice"
        NOT_RESUMABLE = "not_resumable", "could not go on after an engine's death"

    class State(models.TextChoices):
        OPEN = "open"
        RETRIED = "retried"
        DISCARDED = "discarded"

    request_id = models.CharField(max_length=64, db_index=True)
    tenant_id = models.CharField(max_length=32)
    tenant_slug = models.CharField(max_length=64)
    key_id = models.CharField(max_length=32)
    tier = models.CharField(max_length=64)
    model = models.CharField(max_length=200)
    cause = models.CharField(max_length=32, choices=Cause.choices)
    message = models.TextField(default="", blank=True)
    submitted_at = models.DateTimeField()
    died_at = models.DateTimeField()
    payload = models.TextField(default="", blank=True)
    state = models.CharField(max_length=16, choices=State.choices, default=State.OPEN)
    retried_as = models.CharField(max_length=64, default="", blank=True)
    answer = models.TextField(default="", blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["cause", "id"], name="dead_letter_cause")]

    def __str__(self) -> str:
        return f"{self.request_id} {self.cause}"


class SchedulerProcess(models.Model):
    """The owner of a set of pools. A higher epoch of the same name has taken over: see `scheduler/ownership.py`."""

    name = models.CharField(max_length=100, unique=True)
    epoch = models.PositiveBigIntegerField(default=0)
    address = models.CharField(max_length=300)
    lease_until = models.DateTimeField()
    started_at = models.DateTimeField()

    class Meta:
        verbose_name_plural = "scheduler processes"

    def __str__(self) -> str:
        return f"{self.name} epoch {self.epoch}"
