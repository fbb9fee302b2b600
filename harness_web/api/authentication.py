"""The management API asks the same authenticator as the data plane, on the event loop of its process; people who are
signed in to the pages may call it too, with the CSRF token that every page has."""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser, User
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.request import Request

from harness_web.console.access import is_operator
from harness_web.openai.access import CHALLENGE, auth_failure, bearer_token
from harness_web.runtime import WebRuntime
from tenants.api.caller import Caller, key_caller, user_caller
from tenants.auth import AuthError


def runtime_of(request: Request) -> WebRuntime:
    """The runtime of this web process, which the server puts into every scope."""
    runtime: WebRuntime = request._request.scope["state"]["runtime"]  # type: ignore[attr-defined]
    return runtime


class KeyAuthentication(BaseAuthentication):
    """`Authorization: Bearer <key>`; the caller is `request.auth`."""

    def authenticate(self, request: Request) -> tuple[AnonymousUser, Caller] | None:
        header = request.META.get("HTTP_AUTHORIZATION", "")
        if not header:
            return None
        address = request.META.get("REMOTE_ADDR")
        authenticate = async_to_sync(runtime_of(request).authenticator.authenticate)
        try:
            return AnonymousUser(), key_caller(authenticate(bearer_token(header), address), address)
        except AuthError as error:
            raise auth_failure(error) from None

    def authenticate_header(self, request: Request) -> str:
        """What a caller without credentials is asked for, and that it is a 401."""
        return CHALLENGE[1].decode()


class SessionCaller(SessionAuthentication):
    """A session of the pages; the caller is `request.auth`. Checks the CSRF token."""

    def authenticate(self, request: Request) -> tuple[User, Caller] | None:
        found = super().authenticate(request)
        if found is None:
            return None
        user = found[0]
        assert isinstance(user, User)
        return user, user_caller(user, request.META.get("REMOTE_ADDR"), operates=is_operator(user))


class KeyScheme(OpenApiAuthenticationExtension):  # type: ignore[misc]  # the package has no types
    """How the schema describes keys."""

    target_class = KeyAuthentication
    name = "key"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer"}


class SessionScheme(OpenApiAuthenticationExtension):  # type: ignore[misc]  # the package has no types
    """How the schema describes sessions."""

    target_class = SessionCaller
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "apiKey", "in": "cookie", "name": "sessionid"}
