"""Accounts: the first operator comes in by a one-time link, everybody else is created by an operator."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from allauth.account.adapter import DefaultAccountAdapter
from django import forms
from django.conf import settings
from django.contrib.auth import login
from django.contrib.auth.models import User
from django.contrib.auth.password_validation import password_validators_help_text_html, validate_password
from django.contrib.auth.validators import UnicodeUsernameValidator
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext_lazy as _
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters

from tenants.audit import Act, describe
from tenants.models import Membership

LINK_LIFE = 24 * 3600.0  # seconds


class ClosedAdapter(DefaultAccountAdapter):  # type: ignore[misc]  # the package has no types
    """Nobody signs up by themselves."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        return False


def operator_exists() -> bool:
    """Whether somebody can already run this installation."""
    roles = Q(memberships__role=Membership.Role.OPERATOR) | Q(is_superuser=True)
    return User.objects.filter(roles, is_active=True).exists()


# --- the one-time link ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Invitation:
    """The stored side of the link: the token's digest and when it ends. The token itself is only ever printed."""

    digest: str
    expires: float  # Unix seconds

    @staticmethod
    def path() -> Path:
        return settings.HARNESS_SECRETS_DIR / "operator-setup.json"

    @classmethod
    def load(cls) -> Invitation | None:
        try:
            return cls(**json.loads(cls.path().read_text()))
        except FileNotFoundError:
            return None

    def store(self) -> None:
        """Replace whatever link there was, in one step and readable by the owner only."""
        path = self.path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.unlink(missing_ok=True)
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"digest": self.digest, "expires": self.expires}, file)
        scratch.replace(path)

    def admits(self, token: str, now: float) -> bool:
        return now < self.expires and hmac.compare_digest(self.digest, digest(token))

    def claim(self) -> bool:
        """Use the link up. Of several that try at once exactly one succeeds: removing a file is atomic."""
        try:
            self.path().unlink()
        except FileNotFoundError:
            return False
        return True


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def setup_link(base_url: str) -> str | None:
    """A fresh one-time link for the first operator, valid for 24 hours; None once there is an operator.

    An earlier link ends when a new one is made.
    """
    if operator_exists():
        Invitation.path().unlink(missing_ok=True)
        return None
    token = secrets.token_urlsafe(32)
    Invitation(digest(token), time.time() + LINK_LIFE).store()
    return f"{base_url.rstrip('/')}/setup/{token}/"


# --- its page -------------------------------------------------------------------------------------------------------


class FirstOperatorForm(forms.Form):
    """Name and password of the first operator."""

    username = forms.CharField(
        label=_("User name"),
        max_length=150,
        validators=[UnicodeUsernameValidator()],
        widget=forms.TextInput(attrs={"autocomplete": "username", "autofocus": True}),
    )
    password = forms.CharField(
        label=_("Password"),
        strip=False,
        help_text=password_validators_help_text_html(),
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )
    again = forms.CharField(
        label=_("Password again"),
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "new-password"}),
    )

    def clean_username(self) -> str:
        username = str(self.cleaned_data["username"])
        if User.objects.filter(username__iexact=username).exists():
            raise ValidationError(_("This name is taken."))
        return username

    def clean(self) -> None:
        password = self.cleaned_data.get("password")
        if not password:
            return
        if password != self.cleaned_data.get("again"):
            self.add_error("again", _("The two passwords differ."))
        try:
            validate_password(password, User(username=self.cleaned_data.get("username", "")))
        except ValidationError as error:
            self.add_error("password", error)

    def create(self, source_ip: str | None) -> User:
        """The account, its role and admin access, together or not at all."""
        with transaction.atomic():
            user = User.objects.create_superuser(self.cleaned_data["username"], password=self.cleaned_data["password"])
            membership = Membership.objects.create(user=user, role=Membership.Role.OPERATOR)
            act = Act(f"user {user.get_username()}", "the one-time link", source_ip)
            for made in (user, membership):
                act.note("create", made, None, describe(made))
        return user


@never_cache
@sensitive_post_parameters("password", "again")
def first_operator(request: HttpRequest, token: str) -> HttpResponse:
    """The page behind the one-time link."""
    invitation = Invitation.load()
    if invitation is None or operator_exists():
        return render(request, "setup/closed.html", {"why": "used"}, status=410)
    if not invitation.admits(token, time.time()):
        return render(request, "setup/closed.html", {"why": "expired"}, status=410)
    form = FirstOperatorForm(request.POST if request.method == "POST" else None)
    if not form.is_valid():
        return render(request, "setup/first_operator.html", {"form": form}, status=422 if form.errors else 200)
    if not invitation.claim():
        return render(request, "setup/closed.html", {"why": "used"}, status=410)
    user = form.create(request.META.get("REMOTE_ADDR"))
    login(request, user, backend="django.contrib.auth.backends.ModelBackend")
    return redirect("console:overview")
