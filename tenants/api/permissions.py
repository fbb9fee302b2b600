"""What a key may do in the management API: a view names the scope it needs, and one that names none is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from tenants.auth import Principal

if TYPE_CHECKING:  # the framework imports this module, by its settings, while it is itself being imported
    from rest_framework.views import APIView


class HasScope(BasePermission):
    """Views set `required_scope`: a scope, or several of which one is enough."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        required: str | tuple[str, ...] = getattr(view, "required_scope", ())
        scopes = (required,) if isinstance(required, str) else required
        principal: object = request.auth
        return isinstance(principal, Principal) and any(principal.has_scope(scope) for scope in scopes)
