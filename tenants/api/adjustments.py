"""Adjustments over the API: read by whose they are, entered by finance."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Annotated

from msgspec import Meta
from rest_framework.request import Request
from rest_framework.response import Response

from tenants.adjustments import Entry, enter
from tenants.api.base import BODY, PageQuery, TenancyView, answer, find, page_of
from tenants.api.permissions import BOOK_READERS, BOOKKEEPERS
from tenants.api.schema import documented
from tenants.api.shapes import Out
from tenants.documents import Instant, Part
from tenants.exports import plain
from tenants.models import Adjustment, Tenant

# Below zero a credit. As many digits as the ledger keeps.
SignedAmount = Annotated[str, Meta(pattern=r"^-?[0-9]{1,9}(\.[0-9]{1,10})?\Z")]


class NewAdjustment(Part, frozen=True, kw_only=True):
    """`tenant` is a slug. `starts_at` and `ends_at` (exclusive) say which usage is meant, `model` of which model."""

    tenant: str
    amount: SignedAmount
    currency: str
    starts_at: Instant
    ends_at: Instant
    model: Annotated[str, Meta(max_length=200)] = ""
    reason: Annotated[str, Meta(min_length=1, max_length=2000)]


class AdjustmentQuery(PageQuery, frozen=True, kw_only=True):
    """`since` is inclusive, `until` exclusive: when it was entered."""

    tenant: str | None = None
    since: Instant | None = None
    until: Instant | None = None


class AdjustmentDocument(Out, frozen=True, kw_only=True):
    """`amount` is exact. `price_id` is the price that was corrected, as usage records name it; null: by hand."""

    id: str
    at: datetime
    tenant: str
    model: str
    starts_at: datetime
    ends_at: datetime
    amount: str
    currency: str
    reason: str
    author: str
    price_id: str | None


class AdjustmentPage(Out, frozen=True, kw_only=True):
    data: list[AdjustmentDocument]
    has_more: bool
    next_page: str | None


class AdjustmentsView(TenancyView):
    admits = {"GET": BOOK_READERS, "POST": BOOKKEEPERS}

    @documented("adjustments", query=AdjustmentQuery, responses=AdjustmentPage)
    def get(self, request: Request) -> Response:
        """What has been put right about charges, the newest first."""
        query, rows = self.query(AdjustmentQuery), Adjustment.scoped.within(self.reach)
        for lookup, value in (("tenant_slug", query.tenant), ("at__gte", query.since), ("at__lt", query.until)):
            if value is not None:
                rows = rows.filter(**{lookup: value})
        return page_of(rows, query, adjustment_document)

    @documented("adjust", request=NewAdjustment, responses={201: AdjustmentDocument})
    def post(self, request: Request) -> Response:
        """Enter an adjustment. It stands for good: what was wrong about it is put right by another one."""
        body = self.body(NewAdjustment)
        with self.change(body.reason) as run:
            tenant = find(Tenant.scoped.within(self.reach), "tenant", slug=body.tenant)
            entry = Entry(
                tenant_id=str(tenant.pk),
                tenant_slug=tenant.slug,
                starts_at=body.starts_at,
                ends_at=body.ends_at,
                amount=Decimal(body.amount),
                currency=body.currency,
                model=body.model,
            )
            made = enter(entry, BODY, run)
        return answer(adjustment_document(made), 201)


def adjustment_document(row: Adjustment) -> AdjustmentDocument:
    assert row.amount is not None  # the column is never null
    return AdjustmentDocument(
        id=str(row.pk),
        at=row.at,
        tenant=row.tenant_slug,
        model=row.model,
        starts_at=row.starts_at,
        ends_at=row.ends_at,
        amount=plain(row.amount),
        currency=row.currency,
        reason=row.reason,
        author=row.author,
        price_id=None if row.price_id is None else str(row.price_id),
    )
