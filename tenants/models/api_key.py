"""API keys and their secrets. What a secret consists of is never stored: see `tenants/keys.py`."""

from __future__ import annotations

import ipaddress
from typing import Any, ClassVar

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db.models import (
    CASCADE,
    SET_NULL,
    CharField,
    DateTimeField,
    ForeignKey,
    JSONField,
    PositiveSmallIntegerField,
    Q,
    TextChoices,
    UniqueConstraint,
)

from ..scoping import TenantOwned
from .change import Configured
from .tenant import Tenant
from .tier import NAME_HELP, valid_name

MAX_LIST = 100


class Scope(TextChoices):
    """What a key may be used for."""

    INFERENCE = "inference"
    USAGE = "usage"
    ADMIN = "admin"


def default_scopes() -> list[str]:
    return [Scope.INFERENCE.value]


def all_models() -> list[str]:
    return ["*"]


def valid_scopes(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise ValidationError("Give at least one scope.")
    if unknown := [scope for scope in value if scope not in Scope.values]:
        raise ValidationError(f"{unknown[0]!r} is not a scope; use {', '.join(Scope.values)}.")


def valid_models(value: Any) -> None:
    """Model names, or `*` for all. An empty list would read as either nothing or everything, so it is refused."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_LIST:
        raise ValidationError(f"Give 1 to {MAX_LIST} model names, or * for all.")
    if not all(isinstance(name, str) and 1 <= len(name) <= 200 for name in value):
        raise ValidationError("A model name has 1 to 200 characters.")


def valid_addresses(value: Any) -> None:
    """Addresses and networks; the empty list admits every address."""
    if not isinstance(value, list) or len(value) > MAX_LIST:
        raise ValidationError(f"Give at most {MAX_LIST} addresses or networks.")
    for entry in value:
        try:
            ipaddress.ip_network(str(entry))
        except ValueError as error:
            raise ValidationError(f"{entry!r} is not an address or network (like 10.1.0.0/16).") from error


class ApiKey(Configured, TenantOwned):
    """A key of a tenant: a name, rights and limits, which stay what they are when its secret is rotated.

    `owner` is the member whose key it is; without one it is the tenant's.
    """

    tenant = ForeignKey(Tenant, on_delete=CASCADE, related_name="keys")
    name = CharField(max_length=64, validators=[valid_name], help_text=NAME_HELP)
    owner = ForeignKey(settings.AUTH_USER_MODEL, on_delete=SET_NULL, related_name="api_keys", null=True, blank=True)
    scopes = JSONField(default=default_scopes, validators=[valid_scopes])
    models = JSONField(default=all_models, validators=[valid_models])
    allowed_ips = JSONField(default=list, blank=True, validators=[valid_addresses])
    expires_at = DateTimeField(null=True, blank=True)
    revoked_at = DateTimeField(null=True, blank=True)
    created_at = DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["tenant_id", "name", "id"]
        constraints = [
            UniqueConstraint(
                fields=["tenant", "name"],
                condition=Q(revoked_at__isnull=True),
                name="api_key_one_live_key_of_a_name",
                violation_error_message="The tenant has a live key of this name.",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.tenant.slug}/{self.name}"


class KeySecret(Configured, TenantOwned):
    """One secret of a key: `lookup` finds the row, `digest` proves the rest.

    A key has several in the course of its life; one that was rotated out is good until `valid_until`.
    """

    tenant_path: ClassVar[str] = "key__tenant_id"

    key = ForeignKey(ApiKey, on_delete=CASCADE, related_name="secrets")
    lookup = CharField(max_length=32, unique=True, editable=False)
    digest = CharField(max_length=64, editable=False)
    pepper_version = PositiveSmallIntegerField(editable=False)
    created_at = DateTimeField(auto_now_add=True)
    valid_until = DateTimeField(null=True, blank=True)
    last_used_at = DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["-id"]

    @property
    def prefix(self) -> str:
        """What may be shown of it, so that people can tell secrets apart."""
        return f"sk-{self.lookup}…"

    def __str__(self) -> str:
        return self.prefix
