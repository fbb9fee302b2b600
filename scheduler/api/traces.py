"""A request explained: what was decided about it and why."""

from __future__ import annotations

from typing import Any

from django.http import Http404
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from scheduler.api.process import find
from scheduler.gateway import GatewayUnavailable
from tenants.api.base import TenancyView
from tenants.api.permissions import READERS
from tenants.models import UsageRecord


class EventSerializer(serializers.Serializer[dict[str, Any]]):
    """Seconds count from the arrival. What tells of other requests is for operators only."""

    at = serializers.FloatField()
    event = serializers.CharField()
    reason = serializers.CharField(allow_null=True)
    until = serializers.FloatField(required=False)
    rounds = serializers.IntegerField(required=False)
    tokens = serializers.IntegerField(required=False)
    batch_id = serializers.CharField(required=False)
    batch_mates = serializers.IntegerField(required=False)
    beneficiary = serializers.CharField(required=False)


class LedgerSerializer(serializers.Serializer[UsageRecord]):
    """What the ledger says. Instants are ISO 8601, times are seconds."""

    status = serializers.CharField()
    finish_reason = serializers.CharField()
    reason = serializers.CharField()
    prompt_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField()
    completion_tokens = serializers.IntegerField()
    arrived_at = serializers.DateTimeField()
    dispatched_at = serializers.DateTimeField()
    first_token_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField()
    wait_time = serializers.FloatField()
    compute_time = serializers.FloatField()
    engine_seconds = serializers.FloatField()
    batch_id = serializers.CharField()
    batch_size = serializers.FloatField()
    attained = serializers.BooleanField(allow_null=True)
    miss_reason = serializers.CharField()
    policy_version = serializers.IntegerField()


class TraceSerializer(serializers.Serializer[dict[str, Any]]):
    """`sampled` false: the decisions are not kept any more, and `ledger` is all that is known."""

    request_id = serializers.CharField()
    sampled = serializers.BooleanField()
    tier = serializers.CharField()
    model = serializers.CharField()
    arrived_at = serializers.FloatField(required=False)
    state = serializers.CharField(required=False)
    events = EventSerializer(many=True, required=False)
    ledger = LedgerSerializer(allow_null=True)


class TraceView(TenancyView):
    """What was decided about a request, by the `x-request-id` of its answer. A tenant sees its own."""

    admits = READERS

    @extend_schema(operation_id="request_trace", responses=TraceSerializer)  # type: ignore[untyped-decorator]
    def get(self, request: Request, request_id: str) -> Response:
        trace = _trace(request, request_id, redacted=not self.caller.operates)
        record = self.usage().filter(request_id=request_id).order_by("-attempt").first()
        if trace is not None and not self.caller.sees_all_of(trace.pop("tenant")) and record is None:
            trace = None
        if trace is None and record is None:
            raise Http404("There is no such request.")
        ledger = None if record is None else LedgerSerializer(record).data
        if trace is not None:
            return Response(trace | {"ledger": ledger})
        assert record is not None
        return Response(
            {
                "request_id": request_id,
                "sampled": False,
                "tier": record.tier,
                "model": record.model,
                "ledger": ledger,
            }
        )


def _trace(request: Request, request_id: str, *, redacted: bool) -> dict[str, Any] | None:
    """Without a scheduler process the ledger still has its say."""
    try:
        found: dict[str, Any] | None = find(request, "trace", id=request_id, redacted=redacted)
    except GatewayUnavailable:
        return None
    return found
