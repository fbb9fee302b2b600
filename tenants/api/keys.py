"""Keys over the API. Operators manage all, owners those of their tenant, developers their own."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from django.db.models import Q, QuerySet
from django.utils import timezone
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from tenants.api.base import BODY, PageQuery, TenancyView, answer, find, page_of, rights
from tenants.api.caller import Caller
from tenants.api.errors import Conflict
from tenants.api.permissions import MEMBERS
from tenants.api.schema import documented
from tenants.api.shapes import (
    Because,
    IssuedKeyDocument,
    KeyChange,
    KeyDocument,
    KeyPage,
    NewKey,
    Rotation,
    issued_key_document,
    key_document,
)
from tenants.apply import apply_key
from tenants.documents import DocumentError, KeyPart, KeyRights
from tenants.key_changes import enable, revoke, rotate
from tenants.models import ApiKey, Membership, Scope, Tenant


class KeyQuery(PageQuery, frozen=True, kw_only=True):
    """`tenant` is a slug, `owner` a user's name, `name` a part of the key's name."""

    tenant: str | None = None
    owner: str | None = None
    name: str | None = None
    state: Literal["active", "expired", "revoked"] | None = None


class KeysAPI(TenancyView):
    """Base: the keys that the caller manages."""

    admits = MEMBERS

    def keys(self) -> QuerySet[ApiKey]:
        """All of a tenant's for operators and its owners, a developer's own."""
        rows = ApiKey.scoped.within(self.reach)
        if not self.caller.operates:
            owned = self.caller.tenants_as({Membership.Role.OWNER})
            rows = rows.filter(Q(tenant_id__in=owned) | Q(owner=self.caller.user))
        return rows.select_related("tenant", "owner").prefetch_related("limits", "secrets")

    def key(self, key_id: int) -> ApiKey:
        return find(self.keys(), "key", pk=key_id)

    def changeable(self, key_id: int) -> ApiKey:
        """The key, unless it may do more than the caller. Call inside the change. Raises PermissionDenied."""
        key = self.key(key_id)
        _may_grant(self.caller, key.tenant, key.scopes)
        return key


class KeysView(KeysAPI):
    @documented("keys", query=KeyQuery, responses=KeyPage)
    def get(self, request: Request) -> Response:
        """Keys, the newest first."""
        query, rows = self.query(KeyQuery), self.keys()
        now = timezone.now()
        states = {
            "active": Q(revoked_at__isnull=True) & (Q(expires_at__isnull=True) | Q(expires_at__gt=now)),
            "expired": Q(revoked_at__isnull=True, expires_at__lte=now),
            "revoked": Q(revoked_at__isnull=False),
        }
        if query.state is not None:
            rows = rows.filter(states[query.state])
        for lookup, value in (
            ("tenant__slug", query.tenant),
            ("owner__username", query.owner),
            ("name__contains", query.name),
        ):
            if value is not None:
                rows = rows.filter(**{lookup: value})
        return page_of(rows, query, key_document)

    @documented("create_key", request=NewKey, responses={201: IssuedKeyDocument})
    def post(self, request: Request) -> Response:
        """Make a key. Its secret is in this answer and nowhere else, ever."""
        body = self.body(NewKey)
        with self.change(body.reason) as run:
            tenant = self._tenant(body.tenant)
            if isinstance(body.scopes, list):
                _may_grant(self.caller, tenant, body.scopes)
            if tenant.keys.filter(name=body.name, revoked_at__isnull=True).exists():
                raise Conflict(f"{tenant.slug} has a key {body.name!r} already.")
            part = KeyPart(name=body.name, **rights(body, KeyRights))
            apply_key(part, tenant, BODY, run, owner=self.caller.user if self._is_members(tenant) else None)
            (made,) = run.result.keys
            key = self.keys().get(tenant=tenant, name=body.name, revoked_at__isnull=True)
        return answer(issued_key_document(key, made["key"]), 201)

    def _tenant(self, slug: str | None) -> Tenant:
        mine = Tenant.scoped.within(self.reach)
        if slug is not None:
            return find(mine, "tenant", slug=slug)
        only = list(mine[:2])
        if len(only) != 1:
            raise DocumentError("tenant", "Say whose the key is to be.")
        return only[0]

    def _is_members(self, tenant: Tenant) -> bool:
        """Whether a key that the caller makes is the caller's own: operators make tenants' keys."""
        return str(tenant.pk) in self.caller.roles


class KeyView(KeysAPI):
    @documented("key", responses=KeyDocument)
    def get(self, request: Request, key_id: int) -> Response:
        """One key."""
        return answer(key_document(self.key(key_id)))

    @documented("change_key", request=KeyChange, responses=KeyDocument)
    def patch(self, request: Request, key_id: int) -> Response:
        """Change what a live key may do, and its limits."""
        body = self.body(KeyChange)
        with self.change(body.reason) as run:
            key = self.changeable(key_id)
            if isinstance(body.scopes, list):
                _may_grant(self.caller, key.tenant, body.scopes)
            if key.revoked_at is not None:
                raise Conflict("The key is revoked; enable it first.")
            apply_key(KeyPart(name=key.name, **rights(body, KeyRights)), key.tenant, BODY, run)
        return answer(key_document(self.key(key_id)))


class RotateKeyView(KeysAPI):
    @documented("rotate_key", request=Rotation, responses=IssuedKeyDocument)
    def post(self, request: Request, key_id: int) -> Response:
        """Give a key a new secret, which is in this answer and nowhere else. The old ones are good for `overlap`."""
        body = self.body(Rotation)
        with self.change(body.reason) as run:
            secret = rotate(self.changeable(key_id), timedelta(seconds=body.overlap), run.act)
        return answer(issued_key_document(self.key(key_id), secret))


class RevokeKeyView(KeysAPI):
    @documented("revoke_key", request=Because, responses=KeyDocument)
    def post(self, request: Request, key_id: int) -> Response:
        """End a key: within two seconds every worker refuses it. Running streams end by themselves."""
        body = self.body(Because)
        with self.change(body.reason) as run:
            revoke(self.changeable(key_id), run.act)
        return answer(key_document(self.key(key_id)))


class EnableKeyView(KeysAPI):
    @documented("enable_key", request=Because, responses=KeyDocument)
    def post(self, request: Request, key_id: int) -> Response:
        """Take a revocation back: the key's secrets are good again, as long as they are in their time."""
        body = self.body(Because)
        with self.change(body.reason) as run:
            enable(self.changeable(key_id), run.act)
        return answer(key_document(self.key(key_id)))


def _may_grant(caller: Caller, tenant: Tenant, scopes: list[str]) -> None:
    """Nobody manages a key that may do more than they: `admin` runs the installation, `usage` tells of the tenant's
    every key."""
    may = {Scope.INFERENCE.value}
    if caller.sees_all_of(str(tenant.pk)):
        may.add(Scope.USAGE.value)
    if caller.operates:
        may.add(Scope.ADMIN.value)
    if beyond := [scope for scope in Scope.values if scope in scopes and scope not in may]:
        raise PermissionDenied(f"Your role does not manage keys with the scope '{beyond[0]}'.")
