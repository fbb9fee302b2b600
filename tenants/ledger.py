"""Writing to the ledger: idempotent, in batches, together with the accounts of budgets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from decimal import Decimal

from django.core.exceptions import ValidationError
from django.db import DataError, IntegrityError, transaction

from .budgets import AccountKey, Charged, charge, lock_tenants
from .models import UsageRecord
from .models.retention import kept_since

CHUNK = 500  # rows of one transaction: well under half a second on either database


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One attempt of one request, as `UsageRecord` keeps it. Instants carry a zone.

    `price_id` and `charge` are None when no price applied.
    """

    request_id: str
    tenant_id: str
    tenant_slug: str
    key_id: str
    key_name: str
    tier: str
    model: str
    deployment: str
    status: str
    prompt_tokens: int
    completion_tokens: int
    arrived_at: datetime
    dispatched_at: datetime
    ended_at: datetime
    wait_time: float
    compute_time: float
    attempt: int = 1
    project: str = ""
    finish_reason: str = ""
    reason: str = ""
    stream: bool = False
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    first_token_at: datetime | None = None
    batch_id: str = ""
    batch_size: float = 0.0
    attained: bool | None = None
    miss_reason: str = ""
    engine_seconds: float = 0.0
    policy_version: int = 0
    price_id: int | None = None
    charge: Decimal | None = None
    currency: str = ""
    epoch: int = 0


class LedgerError(Exception):
    """The database does not take a row: trying again cannot help."""


FIELDS = tuple(one.name for one in fields(UsageRow))

# A value too long, too large or with too many decimals for its column.
Unfit = (DataError, IntegrityError, ValidationError, OverflowError)


@dataclass(frozen=True, slots=True)
class Recorded:
    """How many rows were new, and what they did to the accounts of budgets."""

    rows: int = 0
    charged: Charged = field(default_factory=Charged)


def record_usage(
    rows: Sequence[UsageRow],
    *,
    process: str = "",
    leased: Mapping[tuple[str, int], Collection[AccountKey]] | None = None,
) -> Recorded:
    """Write the rows that are not there yet, by (request id, attempt), and charge them.

    `leased`: for which of them, and on which accounts, a lease of `process` pays. Safe to repeat after any failure: a
    row counts and costs once however often it is handed in. Raises LedgerError for a row that no column fits; the rows
    of earlier chunks are written then.
    """
    written, charged = 0, Charged()
    for start in range(0, len(rows), CHUNK):
        written += _record_chunk(rows[start : start + CHUNK], process, leased or {}, charged)
    return Recorded(written, charged)


def _record_chunk(
    rows: Sequence[UsageRow],
    process: str,
    leased: Mapping[tuple[str, int], Collection[AccountKey]],
    charged: Charged,
) -> int:
    """The number of rows that are new; what they cost is added to `charged`."""
    wanted: dict[tuple[str, int], UsageRow] = {}
    for row in rows:
        wanted.setdefault((row.request_id, row.attempt), row)
    try:
        with transaction.atomic():
            lock_tenants({row.tenant_id for row in rows})  # so that of two who write the same row only one charges it
            _refuse_removed(rows)
            before = _present(wanted)
            new = [_record(row) for identity, row in wanted.items() if identity not in before]
            UsageRecord.objects.bulk_create(new, ignore_conflicts=True)
            # SQLite's OR IGNORE also skips rows that break a CHECK or a NOT NULL: no loss may be silent.
            if lost := wanted.keys() - _present(wanted):
                raise LedgerError(f"The ledger did not take {len(lost)} rows, such as request {min(lost)[0]}.")
            cost = charge(new, process, leased) if new else Charged()
    except Unfit as error:
        raise LedgerError(f"The ledger does not take a row: {error}") from error
    charged.add(cost)
    return len(new)


def _refuse_removed(rows: Sequence[UsageRow]) -> None:
    """Rows of a time that retention has removed may have been there: written again, they would be charged again."""
    since = kept_since()
    if late := [] if since is None else [row for row in rows if row.arrived_at < since]:
        raise LedgerError(f"The ledger is kept since {since}, and {late[0].request_id} is older.")


def _record(row: UsageRow) -> UsageRecord:
    return UsageRecord(**{name: getattr(row, name) for name in FIELDS})


def _present(wanted: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
    ids = {request_id for request_id, _ in wanted}
    found = UsageRecord.objects.filter(request_id__in=ids).values_list("request_id", "attempt")
    return set(wanted) & set(found)
