"""What a set of tiers must fulfil, and the names its fields have in documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models

from .models import Tier

# Path in documents (`harness apply`, `/v1/config`) -> attribute of Tier. Order is the order of display.
FIELDS: Mapping[str, str] = {
    "rank": "rank",
    "weight": "weight",
    "floor": "floor",
    "slo.ttft": "slo_ttft",
    "slo.e2e": "slo_e2e",
    "slo.tpot": "slo_tpot",
    "slo.objective": "objective",
    "availability": "availability",
    "contract": "contract",
    "on_infeasible": "on_infeasible",
    "headroom": "headroom",
    "reserved_slots": "reserved_slots",
    "preemptible": "preemptible",
    "queue.max_length": "queue_max_length",
    "queue.max_wait": "queue_max_wait",
    "min_slo_threshold": "min_slo_threshold",
    "max_tokens": "max_tokens",
}
PATHS = {attribute: path for path, attribute in FIELDS.items()}


class TierError(Exception):
    """A tier, or the tiers together, cannot be. `field` is in the documents' words, like `slo.ttft`."""

    def __init__(self, tier: str, field: str, message: str) -> None:
        super().__init__(f"{tier}.{field}: {message}")
        self.tier = tier
        self.field = field
        self.message = message

    @property
    def path(self) -> str:
        return f"{self.tier}.{self.field}"


def check_tier(tier: Tier) -> None:
    """Raises TierError for the first field of `tier` that is out of range."""
    try:
        tier.clean_fields()
    except ValidationError as error:
        attribute, messages = next(iter(error.message_dict.items()))
        raise TierError(tier.name, PATHS.get(attribute, attribute), messages[0]) from error


def check_tiers(tiers: Iterable[Tier]) -> None:
    """Raises TierError unless each tier is valid and all fit together. Ranks may tie; no tier at all is fine."""
    tiers = list(tiers)
    for tier in tiers:
        check_tier(tier)
    if tiers and not any(tier.weight > 0 for tier in tiers):
        raise TierError(tiers[0].name, "weight", "At least one tier needs a weight above 0.")
    # Rounded: 0.1 + 0.2 + 0.7 must count as 1.
    if round(sum(tier.floor for tier in tiers), 9) > 1:
        largest = max(tiers, key=lambda tier: tier.floor)
        raise TierError(largest.name, "floor", "The floors of all tiers add up to more than 1.")
    if round(sum(tier.reserved_slots for tier in tiers), 9) >= 1:
        largest = max(tiers, key=lambda tier: tier.reserved_slots)
        raise TierError(largest.name, "reserved_slots", "The reserved slots of all tiers must stay below 1.")


def to_document(tier: Tier) -> dict[str, Any]:
    """The tier as documents show it, nested."""
    document: dict[str, Any] = {}
    for path, attribute in FIELDS.items():
        *groups, last = path.split(".")
        inner = document
        for group in groups:
            inner = inner.setdefault(group, {})
        value = getattr(tier, attribute)
        inner[last] = float(value) if _kind(attribute) == "FloatField" and value is not None else value
    return document


def assign(tier: Tier, values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Set the fields given in a nested document; the paths of those that changed.

    Raises TierError for an unknown field or a value of a wrong type. Ranges are `check_tiers`' business.
    """
    changed: list[str] = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        if path in FIELDS:
            checked = _typed(tier, path, value)
            if getattr(tier, FIELDS[path]) != checked:
                setattr(tier, FIELDS[path], checked)
                changed.append(path)
        elif any(known.startswith(f"{path}.") for known in FIELDS) and isinstance(value, Mapping):
            changed += assign(tier, value, f"{path}.")
        else:
            raise TierError(tier.name, path, "There is no such field.")
    return changed


def _field(attribute: str) -> models.Field[Any, Any]:
    field = Tier._meta.get_field(attribute)
    assert isinstance(field, models.Field)
    return field


def _kind(attribute: str) -> str:
    return _field(attribute).get_internal_type()


EXPECTED = {
    "FloatField": "a finite number",
    "PositiveIntegerField": "a whole number",
    "BooleanField": "true or false",
    "CharField": "a string",
}


def _typed(tier: Tier, path: str, value: Any) -> Any:
    """`value` if it is of the field's kind: JSON numbers for numbers (true is not one), strings for names; null where
    there may be none.
    """
    if value is None and _field(FIELDS[path]).null:
        return None
    kind = _kind(FIELDS[path])
    # The bounds keep out infinities, NaN and integers that no column holds.
    number = isinstance(value, int | float) and not isinstance(value, bool) and -1e15 < value < 1e15
    if kind == "FloatField" and number:
        return float(value)
    if kind == "PositiveIntegerField" and number and value == int(value):
        return int(value)
    if kind == "BooleanField" and isinstance(value, bool):
        return value
    if kind == "CharField" and isinstance(value, str):
        return value
    raise TierError(tier.name, path, f"Expected {EXPECTED[kind]}.")
