"""Tiers: what is promised, and how resources are shared when there is not enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models

from .change import Configured

NAME_PATTERN = r"^[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?\Z"
NAME_HELP = "1 to 64 lower-case letters, digits, dots, hyphens, underscores; first and last a letter or digit"
valid_name = RegexValidator(NAME_PATTERN, f"Use {NAME_HELP}.")


def finite(value: float) -> None:
    if not math.isfinite(value):
        raise ValidationError("Enter a finite number.")


def above_zero(value: float) -> None:
    if value <= 0:
        raise ValidationError("Enter a number above 0.")


def below_one(value: float) -> None:
    if value >= 1:
        raise ValidationError("Enter a number below 1.")


Validator = Callable[[Any], None]

SHARE: list[Validator] = [finite, MinValueValidator(0.0), MaxValueValidator(1.0)]
PART: list[Validator] = [finite, MinValueValidator(0.0), below_one]
OBJECTIVE: list[Validator] = [finite, above_zero, below_one]
SECONDS: list[Validator] = [finite, above_zero]


class Tier(Configured):
    """A tier's contract. Times in seconds, shares from 0 to 1; `rank` 1 is the most important and ranks may tie.

    Meaning and defaults are those of `scheduler.core.types.TierSpec`.
    """

    class Contract(models.TextChoices):
        TTFT_TPOT = "ttft_tpot", "first token and pace"
        E2E_TOTAL = "e2e_total", "last token, whatever the length"

    class OnInfeasible(models.TextChoices):
        LATE = "late", "run late"
        REJECT = "reject", "refuse"

    name = models.CharField(max_length=64, unique=True, validators=[valid_name], help_text=NAME_HELP)
    rank = models.PositiveIntegerField(default=1, validators=[MinValueValidator(1)], help_text="1 is the best")
    weight = models.FloatField(default=1.0, validators=[finite, MinValueValidator(0.0)])
    floor = models.FloatField(default=0.0, validators=SHARE, help_text="guaranteed share of the engine, 0 to 1")
    slo_ttft = models.FloatField("SLO TTFT", default=5.0, validators=SECONDS, help_text="seconds to the first token")
    slo_e2e = models.FloatField("SLO E2E", default=5.0, validators=SECONDS, help_text="seconds to the last token")
    slo_tpot = models.FloatField("SLO TPOT", default=0.25, validators=SECONDS, help_text="seconds per further token")
    objective = models.FloatField(default=0.99, validators=OBJECTIVE, help_text="share that must meet the SLO")
    availability = models.FloatField(default=0.99, validators=OBJECTIVE)
    contract = models.CharField(max_length=16, choices=Contract.choices, default=Contract.TTFT_TPOT)
    on_infeasible = models.CharField(max_length=16, choices=OnInfeasible.choices, default=OnInfeasible.LATE)
    headroom = models.FloatField(default=0.20, validators=PART)
    reserved_slots = models.FloatField(default=0.0, validators=PART, help_text="share of slots kept for this tier")
    preemptible = models.BooleanField(default=False)
    queue_max_length = models.PositiveIntegerField(default=10_000, validators=[MinValueValidator(1)])
    queue_max_wait = models.FloatField(default=60.0, validators=SECONDS, help_text="seconds")
    min_slo_threshold = models.FloatField(
        null=True, blank=True, validators=SECONDS, help_text="seconds; empty: the tier's own deadline"
    )
    max_tokens = models.PositiveIntegerField(default=4096, validators=[MinValueValidator(1)])

    class Meta:
        ordering = ["rank", "name"]

    def __str__(self) -> str:
        return self.name
