"""Who changed what."""

from __future__ import annotations

from django.db import models

from .append_only import AppendOnly


class AuditEvent(AppendOnly):
    """One action on one thing. `before` and `after` never hold a secret (see `tenants/audit.py`)."""

    at = models.DateTimeField(auto_now_add=True)
    actor = models.CharField(max_length=200)
    action = models.CharField(max_length=64)
    target = models.CharField(max_length=300)
    before = models.JSONField(null=True, blank=True)
    after = models.JSONField(null=True, blank=True)
    reason = models.TextField(default="", blank=True)
    source_ip = models.GenericIPAddressField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["at"], name="audit_at"), models.Index(fields=["target"], name="audit_target")]

    def __str__(self) -> str:
        return f"{self.action} {self.target}"
