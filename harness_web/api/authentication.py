"""The management API asks the same authenticator as the data plane, on the event loop of its process."""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request

from harness_web.openai.access import auth_failure, bearer_token
from harness_web.runtime import WebRuntime
from tenants.auth import AuthError, Principal


def runtime_of(request: Request) -> WebRuntime:
    """The runtime of this web process, which the server puts into every scope."""
    runtime: WebRuntime = request._request.scope["state"]["runtime"]  # type: ignore[attr-defined]
    return runtime


class KeyAuthentication(BaseAuthentication):
    """`Authorization: Bearer <key>`; the principal is `request.auth`."""

    def authenticate(self, request: Request) -> tuple[AnonymousUser, Principal]:
        authenticate = async_to_sync(runtime_of(request).authenticator.authenticate)
        token = bearer_token(request.META.get("HTTP_AUTHORIZATION", ""))
        try:
            return AnonymousUser(), authenticate(token, request.META.get("REMOTE_ADDR"))
        except AuthError as error:
            raise auth_failure(error) from None


class KeyScheme(OpenApiAuthenticationExtension):  # type: ignore[misc]  # the package has no types
    """How the schema describes it."""

    target_class = KeyAuthentication
    name = "key"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer"}
