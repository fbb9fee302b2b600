"""The cast of the management API's tests: two tenants with an owner, a developer and keys each, an operator, nobody.

People call with sessions, over Django's test client; keys over ASGI, where the authenticator of the process is.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User
from django.test import AsyncClient, Client

from harness_web.runtime import WebRuntime
from scheduler.gateway import GatewayUnavailable
from tenants.auth import Authenticator
from tenants.models import Membership, Tenant, Tier
from tests.tenants.conftest import Issued, issue

API = "/api/v1/"
Role = Membership.Role


@dataclass
class Person:
    """Somebody who is signed in, or, without a user, who is not."""

    user: User | None
    client: Client

    def call(self, method: str, path: str, body: Any = None) -> Any:
        return self.client.generic(
            method,
            path if path.startswith("/") else API + path,
            "" if body is None else json.dumps(body),
            content_type="application/json",
        )

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def post(self, path: str, body: Any = None) -> Any:
        return self.call("POST", path, {} if body is None else body)

    def patch(self, path: str, body: Any) -> Any:
        return self.call("PATCH", path, body)

    def delete(self, path: str) -> Any:
        return self.call("DELETE", path)


def person(name: str, *roles: tuple[str, Tenant | None]) -> Person:
    user = User.objects.create_user(name)
    for role, tenant in roles:
        Membership.objects.create(user=user, role=role, tenant=tenant)
    client = Client()
    client.force_login(user)
    return Person(user, client)


@dataclass
class People:
    """acme is the victim of every attack, globex where they come from."""

    acme: Tenant
    globex: Tenant
    olga: Person  # operator
    fay: Person  # finance
    ann: Person  # acme's owner
    dev: Person  # acme's developer
    gus: Person  # globex' owner
    gil: Person  # globex' developer
    nobody: Person
    acme_key: Issued
    dev_key: Issued
    globex_key: Issued


def gather() -> People:
    vip, free = (Tier.objects.create(name=name, rank=rank) for rank, name in enumerate(("vip", "free"), start=1))
    acme = Tenant.objects.create(slug="acme", name="Acme", tier=vip)
    globex = Tenant.objects.create(slug="globex", name="Globex", tier=free)
    dev = person("dev", (Role.DEVELOPER, acme))
    return People(
        acme=acme,
        globex=globex,
        olga=person("olga", (Role.OPERATOR, None)),
        fay=person("fay", (Role.FINANCE, None)),
        ann=person("ann", (Role.OWNER, acme)),
        dev=dev,
        gus=person("gus", (Role.OWNER, globex)),
        gil=person("gil", (Role.DEVELOPER, globex)),
        nobody=Person(None, Client()),
        acme_key=issue(acme, "prod"),
        dev_key=issue(acme, "devs", owner=dev.user),
        globex_key=issue(globex, "prod"),
    )


class ProcessClient(AsyncClient):
    """Django's client, whose requests find the runtime of a web process as the server puts it there."""

    def __init__(self, runtime: WebRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def _base_scope(self, **request: Any) -> dict[str, Any]:
        scope: dict[str, Any] = super()._base_scope(**request)  # type: ignore[misc]  # not in the stubs
        return scope | {"state": {"runtime": self._runtime}}


class NoGateway:
    """A web process that no scheduler is connected to."""

    async def ask(self, what: str, **args: Any) -> Any:
        raise GatewayUnavailable("no scheduler")

    find = ask

    def models(self) -> dict[str, str]:
        return {}

    def connected(self) -> bool:
        return False


class KeyClient:
    """Calls with keys, or with the session of `user`, as a web process without a scheduler answers them."""

    def __init__(self, authenticator: Authenticator, user: User | None = None) -> None:
        runtime = WebRuntime(None, authenticator, NoGateway())  # type: ignore[arg-type]  # nothing polls
        self._client = ProcessClient(runtime)
        if user is not None:
            self._client.force_login(user)

    @property
    def cookies(self) -> str:
        return "; ".join(f"{name}={morsel.value}" for name, morsel in self._client.cookies.items())

    async def call(self, method: str, path: str, token: str | None, body: Any = None, **headers: str) -> Any:
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        return await self._client.generic(
            method,
            path if path.startswith("/") else API + path,
            "" if body is None else json.dumps(body),
            content_type="application/json",
            headers=headers,
        )


def fresh_authenticator(**options: Any) -> Authenticator:
    """One that is never out of touch with the database."""
    return Authenticator(time.monotonic, **options)
