"""Who may see the console."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import wraps
from importlib import import_module
from typing import Concatenate, ParamSpec

from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from tenants.models import Membership

P = ParamSpec("P")
View = Callable[Concatenate[HttpRequest, P], HttpResponse]


def is_operator(user: User | AnonymousUser) -> bool:
    """Whether `user` runs this installation: an active superuser, or a member with the role operator."""
    if isinstance(user, AnonymousUser) or not user.is_active:
        return False
    return user.is_superuser or Membership.objects.filter(user=user, role=Membership.Role.OPERATOR).exists()


def operator_required(view: View[P]) -> View[P]:
    """Send visitors to the login page, and tell others which role is missing and who can grant it."""

    @wraps(view)
    def guarded(request: HttpRequest, /, *args: P.args, **kwargs: P.kwargs) -> HttpResponse:
        if not request.user.is_authenticated:
            return redirect_to_login(request.get_full_path())
        if not is_operator(request.user):
            return render(request, "console/forbidden.html", {"role": Membership.Role.OPERATOR}, status=403)
        return view(request, *args, **kwargs)

    return guarded


class Standing(Enum):
    """What a session is worth at this moment."""

    SIGNED_OUT = "signed out"
    NOT_OPERATOR = "not an operator"
    OPERATOR = "operator"


def standing(session_key: str | None) -> Standing:
    """Whether the session still exists, still belongs to its user (password unchanged) and that user is an operator.

    Reads the database anew each time: sockets live longer than a request.
    """
    request = HttpRequest()
    request.session = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    user = get_user(request)
    if not user.is_authenticated:
        return Standing.SIGNED_OUT
    return Standing.OPERATOR if is_operator(user) else Standing.NOT_OPERATOR
