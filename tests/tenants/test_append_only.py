"""The database itself keeps the ledger, adjustments and the audit log as they were written, past all classes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from django.apps import apps
from django.db import IntegrityError, connection, transaction

from tenants.audit import record
from tenants.ledger import record_usage
from tenants.models import Adjustment, AuditEvent, Retention, UsageRecord
from tenants.models.append_only import AppendOnly

from .test_ledger import NOON, ROW

KINDS = [model for model in apps.get_models() if issubclass(model, AppendOnly)]
TABLES = [model._meta.db_table for model in KINDS]

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def rows() -> None:
    """One in each table."""
    record_usage([ROW])
    record("ada", "tier.change", "tier vip")
    Adjustment.objects.create(
        tenant_id="1",
        tenant_slug="acme",
        starts_at=NOON,
        ends_at=NOON + timedelta(days=1),
        amount=Decimal("-1.5"),
        currency="USD",
        reason="wrong price",
        author="user fay",
    )


def refused(statement: str) -> bool:
    with connection.cursor() as cursor:
        try:
            with transaction.atomic():
                cursor.execute(statement)
        except IntegrityError as error:
            assert "never changed or removed" in str(error)
            return True
    return False


def test_the_walk_finds_what_is_written_once() -> None:
    assert set(KINDS) == {UsageRecord, Adjustment, AuditEvent}


@pytest.mark.parametrize("table", TABLES)
def test_the_database_refuses_to_change_and_to_remove_rows(table: str) -> None:
    columns = [column.name for column in connection.introspection.get_table_description(connection.cursor(), table)]
    for column in columns:
        assert refused(f"UPDATE {table} SET {column} = {column}"), column
    assert refused(f"DELETE FROM {table}")
    with connection.cursor() as cursor:
        assert cursor.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (1,)


@pytest.mark.parametrize("table", TABLES)
def test_the_database_refuses_to_put_a_row_in_the_place_of_another(table: str) -> None:
    columns = [column.name for column in connection.introspection.get_table_description(connection.cursor(), table)]
    others = ", ".join(column for column in columns if column != "id")
    assert refused(f"INSERT INTO {table} SELECT * FROM {table} WHERE true ON CONFLICT (id) DO UPDATE SET id = 1")
    if connection.vendor == "sqlite":  # PostgreSQL has no REPLACE
        assert refused(f"REPLACE INTO {table} SELECT * FROM {table}")
        assert table != UsageRecord._meta.db_table or refused(
            f"REPLACE INTO {table} ({others}) SELECT {others} FROM {table}"
        )


def test_only_rows_older_than_the_border_go_and_only_while_a_batch_is_removed() -> None:
    record_usage([replace(ROW, request_id="new", arrived_at=NOON + timedelta(microseconds=1))])
    border = Retention.objects.create(kept_since=NOON + timedelta(microseconds=1))
    assert refused("DELETE FROM tenants_usagerecord WHERE request_id = 'r1'")
    border.removing = True
    border.save()
    assert refused("DELETE FROM tenants_usagerecord WHERE request_id = 'new'")
    assert refused("UPDATE tenants_usagerecord SET charge = 0 WHERE request_id = 'r1'")
    assert refused("DELETE FROM tenants_adjustment")
    assert refused("DELETE FROM tenants_auditevent")
    assert not refused("DELETE FROM tenants_usagerecord WHERE request_id = 'r1'")
    assert list(UsageRecord.objects.values_list("request_id", flat=True)) == ["new"]
