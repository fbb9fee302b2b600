"""Tenants and their limits over the API, and who works for them."""

from __future__ import annotations

from typing import Literal

from django.db.models import QuerySet
from rest_framework.request import Request
from rest_framework.response import Response

from tenants.api.base import BODY, PageQuery, TenancyView, answer, find, page_of, rights
from tenants.api.errors import Conflict
from tenants.api.permissions import MEMBERS, OPERATORS, READERS
from tenants.api.schema import documented
from tenants.api.shapes import (
    Because,
    MembershipPage,
    NewTenant,
    TenantChange,
    TenantDocument,
    TenantPage,
    membership_document,
    tenant_document,
)
from tenants.apply import apply_tenant
from tenants.documents import TenantPart, TenantTerms
from tenants.models import Membership, Tenant


class TenantQuery(PageQuery, frozen=True, kw_only=True):
    """`tier` is a name, `slug` a part of the tenant's."""

    tier: str | None = None
    state: Literal["active", "suspended"] | None = None
    slug: str | None = None


class MembershipQuery(PageQuery, frozen=True, kw_only=True):
    """`tenant` is a slug, `user` a name."""

    tenant: str | None = None
    user: str | None = None
    role: Literal["operator", "finance", "owner", "developer"] | None = None


class TenantsAPI(TenancyView):
    """Base: the tenants that the caller may see."""

    def tenants(self) -> QuerySet[Tenant]:
        return Tenant.scoped.within(self.reach).select_related("tier").prefetch_related("limits")


class TenantsView(TenantsAPI):
    admits = {"GET": READERS, "POST": OPERATORS}

    @documented("tenants", query=TenantQuery, responses=TenantPage)
    def get(self, request: Request) -> Response:
        """Tenants, the newest first."""
        query, rows = self.query(TenantQuery), self.tenants()
        for lookup, value in (("tier__name", query.tier), ("state", query.state), ("slug__contains", query.slug)):
            if value is not None:
                rows = rows.filter(**{lookup: value})
        return page_of(rows, query, tenant_document)

    @documented("create_tenant", request=NewTenant, responses={201: TenantDocument})
    def post(self, request: Request) -> Response:
        """Make a tenant, with its limits. Its keys come after."""
        body = self.body(NewTenant)
        with self.change(body.reason) as run:
            if self.tenants().filter(slug=body.slug).exists():
                raise Conflict(f"There is a tenant {body.slug!r} already.")
            apply_tenant(TenantPart(slug=body.slug, state=body.state, **rights(body, TenantTerms)), BODY, run)
        return answer(tenant_document(find(self.tenants(), "tenant", slug=body.slug)), 201)


class TenantView(TenantsAPI):
    admits = {"GET": READERS, "PATCH": OPERATORS, "DELETE": OPERATORS}

    @documented("tenant", responses=TenantDocument)
    def get(self, request: Request, slug: str) -> Response:
        """One tenant with its limits."""
        return answer(tenant_document(find(self.tenants(), "tenant", slug=slug)))

    @documented("change_tenant", request=TenantChange, responses=TenantDocument)
    def patch(self, request: Request, slug: str) -> Response:
        """Change a tenant and its limits, suspend it, or let it in again."""
        body = self.body(TenantChange)
        with self.change(body.reason) as run:
            tenant = find(self.tenants(), "tenant", slug=slug)
            apply_tenant(TenantPart(slug=tenant.slug, state=body.state, **rights(body, TenantTerms)), BODY, run)
        return answer(tenant_document(find(self.tenants(), "tenant", slug=slug)))

    @documented("remove_tenant", query=Because, responses={204: None})
    def delete(self, request: Request, slug: str) -> Response:
        """Remove a tenant with its keys and limits. What it has used stays in the ledger."""
        with self.change(self.query(Because).reason) as run:
            tenant = find(self.tenants(), "tenant", slug=slug)
            apply_tenant(TenantPart(slug=tenant.slug, state="absent"), BODY, run)
        return Response(status=204)


class MembershipsView(TenancyView):
    admits = MEMBERS

    @documented("memberships", query=MembershipQuery, responses=MembershipPage)
    def get(self, request: Request) -> Response:
        """Who works for whom, and as what."""
        query = self.query(MembershipQuery)
        rows = Membership.scoped.within(self.reach).select_related("user", "tenant")
        for lookup, value in (("tenant__slug", query.tenant), ("user__username", query.user), ("role", query.role)):
            if value is not None:
                rows = rows.filter(**{lookup: value})
        return page_of(rows, query, membership_document)
