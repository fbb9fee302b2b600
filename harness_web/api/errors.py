"""Failures of the management API, in the envelope and by the table of the data plane."""

from __future__ import annotations

from typing import Any

import structlog
from django.http import Http404, HttpResponse
from rest_framework import exceptions

from harness_web.openai.access import CHALLENGE, INVALID_KEY
from harness_web.openai.errors import ApiError, envelope, error_headers
from scheduler.gateway import GatewayUnavailable
from tenants.api.errors import Conflict
from tenants.documents import DocumentError
from tenants.key_changes import KeyConflictError

log = structlog.get_logger(__name__)

REASONS: dict[type[Exception], str] = {
    Http404: "not_found",
    exceptions.NotFound: "not_found",
    exceptions.PermissionDenied: "missing_scope",
    exceptions.NotAcceptable: "not_acceptable",
    exceptions.MethodNotAllowed: "method_not_allowed",
    exceptions.ParseError: "invalid_json",
    exceptions.UnsupportedMediaType: "unsupported_media_type",
    exceptions.ValidationError: "invalid_value",
    Conflict: "conflict",
    KeyConflictError: "conflict",
    GatewayUnavailable: "scheduler_lost",
}


def answer_exception(error: Exception, context: dict[str, Any]) -> HttpResponse:
    """REST framework's EXCEPTION_HANDLER."""
    return answer_error(_as_api_error(error))


def answer_error(error: ApiError) -> HttpResponse:
    response = HttpResponse(envelope(error), status=error.shape.status, content_type="application/json")
    for name, value in error_headers(error):
        response[name.decode()] = value.decode()
    return response


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, exceptions.NotAuthenticated):
        return ApiError("invalid_key", INVALID_KEY, headers=(CHALLENGE,))
    if isinstance(error, exceptions.ValidationError):
        return _invalid(error)
    if isinstance(error, DocumentError):
        return ApiError("invalid_value", error.message, param=error.path or None)
    reason = REASONS.get(type(error))
    if reason is None:
        log.error("management_request_failed", exc_info=error)
        return ApiError("internal", "Something went wrong on our side.")
    return ApiError(reason, _sentence(error))


def _invalid(error: exceptions.ValidationError) -> ApiError:
    """The first field at fault."""
    detail: Any = error.detail
    param: str | None = None
    while isinstance(detail, dict | list) and detail:
        if isinstance(detail, dict):
            name, detail = next(iter(detail.items()))
            param = name if param is None else f"{param}.{name}"
        else:
            detail = detail[0]
    return ApiError("invalid_value", str(detail), param=param)


def _sentence(error: Exception) -> str:
    if isinstance(error, exceptions.PermissionDenied) and error.detail == exceptions.PermissionDenied.default_detail:
        return "Neither this key's scopes nor your role admit you here."
    return str(error) or "There is nothing here."
