"""What was used, for scripts: sums by time and group, and the ledger's rows themselves."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from django.db.models import QuerySet
from django.http import StreamingHttpResponse
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from tenants import exports, reports
from tenants.api.base import AnyAccept, TenancyView, Writer, attachment
from tenants.api.permissions import BOOK_READERS, USAGE_READERS
from tenants.models import Adjustment, UsageRecord
from tenants.models.retention import kept_since
from tenants.models.tenant import valid_timezone

PAGE, LARGEST_PAGE = 200, 1_440  # buckets: a day has so many minutes


class SpanSerializer(serializers.Serializer[dict[str, Any]]):
    """`[start_time, end_time)` in Unix seconds, by default today on the clock of `timezone`."""

    start_time = serializers.IntegerField(min_value=0, max_value=2**33, required=False)
    end_time = serializers.IntegerField(min_value=0, max_value=2**33, required=False)
    timezone = serializers.CharField(default="UTC", validators=[valid_timezone])
    tenant = serializers.CharField(required=False, help_text="only this tenant's, by its slug")

    def validate(self, query: dict[str, Any]) -> dict[str, Any]:
        if unknown := sorted(set(self.initial_data) - set(self.fields)):
            raise serializers.ValidationError({unknown[0]: "There is no such parameter."})
        start, end = reports.today(query["timezone"], time.time())
        query = {"start_time": start, "end_time": end} | query
        if query["start_time"] > query["end_time"]:
            raise serializers.ValidationError({"end_time": "The end is before the start."})
        return query


class ReportSerializer(SpanSerializer):
    """`page` is what `next_page` said."""

    bucket_width = serializers.ChoiceField(choices=list(reports.WIDTHS), default="1d")
    group_by = serializers.CharField(default="", allow_blank=True, help_text=f"some of {','.join(reports.GROUPS)}")
    limit = serializers.IntegerField(min_value=1, max_value=LARGEST_PAGE, default=PAGE, help_text="buckets of a page")
    page = serializers.IntegerField(min_value=0, max_value=2**33, required=False)

    def validate_group_by(self, names: str) -> tuple[str, ...]:
        groups = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
        for name in groups:
            if name not in reports.GROUPS:
                raise serializers.ValidationError(f"{name!r} is not one of {', '.join(reports.GROUPS)}.")
        return groups


class ResultSerializer(serializers.Serializer[dict[str, Any]]):
    """The sums of one group in one currency. `cost` is exact, as text; null where nothing had a price."""

    tenant = serializers.CharField(required=False)
    key = serializers.CharField(required=False)
    key_id = serializers.CharField(required=False)
    project = serializers.CharField(required=False)
    model = serializers.CharField(required=False)
    tier = serializers.CharField(required=False)
    input_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    reasoning_tokens = serializers.IntegerField()
    num_requests = serializers.IntegerField()
    engine_seconds = serializers.FloatField()
    cost = serializers.CharField(allow_null=True)
    currency = serializers.CharField(allow_null=True)


class BucketSerializer(serializers.Serializer[dict[str, Any]]):
    start_time = serializers.IntegerField()
    end_time = serializers.IntegerField()
    results = ResultSerializer(many=True)


class AdjustmentsSerializer(serializers.Serializer[dict[str, Any]]):
    """The sum of adjustments in one currency. `amount` is exact, as text; below zero it is a credit."""

    tenant = serializers.CharField(required=False)
    model = serializers.CharField(required=False)
    amount = serializers.CharField()
    currency = serializers.CharField()
    num_adjustments = serializers.IntegerField()


class UsageSerializer(serializers.Serializer[dict[str, Any]]):
    """What the report is about, and its buckets; those in which nothing was used are left out.

    `adjustments` are those entered between `start_time` and `end_time`, on no page in particular. `kept_since` is the
    instant before which retention has removed usage, null if it has removed none.
    """

    start_time = serializers.IntegerField()
    end_time = serializers.IntegerField()
    timezone = serializers.CharField()
    kept_since = serializers.FloatField(allow_null=True)
    adjustments = AdjustmentsSerializer(many=True)
    data = BucketSerializer(many=True)  # type: ignore[assignment]  # the wire's name
    has_more = serializers.BooleanField()
    next_page = serializers.CharField(allow_null=True)


class UsageView(TenancyView):
    """Sums of the ledger. A key with the scope `usage` sees its own tenant, one with `admin` all of them."""

    admits = USAGE_READERS

    @extend_schema(operation_id="usage", parameters=[ReportSerializer], responses=UsageSerializer)  # type: ignore[untyped-decorator]
    def get(self, request: Request) -> Response:
        query = _validated(request, ReportSerializer)
        names = ("end_time", "bucket_width", "timezone", "group_by")
        span = reports.Span(query.get("page", query["start_time"]), *(query[name] for name in names))
        found = list(islice(reports.buckets(_rows(self, query), span), query["limit"] + 1))
        shown, rest = found[: query["limit"]], found[query["limit"] :]
        return Response(
            {
                "start_time": query["start_time"],
                "end_time": query["end_time"],
                "timezone": query["timezone"],
                "kept_since": None if (since := kept_since()) is None else since.timestamp(),
                "adjustments": _adjustments(self, query),
                "data": [_bucket(one, tuple(span.columns)) for one in shown],
                "has_more": bool(rest),
                "next_page": str(rest[0].start) if rest else None,
            }
        )


class CsvRecordsView(TenancyView):
    """The rows of the ledger, in order of arrival; see `tenants/exports.py` for the form."""

    admits = USAGE_READERS
    content_negotiation_class = AnyAccept

    @extend_schema(  # type: ignore[untyped-decorator]
        operation_id="usage_records_csv",
        parameters=[SpanSerializer],
        responses={(200, "text/csv"): OpenApiTypes.STR},
    )
    def get(self, request: Request) -> StreamingHttpResponse:
        return _export(self, exports.csv_lines, "text/csv", "csv")


class JsonRecordsView(TenancyView):
    """The rows of the ledger, in order of arrival; see `tenants/exports.py` for the form."""

    admits = USAGE_READERS
    content_negotiation_class = AnyAccept

    @extend_schema(  # type: ignore[untyped-decorator]
        operation_id="usage_records_json",
        parameters=[SpanSerializer],
        responses={(200, "application/json"): OpenApiTypes.OBJECT},
    )
    def get(self, request: Request) -> StreamingHttpResponse:
        return _export(self, exports.json_lines, "application/json", "json")


def _export(view: TenancyView, write: Writer, kind: str, suffix: str) -> StreamingHttpResponse:
    query = _validated(view.request, SpanSerializer)
    start, end = query["start_time"], query["end_time"]
    rows, count = reports.as_of_now(reports.between(_rows(view, query), start, end))
    lines = write(list(reports.RECORD), reports.records(rows), count)
    response = attachment(lines, count, kind, f"usage-{start}-{end}.{suffix}")
    if (since := kept_since()) is not None:
        response["X-Kept-Since"] = since.isoformat()
    return response


def _validated(request: Request, serializer: type[SpanSerializer]) -> dict[str, Any]:
    # A list may be given as one value with commas or as several values.
    query = serializer(data={name: ",".join(values) for name, values in request.query_params.lists()})
    query.is_valid(raise_exception=True)
    validated: dict[str, Any] = query.validated_data
    return validated


def _rows(view: TenancyView, query: dict[str, Any]) -> QuerySet[UsageRecord]:
    """What the caller may see of what was asked for."""
    rows = view.usage()
    return rows.filter(tenant_slug=query["tenant"]) if "tenant" in query else rows


def _adjustments(view: TenancyView, query: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of tenants of which the caller sees everything."""
    if not view.caller.is_admitted(BOOK_READERS):
        return []
    rows = Adjustment.scoped.within(view.caller.reach(BOOK_READERS))
    if "tenant" in query:
        rows = rows.filter(tenant_slug=query["tenant"])
    sums = reports.adjustments(rows, query["start_time"], query["end_time"], query["group_by"])
    return [one | {"amount": exports.plain(one["amount"])} for one in sums]


def _bucket(bucket: reports.Bucket, columns: tuple[str, ...]) -> dict[str, Any]:
    results = []
    for group, totals in bucket.groups.items():
        result = dict(zip(columns, group, strict=True)) | {name: getattr(totals, name) for name in reports.SUMS}
        result["cost"] = None if totals.cost is None else exports.plain(totals.cost)
        result["currency"] = result["currency"] or None
        results.append(result)
    return {"start_time": bucket.start, "end_time": bucket.end, "results": results}
