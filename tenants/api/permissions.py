"""Who may call what: every view says so, and one that says nothing is closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from tenants.api.caller import Admits, Caller
from tenants.models import Membership, Scope

if TYPE_CHECKING:  # the framework imports this module, by its settings, while it is itself being imported
    from rest_framework.views import APIView

Role = Membership.Role

OPERATORS = Admits(frozenset({Scope.ADMIN}))
OWNERS = Admits(frozenset({Scope.ADMIN}), frozenset({Role.OWNER}))
MEMBERS = Admits(frozenset({Scope.ADMIN}), frozenset({Role.OWNER, Role.DEVELOPER}))
READERS = Admits(frozenset({Scope.ADMIN, Scope.USAGE}), frozenset({Role.OWNER, Role.DEVELOPER}))
# What was used and charged. Finance works for the installation; a developer sees the usage of their own keys.
USAGE_READERS = Admits(READERS.scopes, READERS.roles | {Role.FINANCE})
BOOK_READERS = Admits(READERS.scopes, frozenset({Role.OWNER, Role.FINANCE}))
BOOKKEEPERS = Admits(frozenset({Scope.ADMIN}), frozenset({Role.FINANCE}))


def admitted(view: APIView, method: str) -> Admits | None:
    """Whom `view` admits for `method`. It sets `admits`: one for all its methods, or one for each by name."""
    admits: Admits | Mapping[str, Admits] | None = getattr(view, "admits", None)
    return admits.get("GET" if method == "HEAD" else method) if isinstance(admits, Mapping) else admits


class IsAdmitted(BasePermission):
    """Whoever may call a view at all may also hear that it does not have a method."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        caller: object = request.auth
        if not isinstance(caller, Caller):
            return False
        method = request.method or ""
        if method != "OPTIONS" and hasattr(view, method.lower()):
            admits = admitted(view, method)
            return admits is not None and caller.is_admitted(admits)
        return any(caller.is_admitted(each) for name in view.allowed_methods if (each := admitted(view, name)))
