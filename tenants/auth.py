"""From a bearer token to a `Principal`: a dictionary look-up for known keys, one shared read for unknown ones.

The cache follows the change counter. `version` is the newest change this process was told of; an entry made from an
older state is read again before it is used, and no read that began before a change is ever stored after it. While the
database is away, known keys go on until the poller has been out of touch for `lease` seconds.

    AuthError
    ├── InvalidKeyError       malformed, unknown, wrong, revoked, expired: the caller cannot tell which (401)
    ├── AddressRefusedError   a valid key from an address it does not allow (401)
    ├── TenantSuspendedError  a valid key of a suspended tenant (403)
    └── AuthUnavailableError  the database is away and the key is not known here (503)
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import Q

from . import keys
from .changes import current_version
from .database import DatabaseAway, DatabaseThread
from .limits import EffectiveBudget, EffectiveLimit, effective_budgets, effective_limits
from .models import KeySecret, Tenant

log = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
UNKNOWN_SECONDS = 1.0  # how long an unknown key is remembered as unknown
USED_SECONDS = 60.0  # `last_used_at` is written at most this often
LOOKUP_TIMEOUT_SECONDS = 5.0
MAX_UNKNOWN = 10_000
MAX_KNOWN = 100_000
MAX_READS = 256  # different unknown keys at a time
READ_TRIES = 5

Network = tuple[int, int, int]
"""IP version, mask and masked address: `address in network` of `ipaddress` takes several times as long."""


class AuthError(Exception):
    """Root of what authentication raises. Messages hold nothing of the token."""


class InvalidKeyError(AuthError):
    def __init__(self) -> None:
        super().__init__("Incorrect API key provided.")


class AddressRefusedError(AuthError):
    def __init__(self) -> None:
        super().__init__("This API key may not be used from this address.")


class TenantSuspendedError(AuthError):
    def __init__(self) -> None:
        super().__init__("This account is suspended. Contact your provider.")


class AuthUnavailableError(AuthError):
    def __init__(self) -> None:
        super().__init__("API keys cannot be checked right now. Try again shortly.")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking and what they may use, as of change `version`.

    `expires_at`, in Unix seconds, is when the secret that was shown ends: with its key, or as one rotated out.
    """

    tenant_id: str
    tenant_slug: str
    key_id: str
    key_name: str
    tier: str
    scopes: frozenset[str]
    models: tuple[str, ...]
    limits: tuple[EffectiveLimit, ...]
    expires_at: float | None
    version: int
    budgets: tuple[EffectiveBudget, ...] = ()

    def allows_model(self, name: str) -> bool:
        return "*" in self.models or name in self.models

    def has_scope(self, scope: str) -> bool:
        return scope in self.scopes


@dataclass(frozen=True, slots=True)
class _Entry:
    """A secret and its key as the database had them at change `principal.version`."""

    principal: Principal
    secret_id: int
    digest: str = field(repr=False)
    pepper_version: int
    suspended: bool
    networks: tuple[Network, ...]


def read_entries(lookups: Iterable[str]) -> tuple[int, dict[str, _Entry]]:
    """The secrets of live keys among `lookups`, and the change they were read at.

    Read again if the counter moved meanwhile. If it keeps moving, the older number is given: the entries are then
    taken for older than they are and read again soon, never for newer.
    """
    wanted = list(lookups)
    for _ in range(READ_TRIES):
        version = current_version()
        found = KeySecret.objects.filter(lookup__in=wanted, key__revoked_at__isnull=True)
        rows = found.select_related("key__tenant__tier").prefetch_related(
            "key__limits", "key__tenant__limits", "key__tenant__tier__limits"
        )
        entries = {secret.lookup: _entry(secret, version) for secret in rows}
        if current_version() == version:
            break
    return version, entries


def _entry(secret: KeySecret, version: int) -> _Entry:
    key = secret.key
    tenant, tier = key.tenant, key.tenant.tier
    ends = [instant.timestamp() for instant in (key.expires_at, secret.valid_until) if instant is not None]
    principal = Principal(
        tenant_id=str(tenant.pk),
        tenant_slug=tenant.slug,
        key_id=str(key.pk),
        key_name=key.name,
        tier=tier.name,
        scopes=frozenset(key.scopes),
        models=tuple(key.models),
        limits=effective_limits(tier, tenant, key),
        expires_at=min(ends, default=None),
        version=version,
        budgets=effective_budgets(tier, tenant, key),
    )
    return _Entry(
        principal=principal,
        secret_id=secret.pk,
        digest=secret.digest,
        pepper_version=secret.pepper_version,
        suspended=tenant.state != Tenant.State.ACTIVE,
        networks=tuple(_network(entry) for entry in key.allowed_ips),
    )


def write_last_used(used: dict[int, float]) -> None:
    """Note when secrets were used (id -> Unix seconds), unless another process did within the last minute."""
    for secret_id, at in used.items():
        instant = datetime.fromtimestamp(at, UTC)
        stale = Q(last_used_at__isnull=True) | Q(last_used_at__lte=instant - timedelta(seconds=USED_SECONDS))
        KeySecret.objects.get_queryset().filter(stale, pk=secret_id).touch(last_used_at=instant)


class Authenticator:
    """The keys that one web process knows. Lives on one event loop.

    `fresh_at` gives the time (of `clock`) at which this process last knew that it had missed no change:
    `Poller.fresh_at`. Register `refresh` with `Poller.on_change`.
    """

    def __init__(
        self,
        fresh_at: Callable[[], float],
        *,
        lease: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._fresh_at = fresh_at
        self._lease = lease
        self._clock = clock
        self._wall = wall
        self._version = 0
        self._known: dict[str, _Entry] = {}
        self._unknown: dict[str, float] = {}  # lookup -> the clock's time until which it counts as unknown
        self._reads: dict[str, asyncio.Task[_Entry | None]] = {}
        self._used_at: dict[int, float] = {}  # secret's id -> the clock's time of the last note
        self._to_note: dict[int, float] = {}
        self._noting: asyncio.Task[None] | None = None
        self._thread = DatabaseThread("keys")

    async def authenticate(self, token: str, client_ip: str | None) -> Principal:
        """The principal of `token`. Raises an AuthError. `client_ip` None means that it is not known."""
        parsed = keys.parse(token)
        if parsed is None:
            raise InvalidKeyError
        now = self._clock()
        entry = self._known.get(parsed.lookup)
        if entry is None or entry.principal.version < self._version or now - self._fresh_at() > self._lease:
            entry = await self._find(parsed.lookup, now)
        return self._admit(entry, parsed.token, client_ip, now)

    def invalidate(self, version: int) -> None:
        """There was a change: what was read before it is read again before it is used."""
        self._version = max(self._version, version)
        self._unknown.clear()

    async def refresh(self, version: int) -> None:
        """Take in a change: read all known keys again at once. Raises `DatabaseAway`, after which old entries stand."""
        self.invalidate(version)
        if self._known:
            asked = list(self._known)
            read_at, entries = await self._thread.run(read_entries, asked)
            for lookup in asked:
                self._store(lookup, entries.get(lookup), read_at)

    async def aclose(self) -> None:
        """Write what is still to be noted and let the connection go."""
        if self._noting is not None:
            await self._noting
        for read in list(self._reads.values()):
            read.cancel()
        await asyncio.gather(*self._reads.values(), return_exceptions=True)
        await self._thread.aclose()

    def _admit(self, entry: _Entry | None, token: str, client_ip: str | None, now: float) -> Principal:
        """The checks that need no database, in an order that tells a stranger nothing."""
        if entry is None or not _proves(entry, token):
            raise InvalidKeyError
        principal = entry.principal
        if principal.expires_at is not None and self._wall() >= principal.expires_at:
            raise InvalidKeyError
        if entry.suspended:
            raise TenantSuspendedError
        if entry.networks and not _within(entry.networks, client_ip):
            raise AddressRefusedError
        if now - self._used_at.get(entry.secret_id, float("-inf")) >= USED_SECONDS:
            self._note_used(entry.secret_id, now)
        return principal

    async def _find(self, lookup: str, now: float) -> _Entry | None:
        """Read the key; callers that ask for the same one share the read. None: there is no such live key."""
        if self._unknown.get(lookup, float("-inf")) > now:
            return None
        read = self._reads.get(lookup)
        if read is None:
            if len(self._reads) >= MAX_READS:
                raise AuthUnavailableError
            read = self._reads[lookup] = asyncio.create_task(self._read(lookup), name="key-read")
            read.add_done_callback(lambda done: self._end_read(lookup, done))
        try:
            # Shielded: a caller who goes away must not cancel the read of the others.
            return await asyncio.wait_for(asyncio.shield(read), LOOKUP_TIMEOUT_SECONDS)
        except (*DatabaseAway, TimeoutError) as error:
            known = self._known.get(lookup)
            if known is not None and self._clock() - self._fresh_at() <= self._lease:
                return known
            raise AuthUnavailableError from error

    async def _read(self, lookup: str) -> _Entry | None:
        """Read and remember. A read overtaken by a change is thrown away and done again."""
        while True:
            version, entries = await self._thread.run(read_entries, [lookup])
            if version >= self._version:
                break
        entry = entries.get(lookup)
        self._store(lookup, entry, version)
        return entry

    def _end_read(self, lookup: str, read: asyncio.Task[_Entry | None]) -> None:
        self._reads.pop(lookup, None)
        if not read.cancelled():
            read.exception()  # whoever still waits has it; if nobody does, it is no accident

    def _store(self, lookup: str, entry: _Entry | None, version: int) -> None:
        """Remember what a read at `version` found, unless the cache holds something newer."""
        held = self._known.get(lookup)
        if version < self._version or (held is not None and held.principal.version > version):
            return
        if entry is None:
            self._known.pop(lookup, None)
            _bound(self._unknown, MAX_UNKNOWN)
            self._unknown[lookup] = self._clock() + UNKNOWN_SECONDS
        else:
            self._unknown.pop(lookup, None)
            _bound(self._known, MAX_KNOWN)
            self._known[lookup] = entry

    def _note_used(self, secret_id: int, now: float) -> None:
        _bound(self._used_at, MAX_KNOWN)
        self._used_at[secret_id] = now
        self._to_note[secret_id] = self._wall()
        if self._noting is None:
            self._noting = asyncio.create_task(self._write_notes(), name="key-last-used")

    async def _write_notes(self) -> None:
        """Write `last_used_at` beside the requests. What is used meanwhile goes with the next round."""
        try:
            while self._to_note:
                used, self._to_note = self._to_note, {}
                await self._thread.run(write_last_used, used)
        except DatabaseAway as error:
            log.info("last_used_at was not written: %s", type(error).__name__)
        finally:
            self._noting = None


def _proves(entry: _Entry, token: str) -> bool:
    try:
        return hmac.compare_digest(keys.digest(token, entry.pepper_version), entry.digest)
    except keys.UnknownPepperError as error:
        log.error("Key %s cannot be checked: %s", entry.principal.key_id, error)
        return False


def _network(text: str) -> Network:
    network = ipaddress.ip_network(text)
    return network.version, int(network.netmask), int(network.network_address)


def _within(networks: tuple[Network, ...], client_ip: str | None) -> bool:
    try:
        address = ipaddress.ip_address(client_ip or "")
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    version, number = address.version, int(address)
    return any(version == of and number & mask == masked for of, mask, masked in networks)


def _bound(cache: dict[Any, Any], size: int) -> None:
    """Make room for one more by dropping the oldest entry."""
    if len(cache) >= size:
        del cache[next(iter(cache))]
