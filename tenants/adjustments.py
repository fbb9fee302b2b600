"""Putting right what was charged, without touching what is in the ledger: every correction is an entry of its own.

A single amount is entered by hand (`enter`). Where a price was wrong, `correct_price` charges every request that was
priced with it once more at the right rates, request by request and rounded as ever, and enters the difference for each
tenant and month (in UTC). What earlier corrections of the same price have entered is taken off, so that a second run
enters nothing, and a correction can itself be corrected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal

from django.db.models import Sum

from .apply import Run
from .audit import Act
from .changes import one_change
from .models import Adjustment, Price, UsageRecord
from .models.change import lock
from .models.fields import DECIMALS
from .models.retention import kept_since
from .periods import Calendar, Period
from .pricing import TokenPrice

READ = 2_000  # rows in memory at a time


@dataclass(frozen=True, slots=True)
class Entry:
    """What an adjustment is about; see `Adjustment` for the fields."""

    tenant_id: str
    tenant_slug: str
    starts_at: datetime
    ends_at: datetime
    amount: Decimal
    currency: str
    model: str = ""
    price_id: int | None = None


def enter(entry: Entry, path: str, run: Run) -> Adjustment:
    """Write one adjustment and its event of the audit log. Call inside a change.

    Raises DocumentError for a field that cannot be, `path` before its name; so it does where the act has no reason.
    """
    about = {"reason": run.act.reason, "author": run.act.actor}
    return run.save(Adjustment(), path, "adjustments", entry.tenant_slug, asdict(entry) | about)


def correct_price(price: Price, right: TokenPrice, act: Act) -> list[Adjustment]:
    """Enter what requests priced with `price` would have cost more or less, had it been `right`.

    Months of which retention has removed rows are left as they are. Raises DocumentError if `act` has no reason.
    """
    due = list(differences(price, right))  # before the change begins: nobody waits while the ledger is read
    with one_change(actor=act.actor, reason=act.reason):
        lock()  # of two who correct the same price, one sees what the other has entered
        run = Run(act)
        return [enter(entry, "adjustments", run) for entry in _not_entered(due, price)]


def differences(price: Price, right: TokenPrice) -> Iterator[Entry]:
    """By tenant and month, what `right` would have made of all requests that were priced with `price`."""
    since, calendar = kept_since(), Calendar()
    units: dict[tuple[str, Period], int] = defaultdict(int)
    slugs: dict[str, str] = {}
    columns = ("tenant_id", "tenant_slug", "arrived_at", "charge")
    counted = ("prompt_tokens", "cached_tokens", "completion_tokens")
    rows = UsageRecord.objects.filter(price=price).order_by("pk").values_list(*columns, *counted)
    for tenant_id, slug, at, charged, *counts in rows.iterator(READ):
        month = calendar.find("month", "UTC", at.timestamp())
        if since is None or _instant(month.starts) >= since:
            slugs[tenant_id] = slug
            units[tenant_id, month] += right.charge(*counts) - int(charged.scaleb(DECIMALS))
    for (tenant_id, month), amount in sorted(units.items()):
        assert month.ends is not None  # only `total` never ends
        yield Entry(
            tenant_id=tenant_id,
            tenant_slug=slugs[tenant_id],
            starts_at=_instant(month.starts),
            ends_at=_instant(month.ends),
            amount=Decimal(amount).scaleb(-DECIMALS),
            currency=price.currency,
            model=price.model,
            price_id=price.pk,
        )


def _not_entered(due: Iterable[Entry], price: Price) -> Iterator[Entry]:
    """What of the differences earlier corrections of this price have not entered."""
    sums = Adjustment.objects.filter(price=price).order_by().values_list("tenant_id", "starts_at")
    entered = {(tenant_id, starts_at): amount for tenant_id, starts_at, amount in sums.annotate(Sum("amount"))}
    for entry in due:
        left = entry.amount - entered.get((entry.tenant_id, entry.starts_at), Decimal(0))
        if left:
            yield replace(entry, amount=left)


def _instant(unix: int) -> datetime:
    return datetime.fromtimestamp(unix, UTC)
