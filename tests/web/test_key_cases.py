"""Keys on two web workers, from the request line to the change in the database: the field's cases.

The workers are real ones over the in-memory wire; a test plays their pollers, so that a "within two seconds" is a poll.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.apps import apps

from harness_web.logs import formatter
from harness_web.openai.app import OpenAIApp
from harness_web.runtime import WebRuntime
from tenants import changes, keys
from tenants.auth import Authenticator
from tenants.changes import Poller
from tenants.models import ApiKey, KeySecret, UsageRecord
from tests.tenants.conftest import Clock, add_secret, issue
from tests.web.cast import Reply, Stage, accepted, done, until, words
from tests.web.people import KeyClient, People, Person, gather

PROPAGATION = 2.0  # seconds in which every worker acts on a change


class Worker:
    """A web process without its server: data plane and management API behind one authenticator and one poller."""

    def __init__(self, name: str, clock: Clock, wall: Clock) -> None:
        self.stage = Stage()
        self.poller = Poller(name, "web", clock=clock)
        self.authenticator = Authenticator(lambda: self.poller.fresh_at, clock=clock, wall=wall)
        self.poller.on_change(self.authenticator.refresh)
        runtime = WebRuntime(self.poller, self.authenticator, self.stage.gateway)
        self.stage.app = OpenAIApp(runtime)
        self.api = KeyClient(self.authenticator)

    async def start(self) -> None:
        await self.stage.start()
        self.stage.scheduler.script = words("hi")
        await self.poller.poll()

    async def stop(self) -> None:
        await self.stage.stop()
        await self.authenticator.aclose()
        await self.poller.aclose()

    async def chat(self, token: str, **fields: Any) -> Reply:
        return await self.stage.chat(key=token, **fields)


@dataclass
class Site:
    people: People
    clock: Clock
    wall: Clock
    workers: list[Worker]

    async def passes(self, seconds: float) -> None:
        """Time in which every worker polls as often as it does."""
        while seconds > 0:
            step = min(seconds, changes.POLL_SECONDS)
            seconds -= step
            self.clock.advance(step)
            self.wall.advance(step)
            for worker in self.workers:
                await worker.poller.poll()

    async def statuses(self, token: str, **fields: Any) -> list[int]:
        return [(await worker.chat(token, **fields)).status for worker in self.workers]

    async def do(self, person: Person, method: str, path: str, body: Any = None) -> Any:
        answer = await sync_to_async(person.call)(method, path, body)
        assert answer.status_code < 300, answer.content
        return answer.json()


@pytest.fixture
async def site(transactional_db: None) -> AsyncIterator[Site]:
    clock, wall = Clock(), Clock(float(int(datetime.now(UTC).timestamp())))
    site = Site(await sync_to_async(gather)(), clock, wall, [Worker(name, clock, wall) for name in ("w1", "w2")])
    for worker in site.workers:
        await worker.start()
    yield site
    for worker in site.workers:
        await worker.stop()


def test_a_change_is_polled_for_well_within_the_bound() -> None:
    assert 2 * changes.POLL_SECONDS <= PROPAGATION


async def test_fr_001_a_revoked_key_is_refused_by_every_worker_and_works_again_when_enabled(site: Site) -> None:
    """FR-001: no worker's cache outlives the revocation, no refused request reaches the scheduler."""
    ann, key = site.people.ann, site.people.acme_key
    assert await site.statuses(key.token) == [200, 200]
    stage = site.workers[1].stage
    stage.scheduler.script = None
    running = stage.open_chat(key=key.token, stream=True)
    submit = await until(lambda: stage.scheduler.submits[1:] and stage.scheduler.submits[-1])
    stage.scheduler.say(accepted(submit.id))
    await site.do(ann, "POST", f"keys/{key.key.pk}/revoke", {})
    await site.passes(PROPAGATION)
    before = [len(worker.stage.scheduler.submits) for worker in site.workers]
    for wait in (0.0, 1.0, 4.0):
        await site.passes(wait)
        for worker in site.workers:
            refused = await worker.chat(key.token)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert [len(worker.stage.scheduler.submits) for worker in site.workers] == before
    stage.scheduler.say(done(submit.id))
    assert (await running.finish()).events[-1] == "[DONE]"
    stage.scheduler.script = words("hi")
    await site.do(ann, "POST", f"keys/{key.key.pk}/enable", {})
    await site.passes(PROPAGATION)
    assert await site.statuses(key.token) == [200, 200]


async def test_fr_002_a_change_of_a_key_is_not_undone_by_what_was_in_flight(site: Site) -> None:
    """FR-002: a request that began under the old rights ends, and writes nothing of them back."""
    key = await site.do(site.people.ann, "POST", "keys", {"name": "k1", "models": ["demo"], "limits": {"rpm": 5}})
    token, other = key["secret"], {"model": "org/name:tag"}
    assert await site.statuses(token) == [200, 200]
    assert await site.statuses(token, **other) == [404, 404]
    stage = site.workers[1].stage
    stage.scheduler.script = None
    running = stage.open_chat(key=token, stream=True)
    submit = await until(lambda: stage.scheduler.submits[1:] and stage.scheduler.submits[-1])
    stage.scheduler.say(accepted(submit.id))
    change = {"models": ["demo", "org/name:tag"], "limits": {"rpm": 20}}
    await site.do(site.people.ann, "PATCH", f"keys/{key['id']}", change)
    await site.passes(PROPAGATION)
    stage.scheduler.say(done(submit.id))
    await running.finish()
    stage.scheduler.script = words("hi")
    for _ in range(12):
        assert await site.statuses(token, **other) == [200, 200]
        for worker in site.workers:
            limits = worker.stage.scheduler.submits[-1].caller.limits
            assert [limit.value for limit in limits if limit.scope == "key"] == [20]
        await site.passes(10.0)
    read = await sync_to_async(site.people.ann.get)(f"keys/{key['id']}")
    assert (read.json()["models"], read.json()["limits"]["rpm"]) == (change["models"], 20)


def everything_stored() -> str:
    """Every column of every row of every table."""
    rows = [list(model._base_manager.values()) for model in apps.get_models(include_auto_created=True)]
    return json.dumps(rows, default=str)


async def test_fr_004_no_secret_is_in_an_answer_a_log_or_a_table(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """FR-004: the secret is in one answer; 401s are the same to the byte and tell nothing of us."""
    caplog.set_level(logging.DEBUG)
    ann, worker, wrong = site.people.ann, site.workers[0], "sk-wrong-ABCDEF0123456789"
    expires = datetime.fromtimestamp(site.wall.now, UTC) + timedelta(seconds=60)
    made = await site.do(ann, "POST", "keys", {"name": "s", "expires_at": expires.isoformat()})
    secret = made.pop("secret")
    said = [json.dumps(made)]
    assert (await worker.chat(secret)).status == 200
    said.append(json.dumps(await site.do(ann, "PATCH", f"keys/{made['id']}", {"limits": {"rpm": 9}})))
    await site.passes(61)
    revoked = await sync_to_async(issue)(site.people.acme, "r", revoked_at=datetime.now(UTC))
    other = await sync_to_async(add_secret)(site.people.acme_key.key)
    mistaken = keys.PREFIX + other.secret.lookup + "0" * keys.SECRET_LENGTH
    refused = [secret, wrong, "", "s", "s" * 200, revoked.token, mistaken + keys.checksum(mistaken)]
    replies = [await worker.chat(token) for token in refused]
    answers = {(reply.status, reply.body) for reply in replies}
    assert len(answers) == 1 and replies[0].status == 401
    assert replies[0].error["param"] is None
    for token in refused:
        answer = await worker.api.call("GET", "keys", token)
        assert (answer.status_code, answer.content) == (401, replies[0].body)
    listed = await sync_to_async(ann.get)("keys?limit=200")
    audited = await sync_to_async(ann.get)("audit?limit=200")
    said += [listed.content.decode(), audited.content.decode(), *(reply.body.decode() for reply in replies)]
    line = formatter(process="web", human=False)
    said += [line.format(record) for record in caplog.records]
    said += [repr(thing) for thing in (worker.authenticator.__dict__, other.secret, other.key)]
    stored = await sync_to_async(everything_stored)()
    digest = await sync_to_async(KeySecret.objects.get)(key_id=made["id"])
    for text in [*said, stored]:
        assert secret not in text and wrong not in text and revoked.token not in text
    for text in said:
        assert digest.digest not in text and other.secret.digest not in text
    body = replies[0].body.decode().lower()
    assert not any(word in body for word in ("digest", "tenants", "django", "harness", ".py", "sqlite"))


async def test_fr_006_401_is_for_credentials_and_403_for_rights(site: Site) -> None:
    """FR-006: none, wrong and a session alone are 401 with a challenge; a valid key that may not is 403 or 404."""
    (worker, _), people = site.workers, site.people
    key = await sync_to_async(issue)(people.acme, "narrow", models=["demo"])
    cookie = people.ann.client.cookies["sessionid"].value
    for reply in (
        await worker.stage.chat(key=None),
        await worker.chat("sk-wrong"),
        await worker.stage.chat(key=None, headers={"cookie": f"sessionid={cookie}"}),
    ):
        assert (reply.status, reply.error["type"]) == (401, "invalid_request_error")
        assert reply.headers["www-authenticate"].startswith("Bearer ")
    hidden = await worker.chat(key.token, model="org/name:tag")
    assert (hidden.status, hidden.error["code"]) == (404, "model_not_found")
    assert hidden.body.replace(b"org/name:tag", b"nosuch") == (await worker.chat(key.token, model="nosuch")).body
    operators = await worker.stage.ask("GET", "/v1/config", key=key.token)
    assert (operators.status, operators.error["code"]) == (403, "insufficient_permissions")
    for path in ("tenants", "keys", "audit", "memberships", "tiers", "dead-letters"):
        assert (await worker.api.call("GET", path, key.token)).status_code == 403
        nobody = await worker.api.call("GET", path, None)
        assert nobody.status_code == 401 and nobody.headers["www-authenticate"].startswith("Bearer ")


async def test_both_secrets_of_a_rotated_key_work_until_the_old_one_ends_to_the_instant(site: Site) -> None:
    ann, old = site.people.ann, site.people.acme_key
    assert await site.statuses(old.token) == [200, 200]
    rotated = await site.do(ann, "POST", f"keys/{old.key.pk}/rotate", {"overlap": 60})
    await site.passes(PROPAGATION)
    assert await site.statuses(old.token) == await site.statuses(rotated["secret"]) == [200, 200]
    callers = {worker.stage.scheduler.submits[-1].caller.key for worker in site.workers}
    assert callers == {str(old.key.pk)}  # one key, so one account of limits and usage
    ends = await sync_to_async(KeySecret.objects.get)(pk=old.secret.pk)
    assert ends.valid_until is not None
    site.wall.now = ends.valid_until.timestamp() - 0.001
    assert await site.statuses(old.token) == [200, 200]
    site.wall.now = ends.valid_until.timestamp()
    assert await site.statuses(old.token) == [401, 401]
    assert await site.statuses(rotated["secret"]) == [200, 200]


async def test_a_key_ends_before_its_older_secret_does(site: Site) -> None:
    key = site.people.acme_key
    instant = datetime.fromtimestamp(site.wall.now + 10, UTC)
    await site.do(site.people.ann, "POST", f"keys/{key.key.pk}/rotate", {"overlap": 3600})
    await site.do(site.people.ann, "PATCH", f"keys/{key.key.pk}", {"expires_at": instant.isoformat()})
    await site.passes(PROPAGATION)
    assert await site.statuses(key.token) == [200, 200]
    site.wall.now = instant.timestamp()
    assert await site.statuses(key.token) == [401, 401]


async def test_a_key_calls_the_management_api_for_its_own_tenant(site: Site) -> None:
    (worker, _), people = site.workers, site.people
    books = await sync_to_async(issue)(people.acme, "books", scopes=["usage"])
    ops = await sync_to_async(issue)(people.globex, "ops", scopes=["admin"])
    seen = await worker.api.call("GET", "tenants", books.token)
    assert [tenant["slug"] for tenant in seen.json()["data"]] == ["acme"]
    assert (await worker.api.call("GET", "tenants/globex", books.token)).status_code == 404
    assert (await worker.api.call("GET", "keys", books.token)).status_code == 403
    everyone = await worker.api.call("GET", "tenants", ops.token)
    assert [tenant["slug"] for tenant in everyone.json()["data"]] == ["globex", "acme"]
    made = await worker.api.call("POST", "keys", ops.token, {"name": "x", "tenant": "acme", "scopes": ["admin"]})
    assert made.status_code == 201
    events = await worker.api.call("GET", "audit", ops.token)
    assert [(event["actor"], event["action"]) for event in events.json()["data"]] == [
        ("key globex/ops", "apikey.create")
    ]


async def test_a_key_is_refused_from_where_it_may_not_be_used(site: Site) -> None:
    worker = site.workers[0]
    here = await sync_to_async(issue)(site.people.acme, "here", scopes=["usage"], allowed_ips=["127.0.0.0/8"])
    there = await sync_to_async(issue)(site.people.acme, "there", scopes=["usage"], allowed_ips=["2001:db8::/32"])
    assert (await worker.api.call("GET", "tiers", here.token)).status_code == 200
    refused = await worker.api.call("GET", "tiers", there.token)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "ip_not_authorized")


async def test_the_last_use_is_told_of_each_secret(site: Site) -> None:
    key = site.people.acme_key
    await site.statuses(key.token)
    for worker in site.workers:
        await worker.authenticator.aclose()
    read = await sync_to_async(site.people.ann.get)(f"keys/{key.key.pk}")
    (secret,) = read.json()["secrets"]
    assert datetime.fromisoformat(secret["last_used_at"]).timestamp() == site.wall.now
    assert not await sync_to_async(UsageRecord.objects.exists)() and await sync_to_async(ApiKey.objects.count)() == 3
