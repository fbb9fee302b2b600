"""What goes in and out. Bodies are parts of `harness apply` documents, so that both have the same fields and rules."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

import msgspec
from django.utils import timezone
from msgspec import Meta

from tenants.documents import Budget, KeyRights, Limits, ModelLimits, Part, TenantTerms
from tenants.models import ApiKey, KeySecret, Limit, Membership, Tenant, Tier
from tenants.tiers import to_document

Reason = Annotated[str, Meta(max_length=2000)]

# --- in -------------------------------------------------------------------------------------------------------------


class NewTenant(TenantTerms, frozen=True, kw_only=True):
    """Without a name it is called by its slug. `reason` goes to the audit log."""

    slug: str
    tier: str
    state: Literal["active", "suspended"] = "active"
    reason: Reason = ""


class TenantChange(TenantTerms, frozen=True, kw_only=True):
    """What is left out stays; a limit that is null goes."""

    state: Literal["active", "suspended"] | msgspec.UnsetType = msgspec.UNSET
    reason: Reason = ""


class TierChange(Part, frozen=True, kw_only=True):
    """The defaults for the tier's tenants. Everything else of a tier is changed by `POST /v1/config`."""

    limits: Limits
    reason: Reason = ""


class NewKey(KeyRights, frozen=True, kw_only=True):
    """`tenant` may be left out by those who belong to one only."""

    name: str
    tenant: str | None = None
    reason: Reason = ""


class KeyChange(KeyRights, frozen=True, kw_only=True):
    """What is left out stays; a limit that is null goes."""

    reason: Reason = ""


class Rotation(Part, frozen=True, kw_only=True):
    """`overlap`: seconds for which the secrets that the key has now are still good."""

    overlap: Annotated[float, Meta(ge=0, le=90 * 86400)] = 86400.0
    reason: Reason = ""


class Because(Part, frozen=True, kw_only=True):
    reason: Reason = ""


# --- out ------------------------------------------------------------------------------------------------------------


class Out(msgspec.Struct, frozen=True, kw_only=True):
    """Base of answers. Instants are ISO 8601 in UTC."""


class SecretDocument(Out, frozen=True, kw_only=True):
    """One secret of a key: what may be shown of it."""

    prefix: str
    created_at: datetime
    valid_until: datetime | None
    last_used_at: datetime | None


class KeyDocument(Out, frozen=True, kw_only=True):
    """A key with its secrets, the newest first. `owner` is a user's name, null for the tenant's own key."""

    id: str
    tenant: str
    name: str
    owner: str | None
    state: Literal["active", "expired", "revoked"]
    scopes: list[str]
    models: list[str]
    allowed_ips: list[str]
    expires_at: datetime | None
    revoked_at: datetime | None
    created_at: datetime
    limits: Limits
    secrets: list[SecretDocument]


class IssuedKeyDocument(KeyDocument, frozen=True, kw_only=True):
    """The only answer that ever holds a key's `secret`."""

    secret: str

    def __repr__(self) -> str:
        return f"IssuedKeyDocument(id={self.id!r}, name={self.name!r})"


class TenantDocument(Out, frozen=True, kw_only=True):
    id: str
    slug: str
    name: str
    tier: str
    timezone: str
    state: str
    created_at: datetime
    limits: Limits


class TierDocument(Out, frozen=True, kw_only=True):
    """`terms` has the fields that `GET /v1/config` shows of the tier."""

    name: str
    terms: dict[str, Any]
    limits: Limits


class MembershipDocument(Out, frozen=True, kw_only=True):
    """`tenant` is null for those who work for the installation."""

    id: str
    user: str
    role: str
    tenant: str | None


class KeyPage(Out, frozen=True, kw_only=True):
    data: list[KeyDocument]
    has_more: bool
    next_page: str | None


class TenantPage(Out, frozen=True, kw_only=True):
    data: list[TenantDocument]
    has_more: bool
    next_page: str | None


class MembershipPage(Out, frozen=True, kw_only=True):
    data: list[MembershipDocument]
    has_more: bool
    next_page: str | None


class Tiers(Out, frozen=True, kw_only=True):
    """The best rank first."""

    data: list[TierDocument]


# --- from rows ------------------------------------------------------------------------------------------------------


def limits_document(limits: Iterable[Limit]) -> Limits:
    """As a document gives them: what is read can be sent back, and changes nothing."""
    by_model: dict[str, dict[str, Any]] = {"": _no_limits()}
    for limit in limits:
        fields = by_model.setdefault(limit.model, _no_limits())
        if limit.kind == Limit.Kind.BUDGET:
            fields["budgets"].append(_budget(limit))
        else:
            fields[limit.kind] = limit.value
    everywhere = by_model.pop("")
    return Limits(**everywhere, models={model: ModelLimits(**fields) for model, fields in by_model.items()})


def _no_limits() -> dict[str, Any]:
    return {"rpm": None, "tpm": None, "concurrency": None, "budgets": []}


def _budget(limit: Limit) -> Budget:
    quantity: dict[str, Any] = {"tokens": limit.value}
    if limit.amount is not None:
        quantity = {"amount": f"{Decimal(limit.amount).normalize():f}", "currency": limit.currency}
    return Budget(period=limit.period, hard=limit.hard, alerts=limit.alerts, **quantity)  # type: ignore[arg-type]


def tenant_document(tenant: Tenant) -> TenantDocument:
    return TenantDocument(
        id=str(tenant.pk),
        slug=tenant.slug,
        name=tenant.name,
        tier=tenant.tier.name,
        timezone=tenant.timezone,
        state=tenant.state,
        created_at=tenant.created_at,
        limits=limits_document(tenant.limits.all()),
    )


def tier_document(tier: Tier) -> TierDocument:
    return TierDocument(name=tier.name, terms=to_document(tier), limits=limits_document(tier.limits.all()))


def membership_document(membership: Membership) -> MembershipDocument:
    return MembershipDocument(
        id=str(membership.pk),
        user=membership.user.get_username(),
        role=membership.role,
        tenant=membership.tenant.slug if membership.tenant else None,
    )


def key_document(key: ApiKey) -> KeyDocument:
    return KeyDocument(**_key_fields(key))


def issued_key_document(key: ApiKey, secret: str) -> IssuedKeyDocument:
    return IssuedKeyDocument(**_key_fields(key), secret=secret)


def _key_fields(key: ApiKey) -> dict[str, Any]:
    return {
        "id": str(key.pk),
        "tenant": key.tenant.slug,
        "name": key.name,
        "owner": key.owner.get_username() if key.owner else None,
        "state": _state(key),
        "scopes": key.scopes,
        "models": key.models,
        "allowed_ips": key.allowed_ips,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "created_at": key.created_at,
        "limits": limits_document(key.limits.all()),
        "secrets": [_secret_document(secret) for secret in key.secrets.all()],
    }


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= timezone.now() else "active"


def _secret_document(secret: KeySecret) -> SecretDocument:
    return SecretDocument(
        prefix=secret.prefix,
        created_at=secret.created_at,
        valid_until=secret.valid_until,
        last_used_at=secret.last_used_at,
    )
