"""Dead letters over the API: read them, run one again, or put it away."""

from __future__ import annotations

import json
from typing import Any

from django.db import transaction
from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from scheduler import dead_letters
from scheduler.api.process import ask
from scheduler.models import DeadLetter
from tenants.api.base import TenancyView, find
from tenants.api.errors import Conflict
from tenants.api.permissions import OPERATORS

PAGE, LARGEST_PAGE = 50, 200


class AnswerSerializer(serializers.Serializer[dict[str, Any]]):
    """What a retry was answered."""

    text = serializers.CharField()
    tool_calls = serializers.ListField(child=serializers.DictField(), required=False)
    finish_reason = serializers.CharField()
    others = serializers.ListField(child=serializers.DictField(), required=False)  # of `n` answers, from the second on
    prompt_tokens = serializers.IntegerField()
    completion_tokens = serializers.IntegerField()


class DeadLetterSerializer(serializers.Serializer[dict[str, Any]]):
    """One death. Instants are ISO 8601 in UTC. What was asked is kept for a retry and not shown."""

    id = serializers.IntegerField()
    request_id = serializers.CharField()
    tenant = serializers.CharField()
    key_id = serializers.CharField()
    tier = serializers.CharField()
    model = serializers.CharField()
    cause = serializers.ChoiceField(choices=DeadLetter.Cause.choices)
    message = serializers.CharField()
    submitted_at = serializers.DateTimeField()
    died_at = serializers.DateTimeField()
    state = serializers.ChoiceField(choices=DeadLetter.State.choices)
    retryable = serializers.BooleanField()
    retried_as = serializers.CharField(allow_null=True)
    answer = AnswerSerializer(allow_null=True)


class DeadLetterPageSerializer(serializers.Serializer[dict[str, Any]]):
    data = DeadLetterSerializer(many=True)  # type: ignore[assignment]  # the wire's name
    has_more = serializers.BooleanField()
    next_page = serializers.CharField(allow_null=True)


class RetrySerializer(serializers.Serializer[dict[str, Any]]):
    retried_as = serializers.CharField()


class QuerySerializer(serializers.Serializer[dict[str, Any]]):
    """Filters and the page. `tenant` is a slug; `page` is what `next_page` said."""

    cause = serializers.ChoiceField(choices=DeadLetter.Cause.choices, required=False)
    state = serializers.ChoiceField(choices=DeadLetter.State.choices, required=False)
    tenant = serializers.CharField(required=False)
    limit = serializers.IntegerField(min_value=1, max_value=LARGEST_PAGE, default=PAGE)
    page = serializers.IntegerField(min_value=1, required=False)


class DeadLettersView(APIView):
    """Requests that died of us, the newest first."""

    admits = OPERATORS

    @extend_schema(  # type: ignore[untyped-decorator]
        operation_id="dead_letters", parameters=[QuerySerializer], responses=DeadLetterPageSerializer
    )
    def get(self, request: Request) -> Response:
        query = QuerySerializer(data=request.query_params)
        query.is_valid(raise_exception=True)
        found, limit = _filtered(query.validated_data), query.validated_data["limit"]
        letters = list(found[: limit + 1])
        has_more = len(letters) > limit
        letters = letters[:limit]
        next_page = str(letters[-1].pk) if has_more else None
        return Response({"data": [_document(one) for one in letters], "has_more": has_more, "next_page": next_page})


class RetryView(TenancyView):
    """Run the request of a letter again, in the background and under a new id."""

    admits = OPERATORS

    @extend_schema(operation_id="retry_dead_letter", request=None, responses={202: RetrySerializer})  # type: ignore[untyped-decorator]
    def post(self, request: Request, letter_id: int) -> Response:
        letter = _letter(letter_id)
        answer = ask(request, "retry_dead_letter", id=letter_id)
        if "retried_as" not in answer:
            raise Conflict(answer["refused"])
        self.caller.act().note("retry", letter, None, answer)
        return Response(answer, status=status.HTTP_202_ACCEPTED)


class DiscardView(TenancyView):
    """Put a letter away: it will not be retried, and what was asked is forgotten."""

    admits = OPERATORS

    @extend_schema(operation_id="discard_dead_letter", request=None, responses={204: None})  # type: ignore[untyped-decorator]
    def post(self, request: Request, letter_id: int) -> Response:
        letter = _letter(letter_id)
        with transaction.atomic():
            if not dead_letters.discard(letter_id):
                raise Conflict("Only an open letter can be discarded.")
            self.caller.act().note("discard", letter, None, None)
        return Response(status=status.HTTP_204_NO_CONTENT)


def _letter(letter_id: int) -> DeadLetter:
    return find(DeadLetter.objects.all(), "dead letter", pk=letter_id)


def _filtered(query: dict[str, Any]) -> QuerySet[DeadLetter]:
    found = DeadLetter.objects.all()
    for name, column in (("cause", "cause"), ("state", "state"), ("tenant", "tenant_slug"), ("page", "pk__lt")):
        if name in query:
            found = found.filter(**{column: query[name]})
    return found


def _document(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.pk,
        "request_id": letter.request_id,
        "tenant": letter.tenant_slug,
        "key_id": letter.key_id,
        "tier": letter.tier,
        "model": letter.model,
        "cause": letter.cause,
        "message": letter.message,
        "submitted_at": letter.submitted_at,
        "died_at": letter.died_at,
        "state": letter.state,
        "retryable": letter.state == DeadLetter.State.OPEN and bool(letter.payload),
        "retried_as": letter.retried_as or None,
        "answer": json.loads(letter.answer) if letter.answer else None,
    }
