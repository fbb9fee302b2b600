"""How changes are counted, seen and acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError, transaction
from django.utils import timezone

from tenants.changes import (
    Poller,
    beat,
    behind,
    configuration_changed,
    current_version,
    one_change,
    wait_acknowledged,
)
from tenants.database import DatabaseThread
from tenants.models import KeySecret, Limit, Membership, ProcessHeartbeat, Tenant, Tier

from .conftest import Clock, issue, make_tenant


@pytest.fixture
def signals() -> Iterator[list[dict[str, Any]]]:
    seen: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        seen.append(kwargs)

    configuration_changed.connect(receive, weak=False, dispatch_uid="test")
    yield seen
    configuration_changed.disconnect(dispatch_uid="test")


class Unfinished(Exception):
    pass


def test_every_kind_of_write_counts(acme: Tenant) -> None:
    before = current_version()
    acme.name = "Acme Corp"
    acme.save()
    Tenant.objects.filter(slug="acme").update(timezone="Asia/Shanghai")
    limit = acme.limits.create(kind="rpm", value=5)
    Limit.objects.bulk_create([Limit(tenant=acme, kind="tpm", value=5)])
    limit.delete()
    acme.limits.all().delete()
    assert current_version() == before + 6


def test_a_write_that_touches_nothing_does_not_count(acme: Tenant) -> None:
    before = current_version()
    Tenant.objects.filter(slug="nobody").update(name="x")
    Tenant.objects.filter(slug="nobody").delete()
    with one_change():
        pass
    assert current_version() == before


def test_what_is_written_together_is_one_change(acme: Tenant, signals: list[dict[str, Any]]) -> None:
    before = current_version()
    with one_change(actor="ada", reason="why not"):
        acme.save()
        Tier.objects.create(name="gold")
    assert current_version() == before + 1
    assert [(call["version"], call["actor"], call["reason"]) for call in signals] == [(before + 1, "ada", "why not")]
    assert signals[0]["models"] == {Tenant, Tier}


def test_a_change_that_fails_leaves_no_trace(acme: Tenant, signals: list[dict[str, Any]]) -> None:
    before = current_version()
    with pytest.raises(Unfinished), one_change():
        acme.delete()
        raise Unfinished
    assert current_version() == before
    assert Tenant.objects.filter(slug="acme").exists() and not signals


def test_the_counter_rolls_back_with_its_transaction(acme: Tenant) -> None:
    before = current_version()
    with pytest.raises(Unfinished), transaction.atomic():
        acme.save()
        raise Unfinished
    assert current_version() == before


def test_memberships_are_read_per_request_and_do_not_count(acme: Tenant) -> None:
    before = current_version()
    Membership.objects.create(user=User.objects.create(username="ada"), tenant=acme, role="owner")
    assert current_version() == before


@pytest.mark.django_db
def test_processes_that_are_silent_are_not_waited_for() -> None:
    beat("web-1", "web", 3)
    beat("web-2", "web", 2)
    beat("dead", "scheduler", 1)
    ProcessHeartbeat.objects.filter(name="dead").update(beat_at=timezone.now() - timedelta(seconds=10))
    assert behind(3) == ["web-2"]


@pytest.mark.django_db
def test_a_heartbeat_replaces_the_one_before() -> None:
    beat("web-1", "web", 1)
    beat("web-1", "web", 2, {"host": "a"})
    (heartbeat,) = ProcessHeartbeat.objects.all()
    assert (heartbeat.seen_version, heartbeat.info) == (2, {"host": "a"})


@pytest.mark.django_db
def test_waiting_ends_when_all_have_seen_the_change(clock: Clock) -> None:
    beat("web-1", "web", 1)
    progress: list[list[str]] = []

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        beat("web-1", "web", 2)

    assert wait_acknowledged(2, 5.0, progress.append, clock=clock, sleep=sleep) == []
    assert progress == [["web-1"]]


@pytest.mark.django_db
def test_waiting_ends_with_the_names_of_those_that_do_not_follow(clock: Clock) -> None:
    beat("web-1", "web", 1)
    assert wait_acknowledged(2, 5.0, clock=clock, sleep=clock.advance) == ["web-1"]


# --- the poller -----------------------------------------------------------------------------------------------------


async def test_the_poller_tells_of_a_change_and_then_acknowledges_it(database: DatabaseThread, clock: Clock) -> None:
    told: list[int] = []

    async def on_change(version: int) -> None:
        told.append(version)

    poller = Poller("web-1", "web", clock=clock)
    poller.on_change(on_change)
    await poller.poll()
    await database.run(make_tenant)
    version = await database.run(current_version)
    assert await database.run(behind, version) == ["web-1"]
    await poller.poll()
    assert told == [0, version] and poller.version == version
    assert await database.run(behind, version) == []
    await poller.aclose()


async def test_the_poller_beats_every_two_seconds_without_a_change(database: DatabaseThread, clock: Clock) -> None:
    poller = Poller("web-1", "web", clock=clock)
    await poller.poll()

    def silence() -> None:
        ProcessHeartbeat.objects.update(beat_at=timezone.now() - timedelta(hours=2))

    def silent() -> bool:
        return ProcessHeartbeat.objects.filter(beat_at__lt=timezone.now() - timedelta(hours=1)).exists()

    await database.run(silence)
    clock.advance(1.9)
    await poller.poll()
    assert await database.run(silent)
    clock.advance(0.2)
    await poller.poll()
    assert not await database.run(silent)
    await poller.aclose()


async def test_a_listener_that_fails_is_asked_again_and_nothing_is_acknowledged(
    database: DatabaseThread, clock: Clock
) -> None:
    tries: list[int] = []

    async def on_change(version: int) -> None:
        tries.append(version)
        if len(tries) == 1:
            raise RuntimeError("not yet")

    poller = Poller("web-1", "web", clock=clock)
    poller.on_change(on_change)
    await database.run(make_tenant)
    version = await database.run(current_version)
    await poller.poll()
    assert poller.fresh_at == float("-inf") and await database.run(behind, version) == ["web-1"]
    await poller.poll()
    assert tries == [version, version] and poller.fresh_at == clock.now
    await poller.aclose()


async def test_the_poller_outlives_a_database_that_is_away(
    database: DatabaseThread, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    poller = Poller("web-1", "web", clock=clock)
    await poller.poll()
    fresh = poller.fresh_at

    def away() -> int:
        raise OperationalError("gone")

    clock.advance(30)
    with monkeypatch.context() as patch:
        patch.setattr("tenants.changes.current_version", away)
        await poller.poll()
    assert poller.fresh_at == fresh
    await poller.poll()
    assert poller.fresh_at == clock.now
    await poller.aclose()


async def test_a_poller_that_stops_is_not_waited_for(database: DatabaseThread) -> None:
    poller = Poller("web-1", "web")
    await poller.start()
    assert await database.run(ProcessHeartbeat.objects.count) == 1
    await poller.aclose()
    await poller.aclose()
    assert await database.run(ProcessHeartbeat.objects.count) == 0


def test_noting_the_use_of_a_key_is_no_change(acme: Tenant) -> None:
    secret = issue(acme).secret
    before = current_version()
    KeySecret.objects.get_queryset().filter(pk=secret.pk).touch(last_used_at=timezone.now())
    assert current_version() == before
