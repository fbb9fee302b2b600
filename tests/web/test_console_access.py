"""Who gets in, and how the first operator does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from django.contrib.auth.models import User
from django.test import Client

from harness_web import accounts
from harness_web.accounts import Invitation, setup_link
from tenants.models import AuditEvent, Membership, Tenant, Tier

PASSWORD = "correct horse battery"
NEW = {"username": "olga", "password": PASSWORD, "again": PASSWORD}

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def no_invitation() -> Iterator[None]:
    yield
    Invitation.path().unlink(missing_ok=True)


@pytest.fixture
def operator() -> User:
    user = User.objects.create_user("olga", password=PASSWORD)
    Membership.objects.create(user=user, role=Membership.Role.OPERATOR)
    return user


@pytest.fixture
def developer() -> User:
    tenant = Tenant.objects.create(slug="acme", name="Acme", tier=Tier.objects.create(name="gold"))
    user = User.objects.create_user("dev", password=PASSWORD)
    Membership.objects.create(user=user, tenant=tenant, role=Membership.Role.DEVELOPER)
    return user


def path_of(link: str | None) -> str:
    assert link is not None
    return link.removeprefix("http://h")


def test_the_link_makes_the_first_operator_and_signs_them_in(client: Client) -> None:
    path = path_of(setup_link("http://h"))
    assert client.get(path).status_code == 200
    assert client.post(path, NEW).headers["Location"] == "/console/"
    user = User.objects.get(username="olga")
    assert user.is_staff and user.is_superuser
    assert user.memberships.get().role == Membership.Role.OPERATOR
    assert set(AuditEvent.objects.values_list("actor", "action")) == {
        ("user olga", "user.create"),
        ("user olga", "membership.create"),
    }
    assert client.get("/console/").status_code == 200


def test_the_link_works_once(client: Client) -> None:
    path = path_of(setup_link("http://h"))
    client.post(path, NEW)
    answer = Client().post(path, NEW | {"username": "mallory"})
    assert answer.status_code == 410
    assert not User.objects.filter(username="mallory").exists()


def test_the_link_can_be_printed_again_and_the_older_one_ends(client: Client) -> None:
    first, second = path_of(setup_link("http://h")), path_of(setup_link("http://h"))
    assert client.get(first).status_code == 410
    assert client.get(second).status_code == 200


def test_there_is_no_link_once_there_is_an_operator(operator: User) -> None:
    assert setup_link("http://h") is None


def test_an_open_link_ends_when_an_operator_comes_in_another_way(client: Client, operator: User) -> None:
    Invitation(accounts.digest("t"), expires=9e9).store()
    assert client.get("/setup/t/").status_code == 410


def test_the_link_ends_after_a_day(client: Client) -> None:
    Invitation(accounts.digest("t"), expires=1.0).store()
    answer = client.get("/setup/t/")
    assert answer.status_code == 410
    assert "24 hours" in answer.content.decode()


def test_a_guessed_link_is_refused(client: Client) -> None:
    setup_link("http://h")
    assert client.get("/setup/guess/").status_code == 410


def test_only_the_tokens_digest_is_stored_and_only_the_owner_reads_it() -> None:
    token = path_of(setup_link("http://h")).split("/")[2]
    assert token not in Invitation.path().read_text()
    assert Invitation.path().stat().st_mode & 0o777 == 0o600


def test_of_two_that_use_the_link_at_once_one_wins() -> None:
    setup_link("http://h")
    invitation = Invitation.load()
    assert invitation is not None
    assert [invitation.claim(), invitation.claim()] == [True, False]


@pytest.mark.parametrize("password", ["short", "password1234", "123456789012"])
def test_weak_passwords_are_refused_and_the_link_stays(client: Client, password: str) -> None:
    path = path_of(setup_link("http://h"))
    answer = client.post(path, NEW | {"password": password, "again": password})
    assert answer.status_code == 422
    assert not User.objects.exists()
    assert client.post(path, NEW).status_code == 302


def test_the_console_asks_visitors_to_sign_in(client: Client) -> None:
    assert client.get("/console/").headers["Location"] == "/accounts/login/?next=/console/"


def test_the_console_tells_others_which_role_is_missing(client: Client, developer: User) -> None:
    client.force_login(developer)
    answer = client.get("/console/")
    assert answer.status_code == 403
    assert "role “operator”" in answer.content.decode()
    assert client.get("/console/overview.json").status_code == 403


def test_an_operator_sees_the_console(client: Client, operator: User) -> None:
    client.force_login(operator)
    answer = client.get("/console/")
    assert answer.status_code == 200
    assert "No scheduler is connected." in answer.content.decode()
    assert client.get("/console/overview.json").json()["type"] == "snapshot"


def test_the_front_door_leads_operators_to_the_console(client: Client, operator: User) -> None:
    client.force_login(operator)
    assert client.get("/").headers["Location"] == "/console/"


def test_the_front_door_shows_others_how_to_call(client: Client) -> None:
    page = client.get("/").content.decode()
    assert "http://testserver/v1" in page
    assert "No model is being served at this moment." in page


def test_nobody_signs_up(client: Client) -> None:
    assert client.get("/accounts/signup/").status_code == 404


def test_signing_in_is_limited(client: Client, operator: User) -> None:
    wrong = {"login": "olga", "password": "wrong"}
    statuses = [client.post("/accounts/login/", wrong).status_code for _ in range(12)]
    assert (
        "Too many failed login attempts" in client.post("/accounts/login/", wrong).content.decode() or 429 in statuses
    )


@pytest.mark.parametrize("path", ["/", "/accounts/login/", "/nowhere/"])
def test_pages_allow_no_inline_code_and_nothing_foreign(client: Client, path: str) -> None:
    policy = client.get(path).headers["Content-Security-Policy"]
    assert "script-src 'self';" in policy + ";"
    assert "style-src 'self';" in policy + ";"
    assert "unsafe" not in policy


def test_the_exception_for_the_admin_ends_at_its_address(client: Client, operator: User) -> None:
    operator.is_staff = operator.is_superuser = True
    operator.save()
    client.force_login(operator)
    assert "unsafe-eval" in client.get("/admin/").headers["Content-Security-Policy"]
    assert "unsafe" not in client.get("/console/").headers["Content-Security-Policy"]


def test_the_chosen_theme_is_in_the_first_byte(client: Client) -> None:
    assert "data-theme" not in client.get("/").content.decode()
    client.post("/appearance/theme/", {"theme": "dark"})
    assert re.search(r'<html lang="en" data-theme="dark">', client.get("/").content.decode())


def test_an_unknown_theme_is_refused(client: Client) -> None:
    assert client.post("/appearance/theme/", {"theme": "<b>"}).status_code == 400


def test_choosing_a_theme_never_leads_elsewhere(client: Client) -> None:
    answer = client.post("/appearance/theme/", {"theme": "dark", "next": "https://elsewhere.example/"})
    assert answer.headers["Location"] == "/"


def test_pages_speak_chinese(client: Client) -> None:
    client.post("/appearance/language/", {"language": "zh-hans"})
    assert "登录" in client.get("/accounts/login/").content.decode()
