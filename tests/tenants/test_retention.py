"""FR-071: old rows go in whole closed months, a batch at a time, and a run that dies is gone on with."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, transaction
from hypothesis import given
from hypothesis import strategies as st

from harness_web.env import EnvError, read
from tenants import retention, tasks
from tenants.audit import Act, record
from tenants.ledger import LedgerError, record_usage
from tenants.models import AuditEvent, Retention, UsageRecord
from tenants.models.retention import kept_since
from tenants.periods import period_of
from tenants.retention import MONTHS, border, remove_old

from .test_ledger import ROW
from .test_reports import ZONES

NOW = datetime(2026, 8, 15, 12, tzinfo=UTC)
BORDER = datetime(2026, 4, 30, 10, tzinfo=UTC)  # where May begins first on earth
ACT = Act("ada", "the law")


def fill(*instants: datetime) -> None:
    record_usage([replace(ROW, request_id=f"{number} {at}", arrived_at=at) for number, at in enumerate(instants)])


def months() -> list[int]:
    """Of the rows that are there."""
    return sorted({at.month for at in UsageRecord.objects.values_list("arrived_at", flat=True)})


class TestBorder:
    def test_it_lies_where_the_first_kept_month_begins_on_the_earliest_clock(self) -> None:
        assert border(3, NOW) == BORDER
        assert border(15, NOW) == datetime(2025, 4, 30, 10, tzinfo=UTC)

    def test_a_month_runs_until_it_has_ended_everywhere(self) -> None:
        first = datetime(2026, 8, 1, tzinfo=UTC)
        assert border(3, first + timedelta(hours=11)) == datetime(2026, 3, 31, 10, tzinfo=UTC)
        assert border(3, first + timedelta(hours=12)) == BORDER

    @given(
        now=st.datetimes(datetime(2020, 1, 1), datetime(2040, 1, 1)).map(lambda at: at.replace(tzinfo=UTC)),
        kept=st.integers(MONTHS, 40),
        zone=st.sampled_from([*ZONES, "Pacific/Kiritimati", "Etc/GMT+12"]),
    )
    def test_what_is_kept_is_whole_and_what_goes_is_closed_on_every_clock(
        self, now: datetime, kept: int, zone: str
    ) -> None:
        """The instant before the border lies in a month after whose end `kept` whole months have passed, or in one
        that is not removed but begins there."""
        before = border(kept, now)
        clock = ZoneInfo(zone)
        last_removed = period_of("month", zone, before.timestamp() - 1)
        last = datetime.fromtimestamp(last_removed.starts, clock)
        today = now.astimezone(clock)
        assert (today.year - last.year) * 12 + today.month - last.month > kept
        first_kept = (last.replace(day=1) + timedelta(days=32)).replace(day=1)
        assert first_kept >= before

    def test_fewer_months_than_a_month_takes_to_be_closed_are_refused(self) -> None:
        with pytest.raises(ValueError, match="At least 3"):
            border(MONTHS - 1, NOW)


@pytest.mark.django_db
class TestRemoval:
    def test_only_rows_of_closed_months_go(self) -> None:
        fill(datetime(2025, 12, 1, tzinfo=UTC), BORDER - timedelta(microseconds=1), BORDER, NOW)
        record("bob", "tenant.create", "tenant acme")
        assert remove_old(3, NOW, ACT) == 2
        assert sorted(UsageRecord.objects.values_list("arrived_at", flat=True)) == [BORDER, NOW]
        assert kept_since() == BORDER
        assert AuditEvent.objects.filter(action="tenant.create").exists()

    def test_it_is_on_record_once_for_each_border(self) -> None:
        for now in (NOW, NOW, NOW + timedelta(days=31), NOW):
            remove_old(3, now, ACT)
        told = AuditEvent.objects.order_by("pk").values_list("actor", "action", "reason", "after")
        since = [BORDER.isoformat(), "2026-05-31T10:00:00+00:00"]
        assert list(told) == [("ada", "retention.begin", "the law", {"kept_since": at}) for at in since]
        assert str(kept_since()) == "2026-05-31 10:00:00+00:00"

    def test_a_batch_is_bounded_and_a_transaction_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(*(BORDER - timedelta(minutes=number) for number in range(1, 12)))
        monkeypatch.setattr(retention, "BATCH", 4)
        left: list[int] = []
        remove_old(3, NOW, ACT, pause=lambda _: left.append(UsageRecord.objects.count()))
        assert left == [7, 3] and UsageRecord.objects.count() == 0

    def test_the_oldest_go_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(*(datetime(2026, month, 10, tzinfo=UTC) for month in (3, 1, 4, 2)))
        monkeypatch.setattr(retention, "BATCH", 3)
        retention.begin(BORDER, ACT)
        assert retention.remove_batch() == 3 and months() == [4]

    def test_a_task_works_for_its_time_and_leaves_the_rest_to_the_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(*(BORDER - timedelta(minutes=number) for number in range(1, 12)))
        monkeypatch.setattr(retention, "BATCH", 2)
        ticks = iter(range(1_000))
        assert remove_old(3, NOW, ACT, most_seconds=6, clock=lambda: next(ticks), pause=lambda _: None) == 4
        assert UsageRecord.objects.count() == 7

    def test_it_stands_back_as_long_as_a_batch_took(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(*(BORDER - timedelta(minutes=number) for number in range(1, 4)))
        monkeypatch.setattr(retention, "BATCH", 2)
        now, pauses = [0.0], list[float]()
        batch = retention.remove_batch

        def slow() -> int:
            now[0] += 0.25
            return batch()

        monkeypatch.setattr(retention, "remove_batch", slow)
        remove_old(3, NOW, ACT, clock=lambda: now[0], pause=pauses.append)
        assert pauses == [0.25]

    def test_an_empty_ledger_moves_the_border_all_the_same(self) -> None:
        assert remove_old(3, NOW, ACT) == 0 and kept_since() == BORDER

    def test_without_a_border_nothing_is_removed(self) -> None:
        fill(datetime(2020, 1, 1, tzinfo=UTC))
        assert retention.remove_batch() == 0 and UsageRecord.objects.count() == 1


@pytest.mark.django_db
class TestDeath:
    @staticmethod
    def guarded() -> bool:
        with connection.cursor() as cursor, pytest.raises(IntegrityError), transaction.atomic():
            cursor.execute("DELETE FROM tenants_usagerecord")
        return not Retention.objects.get().removing

    def test_between_two_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(*(BORDER - timedelta(minutes=number) for number in range(1, 6)), NOW)
        monkeypatch.setattr(retention, "BATCH", 2)

        def die(_: float) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            remove_old(3, NOW, ACT, pause=die)
        assert UsageRecord.objects.count() == 4 and self.guarded()
        assert remove_old(3, NOW, ACT, pause=lambda _: None) == 3 and months() == [8]

    def test_in_the_middle_of_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(BORDER - timedelta(days=1), NOW)
        release = retention._release

        def die_before_it_is_taken_back(removing: bool) -> None:
            if not removing:
                raise KeyboardInterrupt
            release(removing)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(retention, "_release", die_before_it_is_taken_back)
            remove_old(3, NOW, ACT)
        assert months() == [4, 8] and self.guarded()
        assert remove_old(3, NOW, ACT) == 1


@pytest.mark.django_db
def test_usage_of_a_removed_time_that_comes_late_is_refused_rather_than_charged_again() -> None:
    late = replace(ROW, arrived_at=BORDER - timedelta(days=1))
    record_usage([late])
    remove_old(3, NOW, ACT)
    with pytest.raises(LedgerError, match="kept since"):
        record_usage([late])
    assert record_usage([replace(ROW, arrived_at=BORDER)]).rows == 1


@pytest.mark.django_db
class TestTaskAndCommand:
    @pytest.fixture(autouse=True)
    def old(self) -> None:
        fill(datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC))

    def test_usage_is_kept_for_ever_by_default(self) -> None:
        tasks.remove_old_usage()
        assert UsageRecord.objects.count() == 2 and kept_since() is None
        with pytest.raises(CommandError, match="kept for ever"):
            call_command("retention")

    def test_the_task_keeps_as_many_months_as_are_set(self, settings: object) -> None:
        settings.HARNESS_USAGE_MONTHS = 3  # type: ignore[attr-defined]
        tasks.remove_old_usage()
        assert UsageRecord.objects.count() == 1

    def test_the_command_says_what_it_did(self) -> None:
        said = io.StringIO()
        call_command("retention", "--months", "24", "--reason", "the law", stdout=said)
        assert said.getvalue() == f"1 rows are removed; usage is kept since {kept_since()}\n"
        with pytest.raises(CommandError, match="At least 3"):
            call_command("retention", "--months", "2")


@pytest.mark.parametrize("value", ["2", "0", "-3", "3.5", "three"])
def test_a_number_of_months_that_cannot_be_is_refused_at_the_start(value: str) -> None:
    with pytest.raises(EnvError, match="HARNESS_USAGE_MONTHS"):
        read({"HARNESS_USAGE_MONTHS": value})


def test_the_environment_takes_what_retention_takes() -> None:
    assert read({"HARNESS_USAGE_MONTHS": str(MONTHS)}).usage_months == MONTHS
    assert read({"HARNESS_USAGE_MONTHS": ""}).usage_months is None
