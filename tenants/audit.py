"""The audit log: who changed what, from what, to what, and why. Never a secret."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db import models

from .models import AuditEvent

# Fields that are left out: nothing that could serve to try or to forge a key, and nothing that only counts.
SECRET = frozenset({"digest", "pepper_version", "password", "last_used_at"})


def record(
    actor: str,
    action: str,
    target: str,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    reason: str = "",
    source_ip: str | None = None,
) -> AuditEvent:
    """Write one event. Call in the transaction of what it tells of."""
    event = AuditEvent(
        actor=actor[:200],
        action=action[:64],
        target=target[:300],
        before=None if before is None else dict(before),
        after=None if after is None else dict(after),
        reason=reason,
        source_ip=source_ip,
    )
    event.save(force_insert=True)
    return event


def describe(instance: models.Model) -> dict[str, Any]:
    """The row as JSON values, without what is secret. A foreign key is shown as what it names."""
    described: dict[str, Any] = {}
    for field in instance._meta.concrete_fields:
        if field.name in SECRET:
            continue
        if field.is_relation:
            related = getattr(instance, field.name)
            described[field.name] = None if related is None else str(related)
        else:
            described[field.name] = _json(getattr(instance, field.name))
    return described


def target_of(instance: models.Model) -> str:
    return f"{instance._meta.model_name} {instance}"


def _json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return value
