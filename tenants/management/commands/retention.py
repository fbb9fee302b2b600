"""`harness retention`: remove rows of the ledger that are older than so many whole months."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from tenants.audit import Act, shell_actor
from tenants.models.retention import kept_since
from tenants.retention import MONTHS, remove_old


class Command(BaseCommand):
    help = "Remove rows of the ledger of closed months. It can be stopped at any time; the next run goes on."
    requires_system_checks = ()  # pages and URLs have no part in it

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--months",
            type=int,
            default=settings.HARNESS_USAGE_MONTHS,
            help=f"whole months that are kept besides the one that runs, at least {MONTHS}; else HARNESS_USAGE_MONTHS",
        )
        parser.add_argument("--reason", default="", help="why, for the audit log")

    def handle(self, *args: Any, months: int | None, reason: str, **options: Any) -> None:
        if months is None:
            raise CommandError("Usage is kept for ever: say how many --months, or set HARNESS_USAGE_MONTHS.")
        try:
            removed = remove_old(months, timezone.now(), Act(shell_actor("retention"), reason))
        except ValueError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{removed} rows are removed; usage is kept since {kept_since()}")
