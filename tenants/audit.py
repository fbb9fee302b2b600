"""The audit log: who changed what, from where, from what, to what, and why. Never a secret."""

from __future__ import annotations

import getpass
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.db import models

from .models import AuditEvent, Tenant

# Fields that are left out: nothing that could serve to try or to forge a key, and nothing that only counts.
SECRET = frozenset({"digest", "pepper_version", "password", "last_used_at"})
MAX_REASON = 2000  # characters


@dataclass(frozen=True, slots=True)
class Act:
    """Somebody's doing: who, why and from where."""

    actor: str
    reason: str = ""
    source_ip: str | None = None

    def note(
        self, verb: str, instance: models.Model, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
    ) -> None:
        """Write that `instance` was created, changed or whatever the verb says."""
        record(
            self.actor,
            f"{instance._meta.model_name}.{verb}",
            target_of(instance),
            before=before,
            after=after,
            reason=self.reason,
            source_ip=self.source_ip,
            tenant_id=tenant_id_of(instance),
        )


def record(
    actor: str,
    action: str,
    target: str,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    reason: str = "",
    source_ip: str | None = None,
    tenant_id: str = "",
) -> AuditEvent:
    """Write one event. Call in the transaction of what it tells of. `tenant_id` names the tenant that it concerns."""
    event = AuditEvent(
        actor=actor[:200],
        action=action[:64],
        target=target[:300],
        before=None if before is None else dict(before),
        after=None if after is None else dict(after),
        reason=reason[:MAX_REASON],
        source_ip=_address(source_ip),
        tenant_id=tenant_id,
    )
    event.save(force_insert=True)
    return event


def describe(instance: models.Model) -> dict[str, Any]:
    """The row as JSON values, without what is secret. A relation is shown as what it names."""
    described: dict[str, Any] = {}
    for field in instance._meta.concrete_fields:
        if field.name in SECRET:
            continue
        if field.is_relation:
            related = getattr(instance, field.name)
            described[field.name] = None if related is None else str(related)
        else:
            described[field.name] = _json(getattr(instance, field.name))
    for relation in instance._meta.many_to_many:
        described[relation.name] = sorted(str(related) for related in getattr(instance, relation.name).all())
    return described


def shell_actor(command: str) -> str:
    """Who runs `harness COMMAND`: the user of the operating system."""
    try:
        return f"harness {command} ({getpass.getuser()})"
    except (KeyError, OSError):  # a container's user without a name
        return f"harness {command}"


def target_of(instance: models.Model) -> str:
    return f"{instance._meta.model_name} {instance}"


def tenant_id_of(instance: models.Model) -> str:
    """The id of the tenant that the row belongs to, empty for what belongs to none."""
    if isinstance(instance, Tenant):
        return str(instance.pk)
    if (key := getattr(instance, "key", None)) is not None:
        return tenant_id_of(key)
    return str(getattr(instance, "tenant_id", None) or "")


def _address(text: str | None) -> str | None:
    """What a proxy forwards is text that anybody may have written; only an address is kept."""
    try:
        return str(ipaddress.ip_address((text or "").partition("%")[0]))
    except ValueError:
        return None


def _json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    return value
