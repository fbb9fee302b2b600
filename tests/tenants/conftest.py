"""The cast: two tenants of two tiers, an outsider's clock, and the database beside the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tenants import keys
from tenants.database import DatabaseThread
from tenants.models import ApiKey, Tenant, Tier


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
    token: str


def issue(tenant: Tenant, name: str = "prod", **fields: Any) -> Issued:
    """A key of `tenant` in the database, with its secret."""
    new = keys.mint()
    key = ApiKey(tenant=tenant, name=name, lookup=new.lookup, digest=new.digest, pepper_version=new.pepper_version)
    for field, value in fields.items():
        setattr(key, field, value)
    key.save()
    return Issued(key, new.token)


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


Issue = Callable[..., Issued]
