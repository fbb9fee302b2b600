"""The ledger: complete, once, and exact to the last digit."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.db.models import Sum

from tenants import ledger
from tenants.audit import record
from tenants.ledger import LedgerError, UsageRow, record_usage
from tenants.models import AppendOnlyError, AuditEvent, UsageRecord

NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)

ROW = UsageRow(
    request_id="r1",
    tenant_id="1",
    tenant_slug="acme",
    key_id="1",
    key_name="prod",
    tier="vip",
    model="demo",
    deployment="demo",
    status="finished",
    prompt_tokens=10,
    completion_tokens=5,
    arrived_at=NOON,
    dispatched_at=NOON,
    ended_at=NOON,
    wait_time=0.1,
    compute_time=0.2,
    charge=Decimal("0.0000012345"),
    currency="USD",
)

pytestmark = pytest.mark.django_db


def rows(count: int) -> list[UsageRow]:
    return [replace(ROW, request_id=f"r{index}") for index in range(count)]


def test_a_row_comes_back_as_it_was_given() -> None:
    assert record_usage([ROW]).rows == 1
    (kept,) = UsageRecord.objects.all()
    assert all(getattr(kept, name) == getattr(ROW, name) for name in UsageRow.__slots__)


def test_handing_in_twice_counts_once() -> None:
    assert record_usage(rows(3)).rows == 3
    assert record_usage(rows(5)).rows == 2
    assert UsageRecord.objects.count() == 5


def test_the_first_row_of_an_attempt_stands() -> None:
    record_usage([ROW])
    record_usage([replace(ROW, completion_tokens=99)])
    assert UsageRecord.objects.get().completion_tokens == 5


def test_attempts_of_a_request_are_rows_of_their_own() -> None:
    assert record_usage([ROW, replace(ROW, attempt=2, charge=Decimal(0))]).rows == 2


def test_more_rows_than_a_chunk_are_all_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "CHUNK", 2)
    assert record_usage(rows(5)).rows == 5 and UsageRecord.objects.count() == 5


def test_sums_of_charges_are_exact() -> None:
    # 1,000 x 0.1 is not 100 in floating point, which is what DECIMAL columns are on SQLite.
    record_usage([replace(row, charge=Decimal("0.1000000001")) for row in rows(1000)])
    assert UsageRecord.objects.aggregate(total=Sum("charge"))["total"] == Decimal("100.0000001000")


def test_an_amount_with_more_decimals_than_are_kept_is_refused_rather_than_rounded() -> None:
    with pytest.raises(LedgerError, match="10 decimals"):
        record_usage([replace(ROW, charge=Decimal("0.00000000001"))])


def test_the_largest_charge_is_kept_exactly() -> None:
    largest = Decimal("922337203.6854775807")
    record_usage([replace(ROW, charge=largest)])
    assert UsageRecord.objects.get().charge == largest


def test_a_row_that_the_database_does_not_take_is_an_error_and_not_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_present", lambda wanted: set())
    with pytest.raises(LedgerError, match="did not take 1 rows, such as request r1"):
        record_usage([ROW])


@pytest.mark.parametrize("unfit", [{"prompt_tokens": 2**70}, {"prompt_tokens": -1}, {"policy_version": None}])
def test_a_row_that_fits_no_column_is_an_error_of_its_own(unfit: dict[str, Any]) -> None:
    with pytest.raises(LedgerError):
        record_usage([replace(ROW, **unfit)])
    assert not UsageRecord.objects.exists()


def test_ledger_and_audit_rows_cannot_be_changed_or_removed() -> None:
    record_usage([ROW])
    record("ada", "tier.change", "tier vip")
    for model in (UsageRecord, AuditEvent):
        kept = model.objects.get()
        for tamper in (kept.save, kept.delete, model.objects.all().delete, lambda m=model: m.objects.update(id=5)):
            with pytest.raises(AppendOnlyError):
                tamper()
