"""Django's `migrate`, one at a time per data directory: two that overlap would both create the same tables."""

from __future__ import annotations

import fcntl
from typing import Any

from django.conf import settings
from django.core.management.commands import migrate


class Command(migrate.Command):
    def handle(self, *args: Any, **options: Any) -> None:
        settings.HARNESS_RUN_DIR.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (settings.HARNESS_RUN_DIR / "migrate.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().handle(*args, **options)
