"""Authentication: what is cached, what never is, and what a caller is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from ipaddress import ip_network
from typing import Any

import pytest
from django.db import OperationalError
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from tenants import auth, keys
from tenants.auth import (
    AddressRefusedError,
    Authenticator,
    AuthUnavailableError,
    InvalidKeyError,
    TenantSuspendedError,
    read_entries,
)
from tenants.changes import current_version
from tenants.database import DatabaseThread
from tenants.models import ApiKey, KeySecret, Tenant

from .conftest import Clock, Issued, issue, make_tenant


class World:
    """An authenticator with a clock of its own, a poller that a test plays, and a count of reads."""

    def __init__(self, database: DatabaseThread, clock: Clock) -> None:
        self.database = database
        self.clock = clock
        self.wall = Clock(float(int(time.time())))
        self.fresh_at = clock.now
        self.reads: list[list[str]] = []
        self.authenticator = Authenticator(lambda: self.fresh_at, clock=clock, wall=self.wall)

    async def issue(self, **fields: Any) -> Issued:
        def make() -> Issued:
            tenant = Tenant.objects.filter(slug="acme").first() or make_tenant()
            return issue(tenant, **fields)

        return await self.database.run(make)

    async def change(self, function: Callable[[], Any]) -> int:
        """Do something in the database; the number of the change."""
        await self.database.run(function)
        return await self.database.run(current_version)


@pytest.fixture
async def world(database: DatabaseThread, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    world = World(database, clock)

    def counted(lookups: list[str]) -> Any:
        world.reads.append(list(lookups))
        return read_entries(lookups)

    monkeypatch.setattr(auth, "read_entries", counted)
    yield world
    await world.authenticator.aclose()


def away(*args: Any) -> Any:
    raise OperationalError("could not connect to server at 10.0.0.9")


async def test_a_key_becomes_a_principal(world: World) -> None:
    issued = await world.issue(name="prod", scopes=["inference", "usage"], models=["demo"])
    principal = await world.authenticator.authenticate(issued.token, None)
    assert (principal.tenant_slug, principal.key_name, principal.tier) == ("acme", "prod", "vip")
    assert principal.has_scope("usage") and not principal.has_scope("admin")
    assert principal.allows_model("demo") and not principal.allows_model("other")


async def test_a_known_key_needs_no_database(world: World) -> None:
    issued = await world.issue()
    for _ in range(3):
        await world.authenticator.authenticate(issued.token, None)
    assert len(world.reads) == 1


async def test_nonsense_is_refused_without_a_look_up(world: World) -> None:
    for token in ("", "sk-nonsense", "x" * 200):
        with pytest.raises(InvalidKeyError):
            await world.authenticator.authenticate(token, None)
    assert world.reads == []


async def test_unknown_wrong_revoked_and_expired_keys_get_one_answer(world: World) -> None:
    revoked = await world.issue(name="old", revoked_at=timezone.now())
    expired = await world.issue(name="short", expires_at=datetime.fromtimestamp(world.wall.now - 1, UTC))
    other = await world.issue(name="other")
    # The right look-up part with another secret: the checksum holds, the digest does not.
    body = keys.PREFIX + other.secret.lookup + "0" * keys.SECRET_LENGTH
    wrong = body + keys.checksum(body)
    answers = set()
    for token in (keys.mint().token, wrong, revoked.token, expired.token, "nonsense"):
        with pytest.raises(InvalidKeyError) as refused:
            await world.authenticator.authenticate(token, "10.0.0.1")
        answers.add((type(refused.value), str(refused.value)))
        assert token not in str(refused.value)
    assert len(answers) == 1


async def test_a_key_expires_while_it_is_cached(world: World) -> None:
    issued = await world.issue(expires_at=datetime.fromtimestamp(world.wall.now + 10, UTC))
    await world.authenticator.authenticate(issued.token, None)
    world.wall.advance(10)
    with pytest.raises(InvalidKeyError):
        await world.authenticator.authenticate(issued.token, None)


async def test_a_revoked_key_is_refused_once_the_change_is_known(world: World) -> None:
    issued = await world.issue()
    await world.authenticator.authenticate(issued.token, None)
    version = await world.change(lambda: ApiKey.objects.update(revoked_at=timezone.now()))
    await world.authenticator.refresh(version)
    with pytest.raises(InvalidKeyError):
        await world.authenticator.authenticate(issued.token, None)


async def test_a_new_key_works_once_the_change_is_known_although_it_was_unknown_before(world: World) -> None:
    token = keys.mint().token
    with pytest.raises(InvalidKeyError):
        await world.authenticator.authenticate(token, None)
    await world.authenticator.refresh(await world.change(lambda: issue(make_tenant(), token=token)))
    assert (await world.authenticator.authenticate(token, None)).tenant_slug == "acme"


async def test_a_change_reads_all_known_keys_again_at_once(world: World) -> None:
    tokens = [(await world.issue(name=name)).token for name in ("a", "b", "c")]
    for token in tokens:
        await world.authenticator.authenticate(token, None)
    version = await world.change(lambda: ApiKey.objects.update(models=["demo"]))
    world.reads.clear()
    await world.authenticator.refresh(version)
    principals = [await world.authenticator.authenticate(token, None) for token in tokens]
    assert len(world.reads) == 1 and all(principal.models == ("demo",) for principal in principals)
    assert {principal.version for principal in principals} == {version}


async def test_a_read_overtaken_by_a_change_is_never_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    issued = await world.issue(models=["old"])
    old = await world.database.run(read_entries, [issued.secret.lookup])
    version = await world.change(lambda: ApiKey.objects.update(models=["new"]))
    answers = [old]
    monkeypatch.setattr(auth, "read_entries", lambda wanted: answers.pop() if answers else read_entries(wanted))
    world.authenticator.invalidate(version)  # the process knows of the change while the old copy is still under way
    principal = await world.authenticator.authenticate(issued.token, None)
    assert principal.models == ("new",)


async def test_an_older_copy_never_replaces_a_newer_entry(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    issued = await world.issue(models=["old"])
    old = await world.database.run(read_entries, [issued.secret.lookup])
    await world.change(lambda: ApiKey.objects.update(models=["new"]))
    await world.authenticator.authenticate(issued.token, None)  # read after the change, before the poller told of it
    monkeypatch.setattr(auth, "read_entries", lambda wanted: old)
    await world.authenticator.refresh(old[0])
    monkeypatch.undo()
    assert (await world.authenticator.authenticate(issued.token, None)).models == ("new",)


async def test_a_counter_that_moves_during_a_read_has_it_read_again(
    database: DatabaseThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = await database.run(lambda: issue(make_tenant()))
    versions = iter([7, 8, 8, 8])
    monkeypatch.setattr(auth, "current_version", lambda: next(versions))
    version, entries = await database.run(read_entries, [issued.secret.lookup])
    assert version == 8 and entries[issued.secret.lookup].principal.version == 8
    assert next(versions, None) is None


async def test_callers_who_ask_for_one_unknown_key_share_a_read(world: World) -> None:
    token = keys.mint().token
    tries = [world.authenticator.authenticate(token, None) for _ in range(50)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert {type(result) for result in results} == {InvalidKeyError} and len(world.reads) == 1


async def test_an_unknown_key_is_remembered_for_a_second(world: World) -> None:
    token = keys.mint().token
    for seconds, reads in ((0.0, 1), (0.9, 1), (0.2, 2)):
        world.clock.advance(seconds)
        with pytest.raises(InvalidKeyError):
            await world.authenticator.authenticate(token, None)
        assert len(world.reads) == reads


async def test_a_caller_who_leaves_does_not_cancel_the_read_of_the_others(world: World) -> None:
    issued = await world.issue()
    first = asyncio.create_task(world.authenticator.authenticate(issued.token, None))
    second = asyncio.create_task(world.authenticator.authenticate(issued.token, None))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).tenant_slug == "acme"


ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))


@given(ADDRESSES, st.lists(st.tuples(ADDRESSES, st.integers(0, 128)), max_size=4))
def test_an_address_is_within_what_the_standard_library_says(address: Any, prefixes: list[tuple[Any, int]]) -> None:
    networks = [ip_network((each, min(length, each.max_prefixlen)), strict=False) for each, length in prefixes]
    plain = getattr(address, "ipv4_mapped", None) or address
    found = auth._within(tuple(auth._network(str(network)) for network in networks), str(address))
    assert found is any(plain in network for network in networks)


@pytest.mark.parametrize("address", [None, "", "unknown", "10.0.0.1:80", "fe80::1%eth0"])
def test_what_is_no_address_is_within_nothing_that_is_named(address: str | None) -> None:
    assert not auth._within((auth._network("10.0.0.0/8"),), address)


async def test_a_suspended_tenants_key_is_told_so(world: World) -> None:
    issued = await world.issue()
    version = await world.change(lambda: Tenant.objects.update(state="suspended"))
    await world.authenticator.refresh(version)
    with pytest.raises(TenantSuspendedError):
        await world.authenticator.authenticate(issued.token, None)


@pytest.mark.parametrize(
    ("address", "admitted"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("2001:db8::1", True),
        ("10.2.0.1", False),
        ("", False),
        (None, False),
        ("nonsense", False),
    ],
)
async def test_a_key_is_used_from_its_addresses_only(world: World, address: str | None, admitted: bool) -> None:
    issued = await world.issue(allowed_ips=["10.1.0.0/16", "2001:db8::1"])
    if admitted:
        await world.authenticator.authenticate(issued.token, address)
    else:
        with pytest.raises(AddressRefusedError):
            await world.authenticator.authenticate(issued.token, address)


async def test_without_a_database_known_keys_go_on_for_the_lease_and_unknown_ones_are_unavailable(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = await world.issue()
    await world.authenticator.authenticate(issued.token, None)
    monkeypatch.setattr(auth, "read_entries", away)
    world.clock.advance(59)
    await world.authenticator.authenticate(issued.token, None)
    with pytest.raises(AuthUnavailableError) as refused:
        await world.authenticator.authenticate(keys.mint().token, None)
    assert "10.0.0.9" not in str(refused.value)
    world.clock.advance(2)
    with pytest.raises(AuthUnavailableError):
        await world.authenticator.authenticate(issued.token, None)


async def test_a_database_that_goes_right_after_a_change_leaves_the_known_entry_for_the_lease(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = await world.issue()
    await world.authenticator.authenticate(issued.token, None)
    monkeypatch.setattr(auth, "read_entries", away)
    with pytest.raises(OperationalError):
        await world.authenticator.refresh(99)
    assert (await world.authenticator.authenticate(issued.token, None)).tenant_slug == "acme"


async def test_a_process_that_has_lost_touch_asks_the_database_each_time(world: World) -> None:
    issued = await world.issue()
    await world.authenticator.authenticate(issued.token, None)
    world.clock.advance(61)
    await world.authenticator.authenticate(issued.token, None)
    assert len(world.reads) == 2


async def test_the_last_use_is_noted_at_most_once_a_minute(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[dict[int, float]] = []
    monkeypatch.setattr(auth, "write_last_used", noted.append)
    issued = await world.issue()
    for seconds in (0, 30, 29, 1):
        world.clock.advance(seconds)
        await world.authenticator.authenticate(issued.token, None)
        if writing := world.authenticator._noting:
            await writing
    assert [list(round) for round in noted] == [[issued.secret.pk]] * 2


async def test_the_last_use_reaches_the_database_and_is_no_change(world: World) -> None:
    issued = await world.issue()
    before = await world.database.run(current_version)
    await world.authenticator.authenticate(issued.token, None)
    await world.authenticator.aclose()
    secret = await world.database.run(lambda: KeySecret.objects.get(pk=issued.secret.pk))
    assert secret.last_used_at == datetime.fromtimestamp(world.wall.now, UTC)
    assert await world.database.run(current_version) == before


async def test_a_flood_of_unknown_keys_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_READS", 2)
    tries = [world.authenticator.authenticate(keys.mint().token, None) for _ in range(5)]
    results = [type(result) for result in await asyncio.gather(*tries, return_exceptions=True)]
    assert results.count(InvalidKeyError) == 2 and results.count(AuthUnavailableError) == 3


async def test_no_representation_of_what_is_cached_shows_a_digest(world: World) -> None:
    issued = await world.issue()
    _, entries = await world.database.run(read_entries, [issued.secret.lookup])
    assert issued.secret.digest not in repr(entries) and issued.token not in repr(entries)
