"""The cast: two tenants of two tiers, an outsider's clock, and the database beside the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from tenants import keys
from tenants.database import DatabaseThread
from tenants.models import ApiKey, KeySecret, Retention, Tenant, Tier, UsageRecord
from tenants.models.retention import ONLY_ROW


class Clock:
    """Time that a test moves."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Issued:
    key: ApiKey
    secret: KeySecret
    token: str


def issue(tenant: Tenant, name: str = "prod", token: str = "", **fields: Any) -> Issued:
    """A key of `tenant` in the database, with its secret."""
    key = ApiKey.objects.create(tenant=tenant, name=name, **fields)
    return add_secret(key, token)


def add_secret(key: ApiKey, token: str = "", **fields: Any) -> Issued:
    """Another secret of `key`."""
    token = token or keys.mint().token
    made = {"lookup": keys.lookup_of(token), "digest": keys.digest(token, 1), "pepper_version": 1}
    return Issued(key, KeySecret.objects.create(key=key, **made, **fields), token)


def make_tenant(slug: str = "acme", tier: str = "vip", **fields: Any) -> Tenant:
    row, _ = Tier.objects.get_or_create(name=tier)
    return Tenant.objects.create(slug=slug, name=slug.title(), tier=row, **fields)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def acme(db: None) -> Tenant:
    return make_tenant("acme", "vip")


@pytest.fixture
def globex(db: None) -> Tenant:
    return make_tenant("globex", "free")


@pytest.fixture
async def database(transactional_db: None) -> AsyncIterator[DatabaseThread]:
    """Database calls of the test, beside the loop."""
    thread = DatabaseThread("test")
    yield thread
    await thread.aclose()


def empty_ledger() -> None:
    """What no code of the product does: the rows of all times go, past the guard of the ledger."""
    everything = {"kept_since": datetime.max.replace(tzinfo=UTC), "removing": True}
    Retention.objects.update_or_create(pk=ONLY_ROW, defaults=everything)
    UsageRecord.objects.all()._raw_delete("default")
    Retention.objects.all().delete()


Issue = Callable[..., Issued]
