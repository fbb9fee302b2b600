"""Somebody leaves. Keys are their tenant's and go on: what a team runs on must not end with whoever set it up.

Who removes a member, or a person, is told which keys were theirs, and so is the audit log: those that must end are
revoked, each as itself.
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db.models import Q
from django.utils import timezone

from .audit import describe
from .models import ApiKey, Membership


def keys_left_by(leaving: Membership | User) -> list[ApiKey]:
    """The valid keys of a member in the tenant that they leave, or of a person in all of them."""
    if isinstance(leaving, Membership):
        keys = ApiKey.objects.filter(owner=leaving.user_id, tenant=leaving.tenant_id)
    else:
        keys = ApiKey.objects.filter(owner=leaving)
    valid = Q(expires_at__isnull=True) | Q(expires_at__gt=timezone.now())
    return list(keys.filter(valid, revoked_at__isnull=True).select_related("tenant"))


def describe_leaving(leaving: Membership | User) -> dict[str, Any]:
    """What the audit log has of a removal: the row, and the keys that it leaves behind."""
    return describe(leaving) | {"keys": [str(key) for key in keys_left_by(leaving)]}
