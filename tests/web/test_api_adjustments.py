"""Adjustments over the management API, and how usage reports show them. FR-069."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from msgspec import structs

from scheduler.models import Deployment
from tenants.adjustments import correct_price
from tenants.audit import Act
from tenants.ledger import record_usage
from tenants.models import Adjustment, AuditEvent, Membership, Price, Retention, UsageRecord
from tenants.pricing import TokenPrice, charge
from tests.tenants.test_ledger import ROW
from tests.web.people import API, People, Person
from tests.web.test_api_keys import error

AUGUST = datetime(2026, 8, 1, tzinfo=UTC)
AUGUST_REPORT = "usage?start_time=1785542400&end_time=1788220800&group_by=model,tenant"
EVER = "usage?start_time=0&end_time=8000000000"
CREDIT: dict[str, Any] = {
    "tenant": "acme",
    "amount": "-12.50",
    "currency": "USD",
    "starts_at": "2026-08-01T00:00:00Z",
    "ends_at": "2026-09-01T00:00:00Z",
    "model": "demo",
    "reason": "an outage",
}


def price(per_thousand: str, at: datetime, model: str = "demo") -> Price:
    rate = Decimal(per_thousand) * 1000
    rates = {"input_per_mtok": rate, "cached_input_per_mtok": rate, "output_per_mtok": rate}
    return Price.objects.create(model=model, effective_from=at, **rates)


def use(people: People, priced: Price, name: str, model: str = "demo") -> None:
    cost = charge(TokenPrice.of(priced), 1000, 0, 0)
    acme = {"tenant_id": str(people.acme.pk), "tenant_slug": "acme", "key_id": str(people.acme_key.key.pk)}
    tokens = {"prompt_tokens": 1000, "completion_tokens": 0, "arrived_at": AUGUST, "model": model}
    record_usage([replace(ROW, request_id=name, price_id=priced.pk, charge=cost, **acme, **tokens)])


def adjustments(person: Person, query: str = EVER) -> list[dict[str, Any]]:
    answer = person.get(query)
    assert answer.status_code == 200, answer.content
    found: list[dict[str, Any]] = answer.json()["adjustments"]
    return found


def test_finance_enters_a_credit_and_it_is_on_record(people: People) -> None:
    made = people.fay.post("adjustments", CREDIT)
    assert made.status_code == 201, made.content
    document = made.json()
    assert {name: document[name] for name in CREDIT} == CREDIT | {"amount": "-12.5"}
    assert (document["author"], document["price_id"]) == ("user fay", None)
    event = AuditEvent.objects.get()
    assert (event.action, event.actor, event.reason) == ("adjustment.create", "user fay", "an outage")
    assert event.tenant_id == str(people.acme.pk)
    assert people.fay.get("adjustments").json()["data"] == [document]


def test_who_may_enter_and_who_may_read(people: People) -> None:
    entered = [person.post("adjustments", CREDIT).status_code for person in (people.olga, people.ann, people.dev)]
    assert entered == [201, 403, 403]
    assert people.gus.post("adjustments", CREDIT).status_code == 403
    everybody = (people.olga, people.fay, people.ann, people.gus)
    assert [len(person.get("adjustments").json()["data"]) for person in everybody] == [1, 1, 1, 0]
    assert people.dev.get("adjustments").status_code == 403
    everybody = (*everybody, people.dev)
    assert [len(adjustments(person)) for person in everybody] == [1, 1, 1, 0, 0]


def test_an_owner_who_is_also_a_developer_elsewhere_sees_the_adjustments_of_the_own_tenant(people: People) -> None:
    Membership.objects.create(user=people.ann.user, tenant=people.globex, role="developer")
    people.fay.post("adjustments", CREDIT)
    people.fay.post("adjustments", CREDIT | {"tenant": "globex"})
    assert [one["tenant"] for one in adjustments(people.ann, EVER + "&group_by=tenant")] == ["acme"]
    assert [one["tenant"] for one in people.ann.get("adjustments").json()["data"]] == ["acme"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"amount": "0"}, "amount"),
        ({"amount": "0.0000000000"}, "amount"),
        ({"amount": "1e3"}, "amount"),
        ({"amount": 5}, "amount"),
        ({"amount": "999999999"}, "amount"),
        ({"amount": "0.00000000001"}, "amount"),
        ({"currency": "usd"}, "currency"),
        ({"starts_at": "2026-08-01T00:00:00"}, "starts_at"),
        ({"ends_at": "2026-08-01T00:00:00Z"}, "ends_at"),
        ({"reason": ""}, "reason"),
        ({"reason": "   "}, "reason"),
        ({"reason": "x" * 2001}, "reason"),
        ({"reason": "a\0b"}, "reason"),
        ({"starts_at": "0001-01-01T00:00:00+14:00"}, "starts_at"),
        ({"ends_at": "9999-12-31T23:59:59-12:00"}, "ends_at"),
        ({"author": "somebody else"}, "author"),
        ({"at": "2026-08-01T00:00:00Z"}, "at"),
    ],
)
def test_what_cannot_be_is_refused_by_name(people: People, changes: dict[str, Any], param: str) -> None:
    assert error(people.fay.post("adjustments", CREDIT | changes), 400)["param"] == param
    assert not Adjustment.objects.exists() and not AuditEvent.objects.exists()


@pytest.mark.parametrize("body", [b'{"reason": "\\ud800!"}', b'{"amount": NaN}', b"[" * 100_000, b'{"reason": "\xff"}'])
def test_what_is_no_json_is_refused(people: People, body: bytes) -> None:
    answer = people.fay.client.generic("POST", f"{API}adjustments", body, content_type="application/json")
    assert error(answer, 400)["code"] == "invalid_json"


def test_a_tenant_that_is_not_there_is_a_404(people: People) -> None:
    error(people.fay.post("adjustments", CREDIT | {"tenant": "nobody"}), 404)


def test_an_adjustment_is_neither_changed_nor_removed(people: People) -> None:
    people.fay.post("adjustments", CREDIT)
    for method in ("PUT", "PATCH", "DELETE"):
        assert people.fay.call(method, "adjustments", CREDIT).status_code == 405


def test_reports_show_adjustments_beside_the_usage_and_by_whose_they_are(people: People) -> None:
    use(people, price("1.00", AUGUST), "r1")
    for changes in ({}, {"amount": "2.25"}, {"tenant": "globex", "amount": "-1"}, {"currency": "EUR"}):
        assert people.fay.post("adjustments", CREDIT | changes).status_code == 201
    assert adjustments(people.fay) == [
        {"amount": "-12.5", "currency": "EUR", "num_adjustments": 1},
        {"amount": "-11.25", "currency": "USD", "num_adjustments": 3},
    ]
    of_acme = [one for one in adjustments(people.fay, EVER + "&group_by=tenant") if one["tenant"] == "acme"]
    assert [(one["amount"], one["currency"]) for one in of_acme] == [("-12.5", "EUR"), ("-10.25", "USD")]
    assert adjustments(people.fay, EVER + "&tenant=globex")[0]["amount"] == "-1"
    (bucket,) = people.fay.get(EVER).json()["data"]
    assert bucket["results"][0]["cost"] == "1"


class TestAugust:
    """FR-069: the report of a month that is over stays as it was, to the byte."""

    @staticmethod
    def report(people: People) -> bytes:
        answer = people.fay.get(AUGUST_REPORT)
        assert answer.status_code == 200
        content: bytes = answer.content
        return content

    @pytest.fixture
    def priced(self, people: People) -> Price:
        priced = price("1.00", AUGUST)
        use(people, priced, "r1")
        use(people, price("0.80", AUGUST, "other"), "r2", "other")
        for model in ("demo", "other"):
            Deployment.objects.create(model=model, engine="simulated", options={})
        return priced

    def test_after_a_further_price(self, people: People, priced: Price) -> None:
        before = self.report(people)
        price("0.10", datetime(2026, 9, 1, tzinfo=UTC))
        price("0.10", datetime(2026, 8, 15, tzinfo=UTC), "other")
        assert self.report(people) == before and b'"cost":"1"' in before.replace(b" ", b"")

    def test_after_a_retroactive_correction(self, people: People, priced: Price) -> None:
        before, rows = self.report(people), list(UsageRecord.objects.order_by("pk").values())
        assert correct_price(priced, structs.replace(TokenPrice.of(priced), input=0), Act("user fay", "it was free"))
        assert self.report(people) == before
        assert list(UsageRecord.objects.order_by("pk").values()) == rows
        assert adjustments(people.fay)[0]["amount"] == "-1"

    def test_after_models_were_renamed_and_removed(self, people: People, priced: Price) -> None:
        before = self.report(people)
        Deployment.objects.filter(model="demo").update(model="renamed")
        Deployment.objects.filter(model="other").delete()
        assert self.report(people) == before
        results = people.fay.get(AUGUST_REPORT).json()["data"][0]["results"]
        assert {one["model"]: one["cost"] for one in results} == {"demo": "1", "other": "0.8"}


def test_a_report_says_since_when_usage_is_kept(people: People) -> None:
    assert people.fay.get(EVER).json()["kept_since"] is None
    assert "X-Kept-Since" not in people.fay.get("usage/records.csv").headers
    Retention.objects.create(kept_since=AUGUST)
    assert people.fay.get(EVER).json()["kept_since"] == AUGUST.timestamp()
    assert people.fay.get("usage/records.csv").headers["X-Kept-Since"] == AUGUST.isoformat()


class TestFinance:
    """Reads usage of every tenant, and nothing else of them."""

    def test_sees_the_usage_of_every_tenant(self, people: People) -> None:
        for tenant in (people.acme, people.globex):
            row = replace(ROW, request_id=tenant.slug, tenant_id=str(tenant.pk), tenant_slug=tenant.slug)
            record_usage([replace(row, arrived_at=AUGUST)])
        results = people.fay.get(EVER + "&group_by=tenant").json()["data"][0]["results"]
        assert {one["tenant"]: one["num_requests"] for one in results} == {"acme": 1, "globex": 1}
        assert people.fay.get("usage/records.json?start_time=0").headers["X-Row-Count"] == "2"

    @pytest.mark.parametrize(
        "path", ["tenants", "tenants/acme", "tiers", "keys", "memberships", "audit", "dead-letters", "requests/x/trace"]
    )
    def test_sees_nothing_else(self, people: People, path: str) -> None:
        assert people.fay.get(path).status_code == 403

    def test_changes_nothing(self, people: People) -> None:
        assert people.fay.post("tenants", {"slug": "x", "tier": "vip"}).status_code == 403
        assert people.fay.post("keys", {"name": "x", "tenant": "acme"}).status_code == 403
        assert people.fay.patch("tenants/acme", {"name": "x"}).status_code == 403
        assert people.fay.post("usage").status_code == 405

    def test_ends_with_the_role(self, people: People) -> None:
        Membership.objects.filter(user=people.fay.user).delete()
        assert people.fay.get(EVER).status_code == 403
        assert people.fay.post("adjustments", CREDIT).status_code == 403
