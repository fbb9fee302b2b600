"""`harness adjust`: an amount beside the ledger, entered by hand, or the difference that a wrong price has made."""

from __future__ import annotations

from argparse import ArgumentParser
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from tenants.adjustments import Entry, correct_price, differences, enter
from tenants.apply import Run
from tenants.audit import Act, shell_actor
from tenants.changes import one_change
from tenants.documents import DocumentError
from tenants.exports import plain
from tenants.models import Price, Tenant
from tenants.pricing import RATE_UNITS, TokenPrice

BY_HAND = ("amount", "currency", "from", "until")
RATES = ("input", "cached_input", "output")


class Command(BaseCommand):
    help = "Correct what was charged: --tenant for an amount by hand, --price for all that a wrong price has charged."
    requires_system_checks = ()  # pages and URLs have no part in it

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--tenant", metavar="SLUG", help="whose charge is corrected by hand")
        parser.add_argument("--amount", type=decimal, help="below zero: a credit")
        parser.add_argument("--currency", help="of the amount")
        parser.add_argument("--from", type=instant, metavar="INSTANT", help="first instant of the usage that is meant")
        parser.add_argument("--until", type=instant, metavar="INSTANT", help="the instant after it")
        parser.add_argument("--model", default="", help="the model that it is about, if it is one")
        parser.add_argument("--price", type=int, metavar="ID", help="the wrong price, as usage records name it")
        parser.add_argument("--input", type=rate, help="what a million prompt tokens should have cost")
        parser.add_argument("--cached-input", type=rate, help="what a million cached prompt tokens should have cost")
        parser.add_argument("--output", type=rate, help="what a million output tokens should have cost")
        parser.add_argument("--dry-run", action="store_true", help="of a price: show the differences and enter nothing")
        parser.add_argument("--reason", default="", help="why; it is kept with each adjustment")

    def handle(self, *args: Any, **options: Any) -> None:
        if (options["tenant"] is None) == (options["price"] is None):
            raise CommandError("Say either whose charge is corrected (--tenant) or which price was wrong (--price).")
        needed = BY_HAND if options["price"] is None else RATES
        if missing := [name for name in needed if options[name] is None]:
            raise CommandError(f"Give --{missing[0].replace('_', '-')} too.")
        act = Act(shell_actor("adjust"), options["reason"])
        try:
            self._by_hand(options, act) if options["price"] is None else self._price(options, act)
        except DocumentError as error:
            raise CommandError(str(error)) from error

    def _by_hand(self, options: dict[str, Any], act: Act) -> None:
        tenant = Tenant.objects.filter(slug=options["tenant"]).first()
        if tenant is None:
            raise CommandError(f"There is no tenant {options['tenant']!r}.")
        terms = (options["from"], options["until"], options["amount"], options["currency"], options["model"])
        with one_change(actor=act.actor, reason=act.reason):
            self._show(enter(Entry(str(tenant.pk), tenant.slug, *terms), "adjustment", Run(act)))

    def _price(self, options: dict[str, Any], act: Act) -> None:
        price = Price.objects.filter(pk=options["price"]).first()
        if price is None:
            raise CommandError(f"There is no price {options['price']}.")
        right = TokenPrice(price.pk, price.currency, *(options[name] for name in RATES))
        if options["dry_run"]:
            for entry in differences(price, right):
                self._show(entry)
            return
        entered = correct_price(price, right, act)
        for adjustment in entered:
            self._show(adjustment)
        self.stdout.write(f"{len(entered)} adjustments are entered")

    def _show(self, one: Any) -> None:
        """An entry or an adjustment."""
        self.stdout.write(f"{one.tenant_slug} {one.starts_at:%Y-%m} {plain(one.amount)} {one.currency}")


def decimal(text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(text) from error
    if not value.is_finite():
        raise ValueError(text)
    return value


def rate(text: str) -> int:
    """Per million tokens, in the unit of `TokenPrice`."""
    units = decimal(text) * RATE_UNITS
    if units < 0 or units != int(units):
        raise ValueError(text)
    return int(units)


def instant(text: str) -> datetime:
    value = datetime.fromisoformat(text)
    if value.tzinfo is None:
        raise ValueError("an instant needs an offset, like 2026-08-01T00:00:00Z")
    try:
        return value.astimezone(UTC)
    except OverflowError as error:  # no year of UTC
        raise ValueError(text) from error
