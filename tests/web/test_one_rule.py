"""One place for every rule: the file of `harness apply`, the API and the administration's forms judge alike.

Each row is a value of one field. All three ways are tried with it; what one takes, all take, and hold alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
import yaml
from django.db import transaction
from django.http import HttpResponse
from django.urls import reverse

from scheduler.apply import apply
from tenants.documents import DocumentError
from tenants.models import ApiKey, Limit, Tenant
from tests.web.people import People

GOOD, BAD = True, False
LONG = "x" * 65

KEYS: list[tuple[str, Any, bool]] = [
    ("name", "prod-2", GOOD),
    ("name", "a", GOOD),
    ("name", "x" * 64, GOOD),
    ("name", LONG, BAD),
    ("name", "", BAD),
    ("name", "Prod", BAD),
    ("name", "two words", BAD),
    ("name", "-a", BAD),
    ("name", "a\nb", BAD),
    ("name", "=1+1", BAD),
    ("scopes", ["inference", "usage", "admin"], GOOD),
    ("scopes", [], BAD),
    ("scopes", ["root"], BAD),
    ("scopes", ["usage", "Usage"], BAD),
    ("models", ["*"], GOOD),
    ("models", ["demo", "org/name:tag"], GOOD),
    ("models", ["m"] * 100, GOOD),
    ("models", ["m"] * 101, BAD),
    ("models", [], BAD),
    ("models", [""], BAD),
    ("models", ["x" * 201], BAD),
    ("allowed_ips", [], GOOD),
    ("allowed_ips", ["10.0.0.1", "10.0.0.0/8", "2001:db8::/32", "::1"], GOOD),
    ("allowed_ips", ["0.0.0.0/0"], GOOD),
    ("allowed_ips", ["10.0.0.1/8"], BAD),
    ("allowed_ips", ["10.0.0"], BAD),
    ("allowed_ips", ["10.0.0.0/33"], BAD),
    ("allowed_ips", ["example.com"], BAD),
    ("allowed_ips", ["10.0.0.1 "], BAD),
    ("allowed_ips", ["10.0.0.1"] * 101, BAD),
    ("expires_at", "2030-01-01T00:00:00Z", GOOD),
    ("expires_at", None, GOOD),
    ("expires_at", "tomorrow", BAD),
    ("expires_at", "2030-13-01T00:00:00Z", BAD),
]
TENANTS: list[tuple[str, Any, bool]] = [
    ("slug", "initech", GOOD),
    ("slug", "a.b-c_9", GOOD),
    ("slug", "Initech", BAD),
    ("slug", "a/b", BAD),
    ("slug", "a.", BAD),
    ("slug", "", BAD),
    ("slug", LONG, BAD),
    ("name", "Ünïtech 漢", GOOD),
    ("name", "n" * 200, GOOD),
    ("name", "n" * 201, BAD),
    ("name", "", BAD),
    ("timezone", "Asia/Shanghai", GOOD),
    ("timezone", "UTC", GOOD),
    ("timezone", "Asia", BAD),
    ("timezone", "GMT+8:00", BAD),
    ("timezone", "../etc/passwd", BAD),
    ("state", "suspended", GOOD),
    ("state", "gone", BAD),
]
Quantity = dict[str, Any]
LIMITS: list[tuple[str, Quantity, bool]] = [
    ("rpm", {"value": 1}, GOOD),
    ("rpm", {"value": 2**63 - 1}, GOOD),
    ("rpm", {"value": 2**63}, BAD),
    ("rpm", {"value": 0}, BAD),
    ("rpm", {"value": -1}, BAD),
    ("rpm", {"value": "many"}, BAD),
    ("tpm", {"value": 1_000_000}, GOOD),
    ("concurrency", {"value": 1.5}, BAD),
    ("budget", {"value": 0, "period": "day"}, GOOD),
    ("budget", {"value": 10**12, "period": "total"}, GOOD),
    ("budget", {"value": -1, "period": "day"}, BAD),
    ("budget", {"value": 5, "period": "fortnight"}, BAD),
    ("budget", {"amount": "0", "currency": "USD", "period": "month"}, GOOD),
    ("budget", {"amount": "0.0005", "currency": "EUR", "period": "minute"}, GOOD),
    ("budget", {"amount": "922337203", "currency": "USD", "period": "month"}, GOOD),
    ("budget", {"amount": "922337204", "currency": "USD", "period": "month"}, BAD),
    ("budget", {"amount": "0.00005", "currency": "USD", "period": "month"}, BAD),
    ("budget", {"amount": "-1", "currency": "USD", "period": "month"}, BAD),
    ("budget", {"amount": "NaN", "currency": "USD", "period": "month"}, BAD),
    ("budget", {"amount": "1", "currency": "usd", "period": "month"}, BAD),
    ("budget", {"amount": "1", "currency": "DOLLAR", "period": "month"}, BAD),
    ("budget", {"value": 5, "amount": "1", "currency": "USD", "period": "month"}, BAD),
    ("budget", {"period": "month"}, BAD),
    ("budget", {"value": 5, "period": "day", "alerts": [0.5, 1]}, GOOD),
    ("budget", {"value": 5, "period": "day", "alerts": [0]}, BAD),
    ("budget", {"value": 5, "period": "day", "alerts": [1.01]}, BAD),
    ("budget", {"value": 5, "period": "day", "alerts": [0.1] * 11}, BAD),
]

Stored = dict[str, Any] | None
"""What is stored if it was taken, None if it was refused."""


def judged(deed: Callable[[], Any], stored: Callable[[], Stored]) -> Stored:
    """Do it, look at what came of it, and undo it."""
    with transaction.atomic():
        try:
            with transaction.atomic():
                deed()
        except DocumentError:
            assert stored() is None, "refused, and stored all the same"
        found = stored()
        transaction.set_rollback(True)
    return found


def by_apply(document: dict[str, Any]) -> Callable[[], Any]:
    return lambda: apply(yaml.safe_dump(document), actor="a test")


def by_api(people: People, path: str, body: dict[str, Any]) -> Callable[[], Any]:
    def call() -> None:
        answer = people.olga.post(path, body)
        assert answer.status_code in (201, 400), answer.content

    return call


def by_form(people: People, model: type[Any], form: dict[str, Any]) -> Callable[[], Any]:
    def submit() -> None:
        answer: HttpResponse = people.olga.client.post(reverse(f"admin:tenants_{model._meta.model_name}_add"), form)
        assert answer.status_code in (200, 302), answer.content

    return submit


@pytest.fixture
def staff(people: People) -> People:
    assert people.olga.user is not None
    people.olga.user.is_staff = people.olga.user.is_superuser = True
    people.olga.user.save()
    return people


def agreed(*found: Stored) -> Stored:
    first = found[0]
    assert all(each == first for each in found), found
    return first


def ids(value: Any) -> str:
    return repr(value)[:40]


@pytest.mark.parametrize(("field", "value", "good"), KEYS, ids=ids)
def test_a_key(staff: People, field: str, value: Any, good: bool) -> None:
    fields = {"name": "fresh", "scopes": ["inference"], "models": ["*"], "allowed_ips": [], "expires_at": None}
    fields |= {field: value}

    def stored() -> Stored:
        key = ApiKey.objects.exclude(name__in=("prod", "devs")).first()
        return None if key is None else {name: getattr(key, name) for name in fields}

    form: dict[str, Any] = {name: json.dumps(fields[name]) for name in ("models", "allowed_ips")}
    form |= {"tenant": staff.acme.pk, "name": fields["name"], "scopes": fields["scopes"]}
    moment = str(fields["expires_at"] or "").removesuffix("Z")
    form["expires_at_0"], _, form["expires_at_1"] = moment.partition("T")
    found = agreed(
        judged(by_apply({"version": 1, "tenants": [{"slug": "acme", "keys": [fields]}]}), stored),
        judged(by_api(staff, "keys", fields | {"tenant": "acme"}), stored),
        judged(by_form(staff, ApiKey, form), stored),
    )
    assert (found is not None) is good
    if found is not None:
        held = found[field]
        assert held == (datetime.fromisoformat(value) if field == "expires_at" and value else value)


@pytest.mark.parametrize(("field", "value", "good"), TENANTS, ids=ids)
def test_a_tenant(staff: People, field: str, value: Any, good: bool) -> None:
    fields = {"slug": "fresh", "name": "Fresh", "tier": "free", "timezone": "UTC", "state": "active"} | {field: value}

    def stored() -> Stored:
        tenant = Tenant.objects.exclude(slug__in=("acme", "globex")).first()
        return None if tenant is None else {name: str(getattr(tenant, name)) for name in fields}

    found = agreed(
        judged(by_apply({"version": 1, "tenants": [fields]}), stored),
        judged(by_api(staff, "tenants", fields), stored),
        judged(by_form(staff, Tenant, fields | {"tier": staff.globex.tier.pk}), stored),
    )
    assert (found is not None) is good
    assert found is None or found[field] == value


@pytest.mark.parametrize(("kind", "quantity", "good"), LIMITS, ids=ids)
def test_a_limit(staff: People, kind: str, quantity: Quantity, good: bool) -> None:
    def stored() -> Stored:
        return Limit.objects.values("kind", "value", "amount", "currency", "period", "hard", "alerts").first()

    spelled = {"tokens" if name == "value" else name: value for name, value in quantity.items()}
    limits = {"budgets": [spelled]} if kind == "budget" else {kind: quantity["value"]}
    form = {"tenant": staff.acme.pk, "kind": kind, "hard": "on", **quantity}
    form["alerts"] = json.dumps(quantity.get("alerts", []))

    def change() -> None:
        answer = staff.olga.patch("tenants/acme", {"limits": limits})
        assert answer.status_code in (200, 400), answer.content

    found = agreed(
        judged(by_apply({"version": 1, "tenants": [{"slug": "acme", "limits": limits}]}), stored),
        judged(change, stored),
        judged(by_form(staff, Limit, form), stored),
    )
    assert (found is not None) is good
