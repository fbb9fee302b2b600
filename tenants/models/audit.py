"""Who changed what."""

from __future__ import annotations

from django.db import models

from ..scoping import TenantOwned
from .append_only import AppendOnly


class AuditEvent(AppendOnly, TenantOwned):  # type: ignore[misc]  # two managers, of which `objects` is the default
    """One action on one thing. `before` and `after` never hold a secret (see `tenants/audit.py`).

    `tenant_id` is that of the tenant whose thing it is, empty for what concerns the installation; a copy, so that the
    event outlives the tenant.
    """

    at = models.DateTimeField(auto_now_add=True)
    actor = models.CharField(max_length=200)
    action = models.CharField(max_length=64)
    target = models.CharField(max_length=300)
    before = models.JSONField(null=True, blank=True)
    after = models.JSONField(null=True, blank=True)
    reason = models.TextField(default="", blank=True)
    source_ip = models.GenericIPAddressField(null=True, blank=True)
    tenant_id = models.CharField(max_length=32, default="", blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["at"], name="audit_at"),
            models.Index(fields=["target"], name="audit_target"),
            models.Index(fields=["tenant_id", "id"], name="audit_tenant"),
        ]

    def __str__(self) -> str:
        return f"{self.action} {self.target}"
