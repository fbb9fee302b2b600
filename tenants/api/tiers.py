"""Tiers over the API: to be read, with the limits that are defaults for their tenants."""

from __future__ import annotations

from django.db.models import QuerySet
from rest_framework.request import Request
from rest_framework.response import Response

from tenants.api.base import BODY, TenancyView, answer, find
from tenants.api.permissions import OPERATORS, READERS
from tenants.api.schema import documented
from tenants.api.shapes import TierChange, TierDocument, Tiers, tier_document
from tenants.apply import apply_limits
from tenants.models import Tenant, Tier


class TiersAPI(TenancyView):
    """Base: all tiers for operators, for others those of their tenants."""

    def tiers(self) -> QuerySet[Tier]:
        rows = Tier.objects.prefetch_related("limits")
        if not self.caller.operates:
            rows = rows.filter(pk__in=Tenant.scoped.within(self.reach).values("tier"))
        return rows


class TiersView(TiersAPI):
    admits = READERS

    @documented("tiers", responses=Tiers)
    def get(self, request: Request) -> Response:
        """Tiers, the best rank first."""
        return answer(Tiers(data=[tier_document(tier) for tier in self.tiers()]))


class TierView(TiersAPI):
    admits = {"GET": READERS, "PATCH": OPERATORS}

    @documented("tier", responses=TierDocument)
    def get(self, request: Request, name: str) -> Response:
        """One tier with its limits."""
        return answer(tier_document(find(self.tiers(), "tier", name=name)))

    @documented("change_tier_limits", request=TierChange, responses=TierDocument)
    def patch(self, request: Request, name: str) -> Response:
        """Change the limits of a tier; its other terms are changed by `POST /v1/config`."""
        body = self.body(TierChange)
        with self.change(body.reason) as run:
            tier = find(self.tiers(), "tier", name=name)
            apply_limits(body.limits, {"tier": tier}, f"{BODY}.limits", run)
        return answer(tier_document(find(self.tiers(), "tier", name=name)))
