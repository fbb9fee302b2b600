"""Tenants and the people who work for them."""

from __future__ import annotations

from typing import ClassVar, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q

from ..scoping import TenantOwned
from .change import Configured
from .tier import NAME_HELP, Tier, valid_name


def valid_timezone(name: str) -> None:
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:  # OSError: a folder of the database, like "Asia"
        raise ValidationError(f"{name!r} is not a time zone; use a name like Europe/Berlin.") from error


class Tenant(Configured, TenantOwned):
    """A customer: everything it owns is found through it. Budget periods follow its time zone."""

    tenant_path: ClassVar[str] = "pk"

    class State(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"

    slug = models.CharField(max_length=64, unique=True, validators=[valid_name], help_text=NAME_HELP)
    name = models.CharField(max_length=200)
    tier = models.ForeignKey(Tier, on_delete=models.PROTECT, related_name="tenants")
    timezone = models.CharField(max_length=64, default="UTC", validators=[valid_timezone])
    state = models.CharField(max_length=16, choices=State.choices, default=State.ACTIVE)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["slug"]

    def __str__(self) -> str:
        return self.slug


class Membership(TenantOwned):
    """What a user may do. Operators and finance work for the installation, owners and developers for one tenant."""

    class Role(models.TextChoices):
        OPERATOR = "operator"
        FINANCE = "finance"
        OWNER = "owner"
        DEVELOPER = "developer"

    TENANT_ROLES: ClassVar = (Role.OWNER, Role.DEVELOPER)

    objects: ClassVar[models.Manager[Self]] = models.Manager()
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="memberships", null=True, blank=True)
    role = models.CharField(max_length=16, choices=Role.choices)

    class Meta:
        ordering = ["user_id", "tenant_id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(role__in=["operator", "finance"], tenant__isnull=True)
                | Q(role__in=["owner", "developer"], tenant__isnull=False),
                name="membership_role_fits_tenant",
                violation_error_message="Owners and developers need a tenant; operators and finance have none.",
            ),
            models.UniqueConstraint(fields=["user", "tenant"], name="membership_one_role_per_tenant"),
            models.UniqueConstraint(
                fields=["user", "role"], condition=Q(tenant__isnull=True), name="membership_one_of_each_staff_role"
            ),
        ]

    def __str__(self) -> str:
        where = f" of {self.tenant}" if self.tenant else ""
        return f"{self.user} as {self.role}{where}"
