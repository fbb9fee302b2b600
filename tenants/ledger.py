"""Writing to the ledger: idempotent, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from decimal import Decimal

from django.core.exceptions import ValidationError
from django.db import DataError, IntegrityError, transaction

from .models import UsageRecord

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


# A value too long, too large or with too many decimals for its column.
Unfit = (DataError, IntegrityError, ValidationError, OverflowError)


def record_usage(rows: Sequence[UsageRow]) -> int:
    """Write the rows that are not there yet, by (request id, attempt); the number of those written.

    Safe to repeat after any failure: a row counts once however often it is handed in. Raises LedgerError for a row
    that no column fits; the rows of earlier chunks are written then.
    """
    return sum(_record_chunk(rows[start : start + CHUNK]) for start in range(0, len(rows), CHUNK))


def _record_chunk(rows: Sequence[UsageRow]) -> int:
    wanted = {(row.request_id, row.attempt) for row in rows}
    try:
        with transaction.atomic():
            before = _present(wanted)
            UsageRecord.objects.bulk_create([UsageRecord(**asdict(row)) for row in rows], ignore_conflicts=True)
            after = _present(wanted)
            # SQLite's OR IGNORE also skips rows that break a CHECK or a NOT NULL: no loss may be silent.
            if lost := wanted - after:
                raise LedgerError(f"The ledger did not take {len(lost)} rows, such as request {min(lost)[0]}.")
    except Unfit as error:
        raise LedgerError(f"The ledger does not take a row: {error}") from error
    return len(after - before)


def _present(wanted: set[tuple[str, int]]) -> set[tuple[str, int]]:
    ids = {request_id for request_id, _ in wanted}
    found = UsageRecord.objects.filter(request_id__in=ids).values_list("request_id", "attempt")
    return wanted & set(found)
