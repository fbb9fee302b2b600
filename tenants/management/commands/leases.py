"""`harness leases`: which scheduler process may spend how much of which budget; giving back what a dead one held."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from tenants.audit import shell_actor
from tenants.budgets import ReleaseError, release_by_hand
from tenants.models import BudgetLease


class Command(BaseCommand):
    help = "Shows the leases of budgets, or gives back those of a scheduler process whose spool is lost."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--release", metavar="NAME", help="the scheduler process whose leases come back")
        parser.add_argument("--epoch", type=int, help="its epoch, as the list shows it")
        parser.add_argument("--reason", default="", help="why, for the audit log")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["release"] is None:
            self._show()
        elif options["epoch"] is None or not options["reason"]:
            raise CommandError("Say which --epoch and for what --reason.")
        else:
            self._release(options["release"], options["epoch"], options["reason"])

    def _show(self) -> None:
        for lease in BudgetLease.objects.select_related("account").order_by("process", "epoch", "account"):
            self.stdout.write(str(lease))

    def _release(self, process: str, epoch: int, reason: str) -> None:
        try:
            released = release_by_hand(process, epoch, actor=shell_actor("leases"), reason=reason)
        except ReleaseError as error:
            raise CommandError(str(error)) from error
        self.stdout.write(f"{released} leases of {process} epoch {epoch} are given back")
