"""What a key may do in the management API: a view names the scope it needs, and one that names none is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from tenants.auth import Principal

if TYPE_CHECKING:  # the framework imports this module, by its settings, while it is itself being imported
    from rest_framework.views import APIView


class HasScope(BasePermission):
    """Views set `required_scope`."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        scope = getattr(view, "required_scope", None)
        principal: object = request.auth
        return scope is not None and isinstance(principal, Principal) and principal.has_scope(scope)
