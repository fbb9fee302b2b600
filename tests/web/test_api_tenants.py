"""Tenants, tiers and memberships over the management API."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import config
from tenants.changes import current_version
from tenants.models import ApiKey, AuditEvent, Limit, Membership, Tenant
from tests.web.people import People
from tests.web.test_api_keys import error


def test_an_operator_makes_a_tenant_with_limits_changes_it_and_removes_it(people: People) -> None:
    sent = {"slug": "initech", "tier": "free", "timezone": "Asia/Shanghai", "limits": {"rpm": 5}, "reason": "signed"}
    made = people.olga.post("tenants", sent)
    assert made.status_code == 201
    read = people.olga.get("tenants/initech").json()
    assert read == made.json()
    assert (read["name"], read["timezone"], read["state"], read["limits"]["rpm"]) == (
        "initech",
        "Asia/Shanghai",
        "active",
        5,
    )
    changed = people.olga.patch(
        "tenants/initech", {"state": "suspended", "tier": "vip", "limits": {"rpm": None}}
    ).json()
    assert (changed["state"], changed["tier"], changed["limits"]["rpm"]) == ("suspended", "vip", None)
    assert people.olga.delete("tenants/initech?reason=left").status_code == 204
    assert error(people.olga.get("tenants/initech"), 404)["message"] == "There is no such tenant."
    told = AuditEvent.objects.order_by("id").values_list("action", "reason")
    assert list(told) == [
        ("tenant.create", "signed"),
        ("limit.create", "signed"),
        ("tenant.change", ""),
        ("limit.remove", ""),
        ("tenant.remove", "left"),
    ]
    assert set(AuditEvent.objects.values_list("tenant_id", flat=True)) == {read["id"]}


def test_a_change_of_several_things_is_one_change_or_none(people: People) -> None:
    before = current_version()
    assert people.olga.patch("tenants/acme", {"name": "A", "limits": {"rpm": 1, "tpm": 2}}).status_code == 200
    assert current_version() == before + 1
    bad = people.olga.patch(
        "tenants/acme", {"name": "B", "limits": {"budgets": [{"period": "day", "amount": "1", "currency": "usd"}]}}
    )
    assert error(bad, 400)["param"] == "limits.budgets[0].currency"
    assert (Tenant.objects.get(slug="acme").name, current_version()) == ("A", before + 1)
    assert not Limit.objects.filter(kind="budget").exists()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"slug": "acme", "tier": "vip"}, 409, None),
        ({"slug": "New Corp", "tier": "vip"}, 400, "slug"),
        ({"slug": "new"}, 400, "tier"),
        ({"slug": "new", "tier": "gold"}, 400, "tier"),
        ({"slug": "new", "tier": "vip", "timezone": "Mars/Base"}, 400, "timezone"),
        ({"slug": "new", "tier": "vip", "state": "absent"}, 400, "state"),
        ({"slug": "new", "tier": "vip", "keys": []}, 400, "keys"),
        ({"slug": "new", "tier": "vip", "limits": {"models": {"demo": {"rpmm": 1}}}}, 400, "limits.models.demo.rpmm"),
    ],
)
def test_a_tenant_that_cannot_be_is_refused_by_field(people: People, body: Any, status: int, param: str | None) -> None:
    assert error(people.olga.post("tenants", body), status)["param"] == param
    assert Tenant.objects.count() == 2


def test_members_see_their_own_tenant_and_change_nothing_of_it(people: People) -> None:
    for member in (people.ann, people.dev):
        assert [tenant["slug"] for tenant in member.get("tenants").json()["data"]] == ["acme"]
        assert member.get("tenants/acme").json()["tier"] == "vip"
        error(member.patch("tenants/acme", {"limits": {"rpm": None}}), 403)
        error(member.delete("tenants/acme"), 403)
        error(member.post("tenants", {"slug": "mine", "tier": "vip"}), 403)
    assert Tenant.objects.count() == 2


def test_tenants_are_filtered(people: People) -> None:
    for query, slugs in (("tier=free", ["globex"]), ("slug=cm", ["acme"]), ("state=suspended", [])):
        assert [tenant["slug"] for tenant in people.olga.get(f"tenants?{query}").json()["data"]] == slugs


def test_a_tiers_limits_are_changed_here_and_its_terms_are_not(people: People) -> None:
    version = config.current().version
    limits = {"rpm": 20, "budgets": [{"period": "day", "tokens": 0}]}
    changed = people.olga.patch("tiers/free", {"limits": limits, "reason": "abuse"}).json()
    assert (changed["limits"]["rpm"], changed["limits"]["budgets"][0]["tokens"]) == (20, 0)
    assert people.olga.get("tiers/free").json() == changed
    assert changed["terms"]["slo"]["ttft"] == 5.0 and config.current().version == version
    assert error(people.olga.patch("tiers/free", {"weight": 5}), 400)["param"] == "weight"
    assert error(people.ann.patch("tiers/vip", {"limits": {}}), 403)
    assert {event.reason for event in AuditEvent.objects.all()} == {"abuse"}


def test_members_see_the_tier_that_they_are_promised(people: People) -> None:
    assert [tier["name"] for tier in people.olga.get("tiers").json()["data"]] == ["vip", "free"]
    assert [tier["name"] for tier in people.ann.get("tiers").json()["data"]] == ["vip"]
    assert error(people.ann.get("tiers/free"), 404) == error(people.ann.get("tiers/none"), 404)


def test_memberships_are_listed_and_cannot_be_written(people: People) -> None:
    everybody = people.olga.get("memberships").json()["data"]
    assert {(one["user"], one["role"], one["tenant"]) for one in everybody} == {
        ("olga", "operator", None),
        ("fay", "finance", None),
        ("ann", "owner", "acme"),
        ("dev", "developer", "acme"),
        ("gus", "owner", "globex"),
        ("gil", "developer", "globex"),
    }
    assert {one["user"] for one in people.dev.get("memberships").json()["data"]} == {"ann", "dev"}
    assert [one["user"] for one in people.olga.get("memberships?role=owner&tenant=acme").json()["data"]] == ["ann"]
    for method in ("POST", "PATCH", "PUT", "DELETE"):
        assert error(people.dev.call(method, "memberships", {"role": "owner"}), 405)["code"] == "method_not_allowed"
    assert Membership.objects.get(user=people.dev.user).role == "developer"


def test_removing_a_tenant_ends_its_keys(people: People) -> None:
    people.olga.delete("tenants/acme")
    assert not ApiKey.objects.filter(tenant_id=people.acme.pk).exists()
