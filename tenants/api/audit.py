"""The audit log over the API: searched by the page, exported as a stream. Owners see what concerns their tenant."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import msgspec
from django.db.models import Q, QuerySet, TextField
from django.db.models.functions import Cast
from django.http import StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import exports
from tenants.api.base import PAGE, AnyAccept, PageMark, PageSize, TenancyView, Writer, attachment, page_of
from tenants.api.permissions import OWNERS
from tenants.api.schema import documented
from tenants.api.shapes import Out
from tenants.documents import Instant, Part
from tenants.models import AuditEvent, Membership, Tenant
from tenants.scoping import Reach

BATCH = 500  # rows that an export has in memory


class AuditFilter(Part, frozen=True, kw_only=True):
    """`who` and `object` are parts of the names, `action` is a beginning, like `apikey.`; `tenant` is a slug.

    `since` is inclusive, `until` exclusive. `text` is looked for in names, reason and values.
    """

    who: str | None = None
    object: str | None = None
    action: str | None = None
    tenant: str | None = None
    since: Instant | None = None
    until: Instant | None = None
    text: str | None = None


class AuditQuery(AuditFilter, frozen=True, kw_only=True):
    """A page of what the filter leaves. `page` is what `next_page` said."""

    limit: PageSize = PAGE
    page: PageMark | None = None


class AuditDocument(Out, frozen=True, kw_only=True):
    """`source_ip` is null where no address is known, and where the caller's tenant is not the actor's."""

    id: str
    at: datetime
    actor: str
    action: str
    object: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    reason: str
    source_ip: str | None


class AuditPage(Out, frozen=True, kw_only=True):
    data: list[AuditDocument]
    has_more: bool
    next_page: str | None


class AuditAPI(TenancyView):
    """Base: the events that the caller may see."""

    admits = OWNERS

    def events(self, query: AuditFilter) -> QuerySet[AuditEvent]:
        rows = AuditEvent.scoped.within(self.reach)
        for lookup, value in (
            ("actor__icontains", query.who),
            ("target__icontains", query.object),
            ("action__startswith", query.action),
            ("at__gte", query.since),
            ("at__lt", query.until),
        ):
            if value is not None:
                rows = rows.filter(**{lookup: value})
        if query.tenant is not None:
            found = Tenant.scoped.within(self.reach).filter(slug=query.tenant).first()
            rows = rows.filter(tenant_id=str(found.pk)) if found else rows.none()
        return _with_text(rows, query.text) if query.text else rows

    def document(self) -> Shown:
        return Shown(self.reach)


class Shown:
    """An event as the caller sees it: tenants are not told where operators work."""

    def __init__(self, reach: Reach) -> None:
        self._everything = bool(reach.everything)
        if not self._everything:
            members = Membership.scoped.within(reach).values_list("user__username", flat=True)
            self._people = {f"user {name}" for name in members}
            self._keys = tuple(f"key {slug}/" for slug in Tenant.scoped.within(reach).values_list("slug", flat=True))

    def __call__(self, event: AuditEvent) -> AuditDocument:
        return AuditDocument(
            id=str(event.pk),
            at=event.at,
            actor=event.actor,
            action=event.action,
            object=event.target,
            before=event.before,
            after=event.after,
            reason=event.reason,
            source_ip=event.source_ip if self._tells_from_where(event.actor) else None,
        )

    def _tells_from_where(self, actor: str) -> bool:
        return self._everything or actor in self._people or actor.startswith(self._keys)


class AuditView(AuditAPI):
    @documented("audit", query=AuditQuery, responses=AuditPage)
    def get(self, request: Request) -> Response:
        """Who did what, the newest first."""
        query = self.query(AuditQuery)
        return page_of(self.events(query), query, self.document())


class AuditExportView(AuditAPI):
    """Base: all that the filter leaves, the newest first. See `tenants/exports.py` for the form."""

    content_negotiation_class = AnyAccept

    def export(self, write: Writer, kind: str, name: str) -> StreamingHttpResponse:
        rows = self.events(self.query(AuditFilter)).order_by("-pk")
        newest = rows.values_list("pk", flat=True).first() or 0
        rows = rows.filter(pk__lte=newest)  # what comes while it is sent is not of it
        count, document = rows.count(), self.document()
        cells = (tuple(msgspec.structs.astuple(document(event))) for event in rows.iterator(BATCH))
        return attachment(write(AuditDocument.__struct_fields__, cells, count), count, kind, name)


class AuditJsonView(AuditExportView):
    @documented("export_audit_json", query=AuditFilter, responses={(200, "application/json"): OpenApiTypes.OBJECT})
    def get(self, request: Request) -> StreamingHttpResponse:
        """All that the filter leaves, as one JSON array, the newest first."""
        return self.export(exports.json_lines, "application/json", "audit.json")


class AuditCsvView(AuditExportView):
    @documented("export_audit_csv", query=AuditFilter, responses={(200, "text/csv"): OpenApiTypes.STR})
    def get(self, request: Request) -> StreamingHttpResponse:
        """All that the filter leaves, as CSV (RFC 4180), the newest first; text that a spreadsheet would run has an
        apostrophe in front."""
        return self.export(exports.csv_lines, "text/csv", "audit.csv")


def _with_text(rows: QuerySet[AuditEvent], text: str) -> QuerySet[AuditEvent]:
    """Values are stored as JSON, which spells some characters differently."""
    spelled = json.dumps(text)[1:-1]
    rows = rows.annotate(before_text=Cast("before", TextField()), after_text=Cast("after", TextField()))
    found = Q(actor__icontains=text) | Q(target__icontains=text) | Q(reason__icontains=text)
    for value in {text, spelled}:
        found |= Q(before_text__icontains=value) | Q(after_text__icontains=value)
    return rows.filter(found)
