"""The audit log over the management API: found again by every mark, and exported."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.db import transaction
from django.test import AsyncClient

from tenants.audit import Act, record
from tenants.models import AppendOnlyError, AuditEvent
from tests.web.people import People
from tests.web.test_api_keys import error


@pytest.fixture
def history(people: People) -> People:
    """What has been done: by olga to both tenants, by ann to her own, by nobody's key to the policy."""
    olga, ann = Act("user olga", "their order", "192.0.2.1"), Act("user ann", "Größe", "198.51.100.7")
    olga.note("change", people.acme, {"name": "Acme"}, {"name": "Acme 漢"})
    olga.note("change", people.globex, {"name": "Globex"}, {"name": "Globex Ltd"})
    ann.note("create", people.acme_key.key, None, {"models": ["demo"]})
    record("key ops/root", "config.update", "policy version 2", after={"policy.max_batch": 8}, source_ip="10.0.0.9")
    return people


def found(people: People, query: str) -> list[str]:
    answer = people.olga.get(f"audit?{query}")
    assert answer.status_code == 200, answer.content
    return [event["object"] for event in answer.json()["data"]]


KEY, ACME, GLOBEX, POLICY = "apikey acme/prod", "tenant acme", "tenant globex", "policy version 2"


@pytest.mark.parametrize(
    ("query", "objects"),
    [
        ("", [POLICY, KEY, GLOBEX, ACME]),
        ("who=OLGA", [GLOBEX, ACME]),
        ("object=acme", [KEY, ACME]),
        ("action=apikey.", [KEY]),
        ("action=key", []),
        ("tenant=globex", [GLOBEX]),
        ("tenant=nobody", []),
        ("text=漢", [ACME]),
        ("text=Größe", [KEY]),
        ("text=max_batch", [POLICY]),
        ("text=their order", [GLOBEX, ACME]),
        ("text=%25", []),
        ("who=olga&text=Ltd", [GLOBEX]),
        ("limit=1", [POLICY]),
    ],
)
def test_events_are_found_by_who_what_whose_and_text(history: People, query: str, objects: list[str]) -> None:
    assert found(history, query) == objects


def test_events_are_found_by_time(history: People) -> None:
    at = AuditEvent.objects.get(target=GLOBEX).at
    since = at.isoformat().replace("+", "%2B")
    assert found(history, f"since={since}") == [POLICY, KEY, GLOBEX]
    assert found(history, f"until={since}") == [ACME]
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat().replace("+", "%2B")
    assert found(history, f"since={later}") == []
    assert error(history.olga.get("audit?since=2026-01-01T00:00:00"), 400)["param"] == "since"
    assert error(history.olga.get("audit?since=yesterday"), 400)["param"] == "since"
    assert error(history.olga.get("audit?since=0001-01-01T00:00:00%2B14:00"), 400)["param"] == "since"
    assert error(history.olga.get("audit?text=%00"), 400)["param"] == "text"


def test_pages_follow_each_other_without_gap_while_events_come(history: People) -> None:
    first = history.olga.get("audit?limit=2").json()
    record("user olga", "late.event", "late")
    second = history.olga.get(f"audit?limit=2&page={first['next_page']}").json()
    assert [event["object"] for event in first["data"] + second["data"]] == [POLICY, KEY, GLOBEX, ACME]
    assert not second["has_more"]


def test_an_owner_sees_what_concerns_the_tenant_and_not_where_operators_work(history: People) -> None:
    events = history.ann.get("audit").json()["data"]
    assert [(event["object"], event["source_ip"]) for event in events] == [(KEY, "198.51.100.7"), (ACME, None)]
    assert history.olga.get("audit?object=tenant acme").json()["data"][0]["source_ip"] == "192.0.2.1"
    assert history.ann.get("audit?tenant=globex").json()["data"] == []
    error(history.dev.get("audit"), 403)


def test_events_are_never_changed_or_removed(history: People) -> None:
    for method in ("POST", "PATCH", "PUT", "DELETE"):
        error(history.olga.call(method, "audit", {}), 405)
    event = AuditEvent.objects.first()
    assert event is not None
    rows = AuditEvent.objects.filter(pk=event.pk)
    for deed in (
        event.save,
        event.delete,
        rows.delete,
        lambda: rows.update(actor="nobody"),
        lambda: AuditEvent.objects.bulk_update([event], ["actor"]),
        lambda: AuditEvent.scoped.unscoped("a test").update(actor="nobody"),
    ):
        with pytest.raises(AppendOnlyError), transaction.atomic():
            deed()
    assert AuditEvent.objects.count() == 4


def test_a_reason_and_an_address_are_kept_only_as_far_as_they_can_be_meant(db: None) -> None:
    event = record("user ada", "x.y", "z", reason="r" * 5000, source_ip="unknown, 10.0.0.1")
    assert (len(event.reason), event.source_ip) == (2000, None)
    assert record("user ada", "x.y", "z", source_ip="2001:db8::1").source_ip == "2001:db8::1"


NAMES = ["=1+1", "+1+1", "-1+1", "@SUM(1)", "\t=1+1", "\r=1+1", "＝1+1", 'a","=1+1', "line1\n=1+1"]


def ada() -> User:
    user, _ = User.objects.get_or_create(username="ada", is_superuser=True)
    return user


async def exported(kind: str, query: str = "", **headers: str) -> Any:
    client = AsyncClient()
    await sync_to_async(lambda: client.force_login(ada()))()
    answer = await client.get(f"/api/v1/audit/export.{kind}{query}", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["Content-Disposition"] == f'attachment; filename="audit.{kind}"'
    return answer, b"".join([part async for part in answer.streaming_content]).decode()


@pytest.fixture
async def many(transactional_db: None) -> int:
    def fill() -> int:
        for number in range(1_200):
            record(NAMES[number % len(NAMES)], "a.b", f"thing {number}", after={"n": number})
        return 1_200

    return await sync_to_async(fill)()


async def test_an_export_in_csv_is_whole_and_runs_nowhere(many: int) -> None:
    answer, text = await exported("csv", accept="text/csv")
    header, *rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    assert len(rows) == many == int(answer.headers["X-Row-Count"]) and {len(row) for row in rows} == {len(header)}
    actors = {row[header.index("actor")] for row in rows}
    assert len(actors) == len(NAMES) and not any(actor[0] in "=+-@\t\r＝" for actor in actors)
    assert [row[header.index("object")] for row in rows] == [f"thing {number}" for number in reversed(range(many))]


async def test_an_export_in_json_has_names_and_values_unchanged(many: int) -> None:
    _, text = await exported("json")
    events = json.loads(text)
    assert len(events) == many and {event["actor"] for event in events} == set(NAMES)
    assert events[0]["after"] == {"n": many - 1}


async def test_an_export_obeys_the_filter_and_may_be_empty(many: int) -> None:
    _, text = await exported("json", "?object=thing 1199")
    assert [event["object"] for event in json.loads(text)] == ["thing 1199"]
    assert json.loads((await exported("json", "?who=nobody"))[1]) == []
