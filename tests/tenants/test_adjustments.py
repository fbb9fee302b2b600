"""FR-069: a wrong price is put right by entries beside the ledger, and nothing that was written is touched."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from tenants import adjustments, reports
from tenants.adjustments import correct_price
from tenants.audit import Act
from tenants.documents import DocumentError
from tenants.ledger import record_usage
from tenants.models import Adjustment, AuditEvent, Price, Retention, Tenant, UsageRecord
from tenants.pricing import TokenPrice, charge

from .test_ledger import ROW

AUGUST = datetime(2026, 8, 1, tzinfo=UTC)
SEPTEMBER = datetime(2026, 9, 1, tzinfo=UTC)
ACT = Act("user fay", "the contract says 0.80")

pytestmark = pytest.mark.django_db


def price(rate: str, model: str = "demo", **whose: Any) -> Price:
    rates = {"input_per_mtok": rate, "cached_input_per_mtok": rate, "output_per_mtok": rate}
    return Price.objects.create(model=model, effective_from=AUGUST - timedelta(days=90), **rates, **whose)


def right(wrong: Price, rate: str) -> TokenPrice:
    units = int(Decimal(rate) * 10**8)
    return TokenPrice(wrong.pk, wrong.currency, units, units, units)


def use(wrong: Price, at: datetime, tokens: int, tenant: str = "acme", name: str = "") -> None:
    wrong.refresh_from_db()
    row = replace(
        ROW,
        request_id=name or f"{tenant} {at} {tokens}",
        tenant_id={"acme": "1", "globex": "2"}[tenant],
        tenant_slug=tenant,
        prompt_tokens=tokens,
        completion_tokens=0,
        arrived_at=at,
        price_id=wrong.pk,
        charge=charge(TokenPrice.of(wrong), tokens, 0, 0),
    )
    record_usage([row])


def ledger() -> list[dict[str, Any]]:
    return list(UsageRecord.objects.order_by("pk").values())


def entered() -> list[tuple[str, int, Decimal]]:
    rows = Adjustment.objects.order_by("tenant_id", "starts_at", "pk")
    return [(row.tenant_slug, row.starts_at.month, row.amount) for row in rows]


@pytest.fixture
def wrong(db: None) -> Price:
    """Used by two tenants, at the last instant of July, and for tokens whose charge is rounded."""
    wrong = price("1.00005")
    use(wrong, AUGUST - timedelta(microseconds=1), 1_000_000)
    use(wrong, AUGUST, 2_000_000)
    for number in range(3):
        use(wrong, AUGUST + timedelta(days=number + 1), 1, name=f"one token {number}")
    use(wrong, AUGUST + timedelta(days=9), 500_000, "globex")
    return wrong


class TestAWrongPrice:
    def test_the_difference_is_entered_by_tenant_and_month_with_reason_and_author(self, wrong: Price) -> None:
        correct_price(wrong, right(wrong, "0.80005"), ACT)
        token = Decimal("0.0000010000") - Decimal("0.0000008000")  # each rounded for itself, half to even
        assert entered() == [
            ("acme", 7, Decimal("-0.2")),
            ("acme", 8, Decimal("-0.4") - 3 * token),
            ("globex", 8, Decimal("-0.1")),
        ]
        row = Adjustment.objects.get(tenant_slug="globex")
        assert (row.reason, row.author, row.model, row.currency) == (ACT.reason, ACT.actor, "demo", "USD")
        assert (row.starts_at, row.ends_at, row.price_id) == (AUGUST, SEPTEMBER, wrong.pk)

    def test_no_row_of_the_ledger_is_edited(self, wrong: Price) -> None:
        before = ledger()
        correct_price(wrong, right(wrong, "0.80005"), ACT)
        assert ledger() == before

    def test_charges_and_adjustments_are_what_the_right_price_would_have_charged(self, wrong: Price) -> None:
        correct_price(wrong, right(wrong, "0.12345678"), ACT)
        counts = UsageRecord.objects.values_list("prompt_tokens", flat=True)
        should = sum(charge(right(wrong, "0.12345678"), tokens, 0, 0) for tokens in counts)
        charged = sum(UsageRecord.objects.values_list("charge", flat=True))
        assert charged + sum(amount for _, _, amount in entered()) == should

    def test_a_second_run_enters_nothing_but_what_was_used_since(self, wrong: Price) -> None:
        assert len(correct_price(wrong, right(wrong, "0.80005"), ACT)) == 3
        assert correct_price(wrong, right(wrong, "0.80005"), ACT) == []
        use(wrong, AUGUST + timedelta(days=20), 1_000_000, "globex")
        (late,) = correct_price(wrong, right(wrong, "0.80005"), ACT)
        assert (late.tenant_slug, late.amount) == ("globex", Decimal("-0.2"))

    def test_a_wrong_correction_is_corrected(self, wrong: Price) -> None:
        correct_price(wrong, right(wrong, "0"), ACT)
        correct_price(wrong, right(wrong, "1.00005"), Act("user fay", "it was right after all"))
        assert sum(amount for _, _, amount in entered()) == 0 and len(entered()) == 6

    def test_other_prices_and_what_had_none_are_left_alone(self, wrong: Price) -> None:
        other = price("5", "other")
        use(other, AUGUST, 1_000_000)
        record_usage([replace(ROW, request_id="free", arrived_at=AUGUST, charge=None, currency="")])
        correct_price(wrong, right(wrong, "0.80005"), ACT)
        assert {row.price_id for row in Adjustment.objects.all()} == {wrong.pk}

    def test_each_entry_is_in_the_audit_log_of_its_tenant(self, wrong: Price) -> None:
        correct_price(wrong, right(wrong, "0.80005"), ACT)
        events = AuditEvent.objects.order_by("pk")
        assert [(one.action, one.actor, one.reason, one.tenant_id) for one in events] == [
            ("adjustment.create", ACT.actor, ACT.reason, tenant) for tenant in ("1", "1", "2")
        ]

    def test_without_a_reason_nothing_is_entered(self, wrong: Price) -> None:
        with pytest.raises(DocumentError, match="reason"):
            correct_price(wrong, right(wrong, "0.80005"), Act("user fay"))
        assert entered() == []

    def test_months_that_retention_has_touched_keep_their_entries(self, wrong: Price) -> None:
        correct_price(wrong, right(wrong, "0.80005"), ACT)
        before = entered()
        Retention.objects.create(kept_since=AUGUST)
        correct_price(wrong, right(wrong, "0.60005"), ACT)
        assert entered()[0] == before[0] and [month for _, month, _ in entered()] == [7, 8, 8, 8, 8]

    def test_two_who_correct_the_same_price_at_once_enter_it_once(
        self, wrong: Price, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second has read the ledger before the first has entered anything."""
        due = list(adjustments.differences(wrong, right(wrong, "0.80005")))
        correct_price(wrong, right(wrong, "0.80005"), ACT)
        monkeypatch.setattr(adjustments, "differences", lambda *_: due)
        assert correct_price(wrong, right(wrong, "0.80005"), ACT) == []


class TestReports:
    @staticmethod
    def sums(start: datetime, end: datetime, *group_by: str) -> list[dict[str, Any]]:
        span = int(start.timestamp()), int(end.timestamp())
        return list(reports.adjustments(Adjustment.objects.all(), *span, group_by))

    def test_an_adjustment_counts_when_it_was_made_and_not_in_the_month_it_is_about(self, wrong: Price) -> None:
        correct_price(wrong, right(wrong, "0.80005"), ACT)
        made = Adjustment.objects.values_list("at", flat=True)
        assert self.sums(AUGUST, SEPTEMBER) == []
        (today,) = self.sums(min(made).replace(microsecond=0), max(made) + timedelta(seconds=1))
        assert (today["currency"], today["num_adjustments"]) == ("USD", 3)
        assert today["amount"] == sum(amount for _, _, amount in entered())

    def test_it_is_summed_by_tenant_and_model_and_never_over_currencies(self, wrong: Price) -> None:
        correct_price(wrong, right(wrong, "0.80005"), ACT)
        euros = price("1", "other", currency="EUR")
        use(euros, AUGUST, 1_000_000)
        correct_price(euros, right(euros, "2"), ACT)
        ever = datetime(2020, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)
        found = self.sums(*ever, "tenant", "model", "key")
        assert [(one["tenant"], one["model"], one["currency"], one["num_adjustments"]) for one in found] == [
            ("acme", "demo", "USD", 2),
            ("acme", "other", "EUR", 1),
            ("globex", "demo", "USD", 1),
        ]


class TestCommand:
    @staticmethod
    def run(*arguments: str) -> list[str]:
        said = io.StringIO()
        call_command("adjust", *arguments, stdout=said)
        return said.getvalue().splitlines()

    def test_a_wrong_price_is_shown_first_and_then_corrected(self, wrong: Price) -> None:
        rates = ("--input", "0.80005", "--cached-input", "0.80005", "--output", "0.80005")
        asked = ("--price", str(wrong.pk), *rates, "--reason", "typing error")
        shown = self.run(*asked, "--dry-run")
        assert shown == ["acme 2026-07 -0.2 USD", "acme 2026-08 -0.4000006 USD", "globex 2026-08 -0.1 USD"]
        assert entered() == []
        assert self.run(*asked) == [*shown, "3 adjustments are entered"]
        assert self.run(*asked) == ["0 adjustments are entered"]
        assert Adjustment.objects.filter(author__startswith="harness adjust").count() == 3

    def test_an_amount_is_entered_by_hand(self, acme: Tenant) -> None:
        span = ("--from", "2026-08-01T00:00:00Z", "--until", "2026-09-01T00:00:00Z")
        credit = ("--tenant", "acme", "--amount", "-12.5", "--currency", "EUR", *span, "--reason", "an outage")
        assert self.run(*credit) == ["acme 2026-08 -12.5 EUR"]
        row = Adjustment.objects.get()
        assert (row.tenant_id, row.amount, row.price_id) == (str(acme.pk), Decimal("-12.5"), None)
        assert AuditEvent.objects.get().action == "adjustment.create"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"--amount": "0"}, "amount other than 0"),
            ({"--amount": "0.00000000001"}, "10 decimals"),
            ({"--amount": "1e9"}, "amount other than 0"),
            ({"--amount": "NaN"}, "invalid decimal"),
            ({"--amount": None}, "Give --amount"),
            ({"--currency": "usd"}, "currency"),
            ({"--until": "2026-08-01T00:00:00Z"}, "not after the start"),
            ({"--until": "2026-09-01T00:00:00"}, "invalid instant"),
            ({"--reason": ""}, "reason"),
            ({"--tenant": "nobody"}, "no tenant 'nobody'"),
            ({"--tenant": None}, "Say either"),
            ({"--price": "1"}, "Say either"),
            ({"--tenant": None, "--price": "1"}, "Give --input"),
            (
                {"--tenant": None, "--price": "1", "--input": "1", "--cached-input": "1", "--output": "1"},
                "no price 1",
            ),
            ({"--output": "-1"}, "invalid rate"),
            ({"--output": "0.000000001"}, "invalid rate"),
            ({"--from": "0001-01-01T00:00:00+14:00"}, "invalid instant"),
        ],
    )
    def test_what_cannot_be_is_refused(self, acme: Tenant, changes: dict[str, str | None], message: str) -> None:
        given: dict[str, str | None] = {
            "--tenant": "acme",
            "--amount": "1",
            "--currency": "USD",
            "--from": "2026-08-01T00:00:00Z",
            "--until": "2026-09-01T00:00:00Z",
            "--reason": "because",
        }
        arguments = [f"{name}={value}" for name, value in (given | changes).items() if value is not None]
        with pytest.raises(CommandError, match=message):
            self.run(*arguments)
        assert entered() == []
