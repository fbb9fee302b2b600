"""Management views of scheduling."""

from __future__ import annotations

from django.conf import settings
from django.http import Http404
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from scheduler.engines.simulated import read_record
from tenants.api.permissions import OPERATORS


class SimulatedRequestSerializer(serializers.Serializer[dict[str, object]]):
    """The engine's own record. Instants are Unix seconds; steps count from 1."""

    model = serializers.CharField()
    id = serializers.CharField()
    received = serializers.FloatField()
    received_step = serializers.IntegerField()
    started = serializers.FloatField(allow_null=True)
    started_step = serializers.IntegerField(allow_null=True)
    tokens = serializers.IntegerField()
    aborted = serializers.FloatField(allow_null=True)
    aborted_step = serializers.IntegerField(allow_null=True)
    ended = serializers.FloatField(allow_null=True)
    ended_step = serializers.IntegerField(allow_null=True)
    outcome = serializers.CharField(allow_null=True)


class SimulatedRequestView(APIView):
    """What the simulated engine did with a request, by the `x-request-id` of its answer."""

    admits = OPERATORS

    @extend_schema(responses=SimulatedRequestSerializer, operation_id="simulated_request")  # type: ignore[untyped-decorator]
    def get(self, request: Request, request_id: str) -> Response:
        record = read_record(settings.HARNESS_DATA_DIR, request_id)
        if record is None:
            raise Http404("No simulated engine has had this request.")
        return Response(record)
