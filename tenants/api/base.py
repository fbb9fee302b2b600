"""What the views of tenancy have in common: who calls, what was sent, one change, pages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from asgiref.sync import sync_to_async
from django.db import models
from django.http import Http404, StreamingHttpResponse
from msgspec import Meta
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from tenants import exports
from tenants.api.caller import Caller
from tenants.api.permissions import admitted
from tenants.apply import Run
from tenants.changes import one_change
from tenants.documents import DocumentError, Part, read_part
from tenants.models import ApiKey, Membership, UsageRecord
from tenants.models.change import lock
from tenants.scoping import Reach

PAGE, LARGEST_PAGE = 50, 200
PART = 1_000  # lines of an export that are sent at a time
BODY = "body"  # where the paths of mistakes begin, which the caller is told without it

PartT = TypeVar("PartT", bound=Part)
ModelT = TypeVar("ModelT", bound=models.Model)
Writer = Callable[[Sequence[str], Iterable[Sequence[exports.Cell]], int], Iterator[str]]


PageSize = Annotated[int, Meta(ge=1, le=LARGEST_PAGE)]
PageMark = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class Paged(Protocol):
    """A query that asks for a page. `page` is what `next_page` said."""

    @property
    def limit(self) -> int: ...
    @property
    def page(self) -> int | None: ...


class PageQuery(Part, frozen=True, kw_only=True):
    """`page` is what `next_page` said."""

    limit: PageSize = PAGE
    page: PageMark | None = None


class AnyAccept(BaseContentNegotiation):
    """The address says what comes, whatever the client would like."""

    def select_renderer(self, request: Request, renderers: Any, format_suffix: str | None = None) -> Any:
        return renderers[0], renderers[0].media_type


class TenancyView(APIView):
    """Base. Rows that belong to tenants are read `within` the reach of the caller."""

    @property
    def caller(self) -> Caller:
        caller: object = self.request.auth
        assert isinstance(caller, Caller)  # the permission has seen to it
        return caller

    @property
    def reach(self) -> Reach:
        """The tenants for which the caller may do this."""
        admits = admitted(self, self.request.method or "")
        assert admits is not None  # the permission has seen to it
        return self.caller.reach(admits)

    def usage(self) -> models.QuerySet[UsageRecord]:
        """The ledger's rows that the caller may see; a developer's are those of their own keys."""
        rows = UsageRecord.scoped.within(self.reach)
        if self.reach.everything or self.caller.user is None:
            return rows
        own = ApiKey.scoped.within(self.reach).filter(owner=self.caller.user).values_list("pk", flat=True)
        owned = self.caller.tenants_as({Membership.Role.OWNER})
        return rows.filter(models.Q(tenant_id__in=owned) | models.Q(key_id__in=[str(key) for key in own]))

    def body(self, kind: type[PartT]) -> PartT:
        """What was sent. Raises DocumentError naming the first field at fault."""
        return read_part(_object(self.request.data), kind)

    def query(self, kind: type[PartT]) -> PartT:
        """The parameters of the address. Raises DocumentError, also for one that there is not."""
        return read_part(self.request.query_params.dict(), kind, strict=False)

    @contextmanager
    def change(self, reason: str) -> Iterator[Run]:
        """One change, whole or not at all, that waits for others. Raises DocumentError in the caller's words."""
        act = self.caller.act(reason)
        try:
            with one_change(actor=act.actor, reason=reason):
                lock()
                yield Run(act)
        except DocumentError as error:
            raise DocumentError(error.path.removeprefix(BODY).lstrip("."), error.message) from error


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise DocumentError("", "The body must be a JSON object.")
    return data


def find(rows: models.QuerySet[ModelT], what: str, **by: Any) -> ModelT:
    """The row, or the same 404 for what is not there and for what is somebody else's."""
    found = rows.filter(**by).first()
    if found is None:
        raise Http404(f"There is no such {what}.")
    return found


def page_of(rows: models.QuerySet[ModelT], query: Paged, document: Callable[[ModelT], msgspec.Struct]) -> Response:
    """The newest first, by id."""
    if query.page is not None:
        rows = rows.filter(pk__lt=query.page)
    found = list(rows.order_by("-pk")[: query.limit + 1])
    has_more = len(found) > query.limit
    found = found[: query.limit]
    return Response(
        {
            "data": [msgspec.to_builtins(document(row)) for row in found],
            "has_more": has_more,
            "next_page": str(found[-1].pk) if has_more else None,
        }
    )


def attachment(lines: Iterator[str], count: int, kind: str, name: str) -> StreamingHttpResponse:
    """A file of any length, made while it is sent. See `tenants/exports.py` for how a whole one is told."""
    response = StreamingHttpResponse(_in_parts(lines), content_type=f"{kind}; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    response["X-Row-Count"] = str(count)
    return response


async def _in_parts(lines: Iterator[str]) -> AsyncIterator[bytes]:
    """Lines that wait for the database, read beside the event loop. What they raise cuts the connection."""
    take = sync_to_async(lambda: "".join(islice(lines, PART)))
    while part := await take():
        yield part.encode()


def answer(document: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.to_builtins(document), status=status)


def rights(part: Part, kind: type[Part]) -> dict[str, Any]:
    """The fields that `part` shares with `kind`, as they are."""
    return {name: getattr(part, name) for name in kind.__struct_fields__}
