"""Tenancy in the admin."""

from __future__ import annotations

import json
import re
import time
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, User
from django.db.models import Model
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from harness_web.openai.limits import instant
from scheduler import config
from scheduler.models import Deployment, PolicyVersion
from tenants import keys
from tenants.budgets import Move, Terms, exchange
from tenants.changes import current_version
from tenants.ledger import record_usage
from tenants.models import (
    ApiKey,
    AuditEvent,
    BudgetAccount,
    KeySecret,
    Limit,
    Membership,
    Price,
    Tenant,
    Tier,
    UsageRecord,
)
from tenants.periods import period_of

from .conftest import issue, make_tenant
from .test_ledger import ROW

pytestmark = pytest.mark.django_db
OURS = [model for model in admin.site._registry if model._meta.app_label in ("tenants", "scheduler")]


@pytest.fixture
def browser(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("ada"))
    return client


def page(model: type[Any], name: str, *args: Any) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{name}", args=args)


def act(browser: Client, row: Model, action: str, *, reason: str = "told to", **fields: str) -> Any:
    """Select one row of a list and run an action on it."""
    form = {"action": action, "_selected_action": [row.pk], "reason": reason, **fields}
    return browser.post(page(type(row), "changelist"), form, follow=True)


def values_of(tier: Tier, **changes: Any) -> dict[str, Any]:
    names = [field.name for field in Tier._meta.fields if field.name != "id"]
    values = {name: "" if (value := getattr(tier, name)) is None else value for name in names} | changes
    return {name: value for name, value in values.items() if value is not False}


@pytest.mark.parametrize("model", OURS, ids=lambda model: model.__name__)
def test_every_model_has_a_list(browser: Client, acme: Tenant, model: type[Any]) -> None:
    issue(acme)
    record_usage([ROW])
    assert browser.get(page(model, "changelist")).status_code == 200


def test_a_new_key_is_shown_once_and_never_again(browser: Client, acme: Tenant) -> None:
    form = {"tenant": acme.pk, "name": "prod", "scopes": ["inference", "usage"], "models": '["*"]', "allowed_ips": "[]"}
    created = browser.post(page(ApiKey, "add"), form, follow=True)
    (token,) = set(re.findall(r"sk-[0-9A-Za-z]{61}", created.content.decode()))
    key, secret = ApiKey.objects.get(), KeySecret.objects.get()
    assert secret.digest == keys.digest(token, secret.pepper_version) and key.scopes == ["inference", "usage"]
    for url in (page(ApiKey, "changelist"), page(ApiKey, "change", key.pk), page(AuditEvent, "changelist")):
        text = browser.get(url).content.decode()
        assert token not in text and secret.digest not in text
    audit = json.dumps(list(AuditEvent.objects.values("target", "before", "after")))
    assert token not in audit and secret.digest not in audit


def test_a_key_is_revoked_by_an_action_and_the_deed_is_on_record(browser: Client, acme: Tenant) -> None:
    key = issue(acme).key
    before = current_version()
    act(browser, key, "revoke")
    key.refresh_from_db()
    assert key.revoked_at is not None and current_version() == before + 1
    event = AuditEvent.objects.get()
    assert (event.actor, event.action, event.source_ip) == ("user ada", "apikey.revoke", "127.0.0.1")
    assert event.reason == "told to"


@pytest.mark.parametrize("action", ["revoke", "rotate", "enable", "delete_selected"])
def test_nothing_is_done_to_many_rows_without_a_reason(browser: Client, acme: Tenant, action: str) -> None:
    key = issue(acme, revoked_at=timezone.now() if action == "enable" else None).key
    before = list(ApiKey.objects.values()), list(KeySecret.objects.values())
    for reason in ("", "  "):
        text = act(browser, key, action, reason=reason, post="yes").content.decode()
        assert "Nothing was done: say why" in text
    assert (list(ApiKey.objects.values()), list(KeySecret.objects.values())) == before
    assert not AuditEvent.objects.exists()


def test_the_reason_for_removing_many_rows_is_kept_from_page_to_page(browser: Client, acme: Tenant) -> None:
    other = Tenant.objects.create(slug="other", name="Other", tier=acme.tier)
    asked = act(browser, other, "delete_selected", reason="<closed>").content.decode()
    assert 'name="reason"' in asked and 'value="&lt;closed&gt;"' in asked
    assert Tenant.objects.count() == 2
    act(browser, other, "delete_selected", reason="<closed>", post="yes")
    assert list(Tenant.objects.all()) == [acme]
    event = AuditEvent.objects.get()
    assert (event.action, event.target, event.reason) == ("tenant.remove", "tenant other", "<closed>")


def test_keys_are_rotated_and_enabled_by_actions(browser: Client, acme: Tenant) -> None:
    key, old = issue(acme, revoked_at=timezone.now()).key, KeySecret.objects.get()
    for action in ("rotate", "enable", "rotate"):
        text = act(browser, key, action).content.decode()
        if action == "rotate" and key.revoked_at:
            assert "A revoked key is not rotated" in text and key.secrets.count() == 1
        key.refresh_from_db()
    (token,) = set(re.findall(r"sk-[0-9A-Za-z]{61}", text))
    old.refresh_from_db()
    assert old.valid_until is not None and key.secrets.get(lookup=keys.lookup_of(token)).valid_until is None
    assert list(AuditEvent.objects.values_list("action", flat=True)) == ["apikey.rotate", "apikey.enable"]
    assert token not in browser.get(page(ApiKey, "change", key.pk)).content.decode()


def test_a_key_changed_in_the_admin_is_on_record_once(browser: Client, acme: Tenant) -> None:
    key = issue(acme).key
    management = {"secrets-TOTAL_FORMS": 0, "secrets-INITIAL_FORMS": 0}
    form = {"scopes": ["usage"], "models": '["demo"]', "allowed_ips": "[]", **management}
    browser.post(page(ApiKey, "change", key.pk), form)
    event = AuditEvent.objects.get()
    assert (event.action, event.before["models"], event.after["models"]) == ("apikey.change", ["*"], ["demo"])
    assert event.tenant_id == str(acme.pk)


@pytest.mark.parametrize("model", [Tier, Tenant, ApiKey, Limit, Price, Membership, User, Group, Deployment])
def test_every_form_asks_why(browser: Client, model: type[Any]) -> None:
    assert 'name="reason"' in browser.get(page(model, "add")).content.decode()


def test_the_reason_is_on_record_with_the_change(browser: Client, acme: Tenant) -> None:
    browser.post(page(Tier, "change", acme.tier.pk), values_of(acme.tier, weight=7, reason="peak hour"))
    assert AuditEvent.objects.get().reason == "peak hour"
    assert PolicyVersion.objects.get(version=config.current().version).reason == "peak hour"


def test_what_a_person_may_do_is_on_record_with_its_relations(browser: Client) -> None:
    bob, staff = User.objects.create(username="bob"), Group.objects.create(name="staff")
    form = {"username": "bob", "groups": [staff.pk], "date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    browser.post(page(User, "change", bob.pk), form)
    event = AuditEvent.objects.get(action="user.change")
    assert (event.before["groups"], event.after["groups"]) == ([], ["staff"])


def test_a_password_set_for_somebody_is_on_record_without_the_password(browser: Client) -> None:
    bob = User.objects.create(username="bob")
    form = {"password1": "correct horse battery", "password2": "correct horse battery", "usable_password": "true"}
    browser.post(reverse("admin:auth_user_password_change", args=[bob.pk]), form)
    event = AuditEvent.objects.get()
    assert (event.actor, event.action, event.target) == ("user ada", "user.password", "user bob")
    assert (event.before, event.after) == (None, None)


def test_a_tier_saved_in_the_admin_is_a_policy_version_by_that_user(browser: Client, acme: Tenant) -> None:
    before = current_version()
    browser.post(page(Tier, "change", acme.tier.pk), values_of(acme.tier, weight=7))
    assert config.current().tiers["vip"]["weight"] == 7.0 and current_version() == before + 1
    assert PolicyVersion.objects.get(version=config.current().version).actor == "user ada"
    event = AuditEvent.objects.get()
    assert (event.action, event.before["weight"], event.after["weight"]) == ("tier.change", 1.0, 7.0)


def test_tiers_that_do_not_fit_together_are_refused_in_the_form(browser: Client, acme: Tenant, globex: Tenant) -> None:
    Tier.objects.filter(name="free").update(floor=0.5)
    refused = browser.post(page(Tier, "change", acme.tier.pk), values_of(acme.tier, floor=0.6))
    assert refused.status_code == 200 and b"add up to more than 1" in refused.content
    assert Tier.objects.get(name="vip").floor == 0.0


def test_limits_of_no_owner_are_refused_in_the_form(browser: Client) -> None:
    refused = browser.post(page(Limit, "add"), {"kind": "rpm", "value": 5, "hard": "on", "alerts": "[]"})
    assert b"exactly one tier, tenant or key" in refused.content and not Limit.objects.exists()


def test_ledger_and_audit_cannot_be_written(browser: Client) -> None:
    record_usage([ROW])
    usage = UsageRecord.objects.get()
    assert browser.get(page(UsageRecord, "add")).status_code == 403
    assert browser.post(page(UsageRecord, "change", usage.pk), {"model": "x"}).status_code == 403
    assert browser.post(page(UsageRecord, "delete", usage.pk), {"post": "yes"}).status_code == 403
    assert browser.get(page(AuditEvent, "add")).status_code == 403


def test_deleting_a_tenant_is_on_record(browser: Client, acme: Tenant) -> None:
    issue(acme)
    assert 'name="reason"' in browser.get(page(Tenant, "delete", acme.pk)).content.decode()
    browser.post(page(Tenant, "delete", acme.pk), {"post": "yes", "reason": "closed"})
    assert not Tenant.objects.exists()
    event = AuditEvent.objects.get()
    assert (event.action, event.target, event.before["slug"]) == ("tenant.remove", "tenant acme", "acme")
    assert event.reason == "closed"


def test_a_deployment_is_removed_and_comes_back_by_actions(browser: Client) -> None:
    deployment = Deployment.objects.create(model="demo", engine="simulated")
    for action, removed in (("remove", True), ("deploy_again", False)):
        act(browser, deployment, action)
        deployment.refresh_from_db()
        assert (deployment.removed_at is not None) is removed
    assert list(AuditEvent.objects.values_list("action", flat=True)) == ["deployment.deploy", "deployment.remove"]


def test_a_password_is_never_in_the_audit_log(browser: Client) -> None:
    form = {"username": "bob", "password1": "correct horse battery", "password2": "correct horse battery"}
    browser.post(reverse("admin:auth_user_add"), {**form, "usable_password": "true"})
    stored = User.objects.get(username="bob").password
    event = AuditEvent.objects.get(action="user.create")
    assert stored not in json.dumps(event.after) and "horse" not in json.dumps(event.after)


# --- who leaves -------------------------------------------------------------------------------------------------------


@pytest.fixture
def bob(acme: Tenant, globex: Tenant) -> User:
    """A developer of acme, with keys of every kind."""
    bob = User.objects.create(username="bob")
    Membership.objects.create(user=bob, tenant=acme, role=Membership.Role.DEVELOPER)
    for name in ("ci", "notebook"):
        issue(acme, name, owner=bob)
    issue(acme, "revoked", owner=bob, revoked_at=timezone.now())
    issue(acme, "expired", owner=bob, expires_at=timezone.now() - timedelta(seconds=1))
    issue(acme, "shared")
    issue(globex, "elsewhere", owner=bob)
    return bob


def test_who_removes_a_member_is_told_which_keys_stay_and_so_is_the_audit_log(browser: Client, bob: User) -> None:
    path = page(Membership, "delete", bob.memberships.get().pk)
    text = browser.post(path, {"post": "yes", "reason": "left"}, follow=True).content.decode()
    assert "These keys stay valid; revoke those that must end: acme/ci, acme/notebook" in text
    event = AuditEvent.objects.get()
    assert (event.action, event.reason, event.before["keys"]) == (
        "membership.remove",
        "left",
        ["acme/ci", "acme/notebook"],
    )
    assert event.target == "membership bob as developer of acme"
    assert event.tenant_id == str(Tenant.objects.get(slug="acme").pk)
    assert ApiKey.objects.filter(owner=bob, revoked_at__isnull=True).count() == 4


def test_the_keys_of_somebody_who_is_removed_altogether_are_on_record_too(browser: Client, bob: User) -> None:
    act(browser, bob, "delete_selected", reason="left", post="yes")
    event = AuditEvent.objects.get(action="user.remove")
    assert event.before["keys"] == ["acme/ci", "acme/notebook", "globex/elsewhere"]
    assert ApiKey.objects.filter(owner__isnull=True, revoked_at__isnull=True).count() == 5


def test_a_membership_stays_with_its_person_and_tenant(browser: Client, bob: User, globex: Tenant) -> None:
    membership = bob.memberships.get()
    form = {"user": bob.pk, "tenant": globex.pk, "role": "owner"}
    browser.post(page(Membership, "change", membership.pk), form)
    membership.refresh_from_db()
    assert (membership.tenant.slug, membership.role) == ("acme", "owner")


def test_the_audit_log_says_when_in_utc_and_is_searched_by_reason(browser: Client, acme: Tenant) -> None:
    browser.post(page(Tier, "change", acme.tier.pk), values_of(acme.tier, weight=7, reason="peak hour"))
    event = AuditEvent.objects.get()
    when = f"{event.at:%Y-%m-%d %H:%M:%S} UTC"
    found = browser.get(page(AuditEvent, "changelist"), {"q": "peak"}).content.decode()
    assert when in found and "peak hour" in found
    assert when not in browser.get(page(AuditEvent, "changelist"), {"q": "quiet"}).content.decode()
    assert when in browser.get(page(AuditEvent, "change", event.pk)).content.decode()


def test_a_list_of_keys_names_scopes_and_asks_for_the_reason_of_an_action(browser: Client, acme: Tenant) -> None:
    issue(acme, "prod", scopes=["inference", "usage"])
    text = browser.get(page(ApiKey, "changelist")).content.decode()
    assert "inference, usage" in text
    assert re.search(r'<label[^>]*>Reason <input type="text" name="reason"[^>]* required', text)


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_fr_016_the_pages_of_tenant_and_budget_show_the_instant_that_the_api_tells(browser: Client) -> None:
    """FR-016: in UTC, and marked as such, in every language."""
    tenant = make_tenant("tokyo", timezone="Asia/Tokyo")
    Limit.objects.create(tenant=tenant, kind="budget", period="month", amount="12.5", currency="USD")
    Limit.objects.create(tier=tenant.tier, kind="budget", period="total", value=900)
    ends = period_of("month", "Asia/Tokyo", time.time()).ends
    assert ends is not None
    told = instant(ends)  # as `GET /v1/limits` writes it
    shown = told.replace("T", " ").replace("Z", " UTC")
    for language, never in (("en", "never"), ("zh-hans", "不重置")):
        browser.cookies["django_language"] = language
        text = browser.get(page(Tenant, "change", tenant.pk)).content.decode()
        assert text.count(shown) == 1 and "12.5 USD" in text and "900 tokens" in text and never in text
    starts = period_of("month", "Asia/Tokyo", time.time()).starts
    key = ("tenant", str(tenant.pk), "", "USD", "month", starts)
    terms = Terms(125 * 10**9, True, (), 1)
    exchange("scheduler", 1, [Move(key, str(tenant.pk), ends, terms, 1, need=1)])
    account = BudgetAccount.objects.get()
    browser.cookies["django_language"] = "en"
    for path in (page(BudgetAccount, "changelist"), page(BudgetAccount, "change", account.pk)):
        assert shown in browser.get(path).content.decode()
