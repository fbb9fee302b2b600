"""What `manage.py check` says about an installation, beyond Django's own checks."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connection

LOOPBACK = {"127.0.0.1", "localhost", "[::1]", "::1"}
OLDEST_SQLITE = (3, 35, 0)  # upserts that return rows


@register(Tags.security)
def secrets_are_private(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """The folder of secrets is for the product's user only."""
    mode = settings.HARNESS_SECRETS_DIR.stat().st_mode & 0o777
    if mode & 0o077:
        return [
            Warning(
                f"{settings.HARNESS_SECRETS_DIR} can be read by other users (mode {mode:o}).",
                hint=f"chmod 700 {settings.HARNESS_SECRETS_DIR}",
                id="harness.W001",
            )
        ]
    return []


@register(Tags.security)
def debugging_stays_at_home(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Debug pages show settings and source to whoever reaches them."""
    strangers = sorted(set(settings.ALLOWED_HOSTS) - LOOPBACK)
    if settings.DEBUG and strangers:
        return [
            Error(
                f"HARNESS_DEBUG is on while the product is served as {', '.join(strangers)}.",
                hint="Unset HARNESS_DEBUG, or serve on the loopback address only.",
                id="harness.E001",
            )
        ]
    return []


@register(Tags.database)
def sqlite_is_new_enough(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    if connection.vendor == "sqlite" and sqlite3.sqlite_version_info < OLDEST_SQLITE:
        wanted = ".".join(map(str, OLDEST_SQLITE))
        return [Error(f"SQLite {sqlite3.sqlite_version} is too old: {wanted} is needed.", id="harness.E002")]
    return []
