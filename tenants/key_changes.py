"""The life of a key: issued, rotated, revoked, enabled again. The only code that writes secrets.

    issue ──> live ──rotate──> live: a new secret at once, the old ones for as long as was said
                │ ▲
           revoke enable       every secret ends with the key, and those in their time come back with it

Rights, limits, budgets and usage belong to the key, so that a rotation changes none of them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db.models import Q
from django.utils import timezone

from . import keys
from .audit import Act, describe
from .changes import one_change
from .models import ApiKey, KeySecret

MAX_SECRETS = 10  # valid at a time
MAX_OVERLAP = timedelta(days=90)


class KeyConflictError(Exception):
    """What is asked for does not fit the state that the key is in."""


def issue(key: ApiKey, act: Act) -> str:
    """Store a new key, whose fields have been checked; its secret, which is to be shown once."""
    with one_change(actor=act.actor, reason=act.reason):
        key.save()
        token = _add_secret(key)
        act.note("create", key, None, describe_key(key))
    return token


def rotate(key: ApiKey, overlap: timedelta, act: Act) -> str:
    """A new secret of the key, to be shown once; those it had are good for `overlap` more, at most.

    Raises KeyConflictError for a key that is revoked or has too many secrets already.
    """
    with one_change(actor=act.actor, reason=act.reason):
        if key.revoked_at is not None:
            raise KeyConflictError("A revoked key is not rotated; enable it first.")
        now = timezone.now()
        before, until = describe_key(key), now + overlap
        valid = key.secrets.filter(Q(valid_until__isnull=True) | Q(valid_until__gt=now))
        if overlap and valid.count() >= MAX_SECRETS:
            raise KeyConflictError(f"The key has {MAX_SECRETS} valid secrets already; rotate without an overlap.")
        valid.filter(Q(valid_until__isnull=True) | Q(valid_until__gt=until)).update(valid_until=until)
        token = _add_secret(key)
        act.note("rotate", key, before, describe_key(key))
    return token


def revoke(key: ApiKey, act: Act) -> None:
    """End the key. One that is revoked stays as it is."""
    _set_revoked(key, "revoke", act)


def enable(key: ApiKey, act: Act) -> None:
    """Take a revocation back. Raises KeyConflictError when another key has taken the name."""
    _set_revoked(key, "enable", act)


def _set_revoked(key: ApiKey, verb: str, act: Act) -> None:
    with one_change(actor=act.actor, reason=act.reason):
        if (key.revoked_at is not None) is (verb == "revoke"):
            return
        if verb == "enable" and key.tenant.keys.filter(name=key.name, revoked_at__isnull=True).exists():
            raise KeyConflictError(f"{key.tenant.slug} has another key {key.name!r} by now; revoke that one first.")
        before = describe_key(key)
        key.revoked_at = timezone.now() if verb == "revoke" else None
        key.save(update_fields=["revoked_at"])
        act.note(verb, key, before, describe_key(key))


def _add_secret(key: ApiKey) -> str:
    """Give `key` a new secret; the secret itself, which is kept nowhere."""
    new = keys.mint()
    KeySecret(key=key, lookup=new.lookup, digest=new.digest, pepper_version=new.pepper_version).save()
    return new.token


def describe_key(key: ApiKey) -> dict[str, Any]:
    """The key as the audit log shows it: with what may be shown of its secrets and how long they are good."""
    ends = {
        secret.prefix: secret.valid_until and secret.valid_until.isoformat()
        for secret in KeySecret.objects.filter(key=key).order_by("id")
    }
    return describe(key) | {"secrets": ends}
