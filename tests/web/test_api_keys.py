"""Keys over the management API: made, read, changed, rotated, revoked, enabled, by whom it is for."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.test import Client

from tenants import keys
from tenants.models import ApiKey, AuditEvent, KeySecret, Limit
from tests.tenants.conftest import issue
from tests.web.people import People, Person, person


def error(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.content
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def make(person: Person, **body: Any) -> dict[str, Any]:
    answer = person.post("keys", {"name": "new", **body})
    assert answer.status_code == 201, answer.content
    made: dict[str, Any] = answer.json()
    return made


def test_a_key_is_made_with_its_rights_and_limits_and_read_back(people: People) -> None:
    sent = {
        "scopes": ["inference", "usage"],
        "models": ["demo", "org/name:tag"],
        "allowed_ips": ["10.0.0.0/8", "2001:db8::/32"],
        "expires_at": "2030-01-01T00:00:00Z",
        "limits": {"rpm": 60, "tpm": None, "concurrency": 4, "models": {"demo": {"tpm": 20000}}},
    }
    made = make(people.olga, tenant="acme", reason="their order", **sent)
    assert keys.parse(made["secret"]) is not None
    read = people.olga.get(f"keys/{made['id']}").json()
    assert "secret" not in read and {name: read[name] for name in made if name != "secret"} == read
    for name in ("scopes", "models", "allowed_ips", "expires_at"):
        assert read[name] == sent[name]
    assert (read["limits"]["rpm"], read["limits"]["tpm"], read["limits"]["concurrency"]) == (60, None, 4)
    assert read["limits"]["models"]["demo"]["tpm"] == 20000
    assert (read["tenant"], read["state"], read["owner"]) == ("acme", "active", None)
    event = AuditEvent.objects.get(action="apikey.create")
    assert (event.actor, event.reason, event.source_ip) == ("user olga", "their order", "127.0.0.1")
    assert event.tenant_id == str(people.acme.pk)


def test_what_is_read_can_be_sent_back_and_changes_nothing(people: People) -> None:
    limits = {
        "rpm": 5,
        "budgets": [{"period": "day", "amount": "7.50", "alerts": [0.8]}, {"period": "hour", "tokens": 9}],
    }
    made = make(people.ann, limits=limits)
    before = AuditEvent.objects.count()
    sent = {name: made[name] for name in ("scopes", "models", "allowed_ips", "expires_at", "limits")}
    changed = people.ann.patch(f"keys/{made['id']}", sent)
    assert changed.json() == {name: value for name, value in made.items() if name != "secret"}
    assert AuditEvent.objects.count() == before


def test_the_secret_is_shown_once_and_only_a_digest_is_kept(people: People) -> None:
    made = make(people.ann)
    secret = KeySecret.objects.get(key_id=made["id"])
    assert secret.digest == keys.digest(made["secret"], secret.pepper_version)
    for path in ("keys", f"keys/{made['id']}", "audit", "audit?text=new"):
        text = people.ann.get(path).content.decode()
        assert made["secret"] not in text and secret.digest not in text
    everything = json.dumps(list(AuditEvent.objects.values("target", "before", "after")))
    assert made["secret"] not in everything and secret.digest not in everything


def test_fr_018_budgets_read_back_as_they_were_sent_and_a_misspelt_one_is_named(people: People) -> None:
    """FR-018: null, 0 and 0.0005 are three things, and what is not enforced does not look accepted."""
    quantities = {"none": [], "zero": ["0"], "little": ["0.0005"]}
    for name, amounts in quantities.items():
        budgets = [{"period": "month", "amount": amount, "currency": "USD"} for amount in amounts]
        made = make(people.olga, name=name, tenant="acme", limits={"budgets": budgets})
        read = people.olga.get(f"keys/{made['id']}").json()["limits"]["budgets"]
        assert [Decimal(budget["amount"]) for budget in read] == [Decimal(amount) for amount in amounts]
        assert all((budget["currency"], budget["period"], budget["hard"]) == ("USD", "month", True) for budget in read)
    assert Limit.objects.filter(kind="budget", amount=0).count() == 1
    misspelt = people.olga.post("keys", {"name": "typo", "tenant": "acme", "bugdet": 5})
    assert error(misspelt, 400)["param"] == "bugdet"
    deep = people.olga.post("keys", {"name": "typo", "tenant": "acme", "limits": {"budgets": [{"ammount": "1"}]}})
    assert error(deep, 400)["param"] == "limits.budgets[0].ammount"
    assert not ApiKey.objects.filter(name="typo").exists()


def test_null_takes_a_limit_away_and_what_is_left_out_stays(people: People) -> None:
    key = make(people.ann, limits={"rpm": 5, "tpm": 100})
    changed = people.ann.patch(f"keys/{key['id']}", {"limits": {"rpm": None}}).json()
    assert (changed["limits"]["rpm"], changed["limits"]["tpm"]) == (None, 100)


def test_a_name_that_a_live_key_has_is_a_conflict(people: People) -> None:
    assert error(people.ann.post("keys", {"name": "prod"}), 409)["code"] == "conflict"
    people.ann.post(f"keys/{people.acme_key.key.pk}/revoke")
    assert people.ann.post("keys", {"name": "prod"}).status_code == 201
    taken = people.ann.post(f"keys/{people.acme_key.key.pk}/enable")
    assert "another key 'prod'" in error(taken, 409)["message"]


def test_revoking_and_enabling_are_each_said_once(people: People) -> None:
    path = f"keys/{people.acme_key.key.pk}"
    for _ in range(2):
        assert people.ann.post(f"{path}/revoke", {"reason": "leaked"}).json()["state"] == "revoked"
    assert error(people.ann.patch(path, {"models": ["demo"]}), 409)["message"].startswith("The key is revoked")
    assert error(people.ann.post(f"{path}/rotate"), 409)["code"] == "conflict"
    for _ in range(2):
        assert people.ann.post(f"{path}/enable").json()["state"] == "active"
    said = AuditEvent.objects.order_by("id").values_list("action", "reason")
    assert list(said) == [("apikey.revoke", "leaked"), ("apikey.enable", "")]


def test_a_rotation_keeps_the_key_and_shows_both_secrets_as_its_own(people: People) -> None:
    key = make(people.ann, limits={"rpm": 5})
    rotated = people.ann.post(f"keys/{key['id']}/rotate", {"overlap": 3600}).json()
    assert rotated["secret"] != key["secret"] and rotated["id"] == key["id"]
    assert rotated["limits"] == key["limits"]
    new, old = rotated["secrets"]
    assert new["valid_until"] is None and rotated["secret"].startswith(new["prefix"][:-1])
    left = datetime.fromisoformat(old["valid_until"]) - datetime.now(UTC)
    assert timedelta(minutes=59) < left <= timedelta(hours=1)
    event = AuditEvent.objects.get(action="apikey.rotate")
    assert len(event.before["secrets"]) == 1 and len(event.after["secrets"]) == 2


def test_a_rotation_never_lengthens_the_life_of_an_older_secret(people: People) -> None:
    path = f"keys/{people.acme_key.key.pk}/rotate"
    first = people.ann.post(path, {"overlap": 60}).json()["secrets"][1]["valid_until"]
    again = people.ann.post(path, {"overlap": 3600}).json()["secrets"]
    assert again[2]["valid_until"] == first and again[1]["valid_until"] > first
    at_once = people.ann.post(path, {"overlap": 0}).json()["secrets"]
    assert all(datetime.fromisoformat(old["valid_until"]) <= datetime.now(UTC) for old in at_once[1:])


def test_secrets_do_not_pile_up(people: People) -> None:
    path = f"keys/{people.acme_key.key.pk}/rotate"
    statuses = [people.ann.post(path).status_code for _ in range(10)]
    assert statuses == [200] * 9 + [409]
    assert people.ann.post(path, {"overlap": 0}).status_code == 200


@pytest.mark.parametrize("overlap", [-1, 90 * 86400 + 1, "soon", None])
def test_an_overlap_is_a_number_of_seconds_within_90_days(people: People, overlap: Any) -> None:
    refused = people.ann.post(f"keys/{people.acme_key.key.pk}/rotate", {"overlap": overlap})
    assert error(refused, 400)["param"] == "overlap"


def test_a_developer_sees_and_changes_their_own_keys_only(people: People) -> None:
    made = make(people.dev)
    assert made["owner"] == "dev"
    assert [key["name"] for key in people.dev.get("keys").json()["data"]] == ["new", "devs"]
    for method, path in (("GET", ""), ("PATCH", ""), ("POST", "/rotate"), ("POST", "/revoke"), ("POST", "/enable")):
        refused = people.dev.call(method, f"keys/{people.acme_key.key.pk}{path}", None if method == "GET" else {})
        assert error(refused, 404)["message"] == "There is no such key."
    assert people.acme_key.key.secrets.count() == 1


def test_an_owner_manages_every_key_of_the_tenant(people: People) -> None:
    assert {key["name"] for key in people.ann.get("keys").json()["data"]} == {"prod", "devs"}
    assert people.ann.post(f"keys/{people.dev_key.key.pk}/revoke").json()["state"] == "revoked"


def test_only_operators_touch_keys_that_run_the_installation(people: People) -> None:
    refused = people.ann.post("keys", {"name": "root", "scopes": ["admin"]})
    assert "does not manage keys with the scope 'admin'" in error(refused, 403)["message"]
    refused = people.ann.patch(f"keys/{people.acme_key.key.pk}", {"scopes": ["inference", "admin"]})
    assert error(refused, 403)["code"] == "insufficient_permissions"
    ops = issue(people.acme, "ops", scopes=["admin"]).key
    for path in ("rotate", "enable", "revoke"):
        error(people.ann.post(f"keys/{ops.pk}/{path}"), 403)
    error(people.ann.patch(f"keys/{ops.pk}", {"scopes": ["inference"]}), 403)
    assert ops.secrets.count() == 1 and not ApiKey.objects.filter(name="root").exists()
    assert people.olga.post(f"keys/{ops.pk}/rotate").status_code == 200


def test_a_developer_makes_no_key_that_sees_more_than_they(people: People) -> None:
    refused = people.dev.post("keys", {"name": "books", "scopes": ["usage"]})
    assert "scope 'usage'" in error(refused, 403)["message"]
    error(people.dev.patch(f"keys/{people.dev_key.key.pk}", {"scopes": ["inference", "usage"]}), 403)
    assert people.ann.post("keys", {"name": "books", "scopes": ["usage"]}).status_code == 201
    granted = issue(people.acme, "granted", scopes=["usage"], owner=people.dev.user).key
    error(people.dev.post(f"keys/{granted.pk}/rotate"), 403)


def test_a_key_of_an_operators_making_is_the_tenants(people: People) -> None:
    assert make(people.olga, tenant="globex")["owner"] is None
    assert error(people.olga.post("keys", {"name": "whose"}), 400)["param"] == "tenant"


def test_keys_are_filtered_and_paged(people: People) -> None:
    for number in range(3):
        issue(people.acme, f"k{number}", expires_at=datetime(2020, 1, 1, tzinfo=UTC))
    first = people.olga.get("keys?tenant=acme&state=expired&limit=2").json()
    assert [key["name"] for key in first["data"]] == ["k2", "k1"] and first["has_more"]
    second = people.olga.get(f"keys?tenant=acme&state=expired&limit=2&page={first['next_page']}").json()
    assert [key["name"] for key in second["data"]] == ["k0"] and not second["has_more"]
    assert second["next_page"] is None
    assert [key["name"] for key in people.olga.get("keys?owner=dev").json()["data"]] == ["devs"]
    assert people.olga.get("keys?state=revoked").json()["data"] == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=-1", "limit=201", "limit=1000000", "page=x", "page=0", "state=dead"]
)
def test_nonsense_in_a_query_is_refused_by_name(people: People, query: str) -> None:
    assert error(people.olga.get(f"keys?{query}"), 400)["param"] == query.split("=")[0]


def test_bodies_that_are_none_are_refused(people: People) -> None:
    assert error(people.olga.post("keys", []), 400)["param"] is None
    broken = people.olga.client.post("/api/v1/keys", "{", content_type="application/json")
    assert error(broken, 400)["code"] == "invalid_json"
    form = people.olga.client.post("/api/v1/keys", {"name": "x"})
    assert error(form, 415)["code"] == "unsupported_media_type"


def test_a_session_needs_the_csrf_token(people: People) -> None:
    strict = Client(enforce_csrf_checks=True)
    assert people.ann.user is not None
    strict.force_login(people.ann.user)
    refused = strict.post("/api/v1/keys", {"name": "x"}, content_type="application/json")
    assert "CSRF" in error(refused, 403)["message"]
    assert strict.get("/api/v1/keys").status_code == 200


def test_whoever_is_no_member_has_nothing_to_see(people: People) -> None:
    assert error(person("drifter").get("keys"), 403)["code"] == "insufficient_permissions"
    assert error(people.fay.get("keys"), 403)["code"] == "insufficient_permissions"
    refused = people.nobody.get("keys")
    assert error(refused, 401)["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"].startswith("Bearer ")
