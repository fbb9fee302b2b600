"""Nobody reaches what is another tenant's: every route, walked as the router has it, by every kind of stranger.

A new route is on none of the lists below and fails the test until somebody has decided who may call it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.apps import apps
from django.contrib.admin import site
from django.http import HttpResponse
from django.urls import URLPattern, get_resolver

from harness_web.asgi import Application, pages
from harness_web.openai.app import ROUTES as DATA_PLANE
from harness_web.openai.app import OpenAIApp
from harness_web.routing import routes as socket_routes
from harness_web.routing import websocket_application
from harness_web.runtime import WebRuntime
from scheduler.models import DeadLetter
from tenants.admin import AuditedAdmin, ReadOnlyAdmin
from tenants.api.caller import Admits
from tenants.api.permissions import IsAdmitted, admitted
from tenants.audit import Act
from tenants.ledger import record_usage
from tenants.models import Adjustment, KeySecret, UsageRecord
from tests.tenants.conftest import issue
from tests.tenants.test_ledger import NOON, ROW
from tests.web.cast import Client
from tests.web.people import KeyClient, NoGateway, People, fresh_authenticator, gather
from tests.web.test_console_socket import Socket

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

# --- who may call what ----------------------------------------------------------------------------------------------

PUBLIC = {
    "",
    "setup/<str:token>/",
    "appearance/theme/",
    "appearance/language/",
    "accounts/login/",
    "accounts/logout/",
    "accounts/inactive/",
    "favicon.ico",
    "api/schema/",
    "api/docs/",
    "api/",  # everything else under it: the 404
    "admin/login/",
    "admin/logout/",
}
OWN_ACCOUNT = {"accounts/password/change/"}
OPERATORS_PAGES = {"console/", "console/overview.json"}
TENANT = {
    "api/v1/tenants",
    "api/v1/tenants/<str:slug>",
    "api/v1/memberships",
    "api/v1/tiers",
    "api/v1/tiers/<str:name>",
    "api/v1/keys",
    "api/v1/keys/<int:key_id>",
    "api/v1/keys/<int:key_id>/rotate",
    "api/v1/keys/<int:key_id>/revoke",
    "api/v1/keys/<int:key_id>/enable",
    "api/v1/adjustments",
    "api/v1/audit",
    "api/v1/audit/export.json",
    "api/v1/audit/export.csv",
    "api/v1/usage",
    "api/v1/usage/records.csv",
    "api/v1/usage/records.json",
    "api/v1/requests/<str:request_id>/trace",
}
OPERATOR = {
    "api/v1/dead-letters",
    "api/v1/dead-letters/<int:letter_id>/retry",
    "api/v1/dead-letters/<int:letter_id>/discard",
    "api/v1/simulated/requests/<str:request_id>",
}
# The administration checks in one place who is staff; each of its routes is tried all the same.
ADMINISTRATION = "admin/"

DATA_PLANE_PUBLIC = {"/healthz", "/readyz"}
DATA_PLANE_KEYS = {"/v1/chat/completions", "/v1/models", "/v1/models/…", "/v1/limits"}
DATA_PLANE_OPERATOR = {"/v1/config", "/v1/queue/status", "/v1/metrics"}

SOCKETS = {"ws/console/": ("overview",)}  # for operators; the topics that a socket knows


@dataclass(frozen=True)
class Route:
    pattern: str
    view: Any

    @property
    def is_api(self) -> bool:
        return self.pattern.startswith("api/v1/")

    @property
    def is_administration(self) -> bool:
        return self.pattern.startswith(ADMINISTRATION) and self.pattern not in PUBLIC

    def path(self, fill: dict[str, Any]) -> str:
        """The address with every parameter filled in. A parameter that nobody has thought of is a KeyError."""
        plain = re.sub(r"\^?\(\?P<(\w+)>[^)]*\)/?\$?", r"<\1>", self.pattern)
        return "/" + re.sub(r"<(?:\w+:)?(\w+)>", lambda found: str(fill[found[1]]), plain)


def walk(patterns: list[Any], prefix: str = "") -> Iterator[Route]:
    for pattern in patterns:
        route = prefix + str(pattern.pattern)
        if isinstance(pattern, URLPattern):
            yield Route(route, pattern.callback)
        else:
            yield from walk(pattern.url_patterns, route)


ROUTES = list(walk(get_resolver().url_patterns))
API = [route for route in ROUTES if route.is_api]


def test_fr_077_every_route_is_on_one_list() -> None:
    """FR-077: deny by default; protection by prefix alone will miss one."""
    lists = [PUBLIC, OWN_ACCOUNT, OPERATORS_PAGES, TENANT, OPERATOR]
    listed = [pattern for each in lists for pattern in each]
    assert len(listed) == len(set(listed))
    walked = {route.pattern for route in ROUTES if not route.is_administration}
    assert walked == set(listed)
    data_plane = [*DATA_PLANE_PUBLIC, *DATA_PLANE_KEYS, *DATA_PLANE_OPERATOR]
    assert sorted(data_plane) == sorted(DATA_PLANE)
    assert {str(route.pattern) for route in socket_routes[:-1]} == set(SOCKETS)


@pytest.mark.parametrize("route", API, ids=lambda route: route.pattern)
def test_a_route_of_the_api_admits_whom_its_list_says(route: Route) -> None:
    kind = route.view.view_class
    assert kind.permission_classes == [IsAdmitted]
    assert [each.__name__ for each in kind.authentication_classes] == ["KeyAuthentication", "SessionCaller"]
    methods = [method for method in METHODS if hasattr(kind, method.lower()) and method != "OPTIONS"]
    admits = [admitted(kind(), method) for method in methods]
    assert methods and all(isinstance(each, Admits) for each in admits)
    if route.pattern in OPERATOR:
        assert all(each is not None and each.scopes == {"admin"} and not each.roles for each in admits)


def test_everything_in_the_administration_is_audited_or_read_only() -> None:
    loose = [kind for kind in site._registry.values() if not isinstance(kind, AuditedAdmin | ReadOnlyAdmin)]
    assert [admin.opts.label for admin in loose] == []


# --- the site, its strangers, and what they must not see ------------------------------------------------------------


@dataclass
class Stranger:
    name: str
    client: KeyClient
    token: str | None = None

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        return await self.client.call(method, path, self.token, body)


@dataclass
class Site:
    people: People
    strangers: dict[str, Stranger]
    theirs: dict[str, Any]  # parameters that name what is acme's
    nothing: dict[str, Any]  # parameters of the same shape that name nothing

    def stored(self) -> str:
        """What acme has, and who may do what. `last_used_at` moves with the strangers' own keys."""
        tables = [model for model in apps.get_models() if model._meta.app_label in ("tenants", "scheduler", "auth")]
        rows = {
            model.__name__: [
                {name: value for name, value in row.items() if name not in ("last_used_at", "last_login")}
                for row in model._base_manager.order_by("pk").values()
            ]
            for model in tables
        }
        return json.dumps(rows, default=str)


SECRET_WORDS = ("acme", "Acme", "ann", "devs", "req_acme")


def furnish() -> tuple[People, dict[str, Any], dict[str, Any]]:
    """acme with something of every kind: key, usage, dead letter, event of the audit log."""
    people = gather()
    acme, key = people.acme, people.acme_key.key
    record_usage([replace(ROW, request_id="req_acme", tenant_id=str(acme.pk), key_id=str(key.pk))])
    letter = DeadLetter.objects.create(
        request_id="req_acme",
        tenant_id=str(acme.pk),
        tenant_slug="acme",
        key_id=str(key.pk),
        tier="vip",
        model="demo",
        cause="waited_too_long",
        submitted_at=datetime.now(UTC),
        died_at=datetime.now(UTC),
    )
    Adjustment.objects.create(
        tenant_id=str(acme.pk),
        tenant_slug="acme",
        starts_at=NOON,
        ends_at=NOON + timedelta(days=1),
        amount=Decimal("-1.5"),
        currency="USD",
        reason="acme was right",
        author="user fay",
    )
    Act("user ann").note("change", acme, None, None)
    theirs = {
        "slug": "acme",
        "name": "vip",
        "key_id": key.pk,
        "letter_id": letter.pk,
        "request_id": "req_acme",
        "object_id": key.pk,
        "id": people.ann.user.pk if people.ann.user else 0,
        "content_type_id": 1,
        "token": "guess",
        "app_label": "tenants",
        "url": "tenants/apikey/nowhere",
    }
    nothing = {"slug": "nobody", "name": "none", "key_id": 987654, "letter_id": 987654, "request_id": "req_none"}
    return people, theirs, nothing


@pytest.fixture
async def place(transactional_db: None) -> AsyncIterator[Site]:
    people, theirs, nothing = await sync_to_async(furnish)()
    authenticator = fresh_authenticator()

    def stranger(name: str, user: Any = None, token: str | None = None) -> Stranger:
        return Stranger(name, KeyClient(authenticator, user), token)

    def gather_strangers() -> dict[str, Stranger]:
        usage = issue(people.globex, "books", scopes=["usage"])
        found = [
            stranger("owner", people.gus.user),
            stranger("developer", people.gil.user),
            stranger("inference key", token=people.globex_key.token),
            stranger("usage key", token=usage.token),
            stranger("outsider"),
        ]
        return {one.name: one for one in found}

    yield Site(people, await sync_to_async(gather_strangers)(), theirs, nothing)
    await authenticator.aclose()


STRANGERS = ("owner", "developer", "inference key", "usage key")
BODIES: tuple[dict[str, Any], ...] = (
    {},
    {"reason": "mine now", "tenant": "acme", "slug": "acme", "name": "x", "limits": {"rpm": 1}},
    {"name": "stolen", "tenant": "acme", "scopes": ["inference"]},
    {"scopes": ["admin"], "limits": {}},
    {"role": "operator"},
)


async def text_of(answer: HttpResponse) -> str:
    if getattr(answer, "streaming", False):
        return b"".join([part async for part in answer.streaming_content]).decode()  # type: ignore[attr-defined]
    return answer.content.decode()


@pytest.mark.parametrize("name", STRANGERS)
async def test_fr_075_what_is_another_tenants_is_not_there(place: Site, name: str) -> None:
    """FR-075: 404 or 403, the same body as for an id that does not exist, and nothing is changed."""
    stranger = place.strangers[name]
    before = await sync_to_async(place.stored)()
    for route in API:
        for method in METHODS:
            for body in (None,) if method in ("GET", "OPTIONS") else BODIES:
                foreign = await stranger.call(method, route.path(place.theirs), body)
                where = f"{method} {route.pattern} {body}"
                if "<" in route.pattern:
                    assert foreign.status_code in (403, 404, 405, 400), where
                    missing = await stranger.call(method, route.path(place.nothing), body)
                    assert (missing.status_code, missing.content) == (foreign.status_code, foreign.content), where
                    assert foreign.status_code != 400 or method != "GET", where
                elif route.pattern in OPERATOR:
                    assert foreign.status_code in (403, 405), where
                elif method != "GET":
                    assert foreign.status_code in (400, 403, 404, 405), where
                else:
                    assert foreign.status_code in (200, 403), where
                shown = await text_of(foreign)
                assert not any(word in shown for word in SECRET_WORDS), f"{where}: {shown}"
    assert await sync_to_async(place.stored)() == before


FOREIGN_FILTERS = (
    "keys?tenant=acme",
    "keys?owner=dev",
    "tenants?slug=acme",
    "memberships?tenant=acme",
    "memberships?user=ann",
    "audit?tenant=acme",
    "audit?object=acme",
    "audit?who=ann",
    "audit?text=acme",
    "audit?text=' OR 1=1 --",
    "audit/export.json?tenant=acme",
    "usage?tenant=acme&start_time=0",
    "usage?tenant=acme&start_time=0&group_by=tenant,key",
    "usage/records.json?tenant=acme&start_time=0",
    "adjustments?tenant=acme",
)


@pytest.mark.parametrize("name", STRANGERS)
async def test_a_foreign_filter_finds_nothing(place: Site, name: str) -> None:
    stranger = place.strangers[name]
    for path in FOREIGN_FILTERS:
        answer = await stranger.call("GET", path)
        shown = json.loads(await text_of(answer))
        if answer.status_code != 403:
            assert answer.status_code == 200 and (shown["data"] if isinstance(shown, dict) else shown) == [], path
            assert not isinstance(shown, dict) or shown.get("adjustments", []) == [], path


async def test_an_outsider_is_asked_for_credentials_by_every_route(place: Site) -> None:
    outsider = place.strangers["outsider"]
    before = await sync_to_async(place.stored)()
    for route in API:
        for method in METHODS:
            answer = await outsider.call(method, route.path(place.theirs), None if method == "GET" else {})
            assert answer.status_code == 401, f"{method} {route.pattern}"
            assert answer.json()["error"]["code"] == "invalid_api_key" and answer.headers["www-authenticate"]
    assert await sync_to_async(place.stored)() == before


@pytest.mark.parametrize("name", ["owner", "developer", "inference key", "usage key", "outsider"])
async def test_pages_of_operators_are_for_operators(place: Site, name: str) -> None:
    """Every page that is not public, the whole administration among them."""
    stranger = place.strangers[name]
    before = await sync_to_async(place.stored)()
    pages = [route for route in ROUTES if route.is_administration or route.pattern in OPERATORS_PAGES]
    assert len(pages) > 100
    for route in pages:
        for method in ("GET", "POST", "DELETE"):
            answer = await stranger.call(method, route.path(place.theirs), None if method == "GET" else {})
            away = answer.headers.get("Location", "")
            sent_away = answer.status_code == 302 and "login/?next=" in away
            assert sent_away or answer.status_code in (403, 404, 405), (
                f"{method} {route.pattern}: {answer.status_code} {away}"
            )
    assert await sync_to_async(place.stored)() == before


@pytest.mark.parametrize(("name", "code"), [("owner", 4403), ("developer", 4403), ("outsider", 4401)])
async def test_sockets_tell_strangers_nothing(place: Site, name: str, code: int) -> None:
    cookies = place.strangers[name].client.cookies
    for path, topics in SOCKETS.items():
        for topic in (*topics, "acme"):
            socket = Socket(f"/{path}", "http://localhost", cookies)
            assert await socket.connect()
            await socket.say({"type": "subscribe", "topic": topic})
            assert await socket.close_code() == code
            await socket.disconnect()


async def test_nothing_stored_of_a_secret_is_in_any_answer_to_anybody(place: Site) -> None:
    """FR-075: lists for operators and owners, too, hold neither digests nor hashes of passwords."""
    people = place.people
    digests = await sync_to_async(lambda: list(KeySecret.objects.values_list("digest", flat=True)))()
    await sync_to_async(people.ann.user.set_password)("correct horse battery")  # type: ignore[union-attr]
    await sync_to_async(people.ann.user.save)()  # type: ignore[union-attr]
    hashes = [people.ann.user.password] if people.ann.user else []
    tokens = [people.acme_key.token, people.globex_key.token, people.dev_key.token]
    for user in (people.olga.user, people.gus.user):
        client = Stranger("somebody", await sync_to_async(KeyClient)(fresh_authenticator(), user))
        for route in API:
            shown = await text_of(await client.call("GET", route.path(place.theirs)))
            assert not any(secret in shown for secret in (*digests, *hashes, *tokens)), route.pattern


async def test_nobody_raises_their_own_role(place: Site) -> None:
    before = await sync_to_async(place.stored)()
    developer = place.strangers["developer"]
    for path in ("me", "memberships", "memberships/1", "users/1", "tenants/globex/memberships", "tenants/globex"):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            answer = await developer.call(method, path, {"role": "owner"})
            assert answer.status_code in (400, 403, 404, 405), f"{method} {path}"
    assert await sync_to_async(place.stored)() == before


# --- usage ----------------------------------------------------------------------------------------------------------


def requests_seen(answer: Any) -> int:
    document = answer.json()
    return sum(result["num_requests"] for bucket in document["data"] for result in bucket["results"])


async def test_fr_076_usage_is_counted_from_who_asks_and_not_from_what_they_ask(place: Site) -> None:
    """FR-076: a member sees their own keys' requests, an owner the tenant's, an operator all, an inference key none."""
    people = place.people

    def use() -> None:
        third = issue(people.acme, "third")
        for tenant, key, count in (
            (people.acme, people.acme_key, 29),  # and one that is there
            (people.acme, people.dev_key, 13),
            (people.acme, third, 7),
            (people.globex, people.globex_key, 70),
        ):
            rows = [
                replace(ROW, request_id=f"r-{key.key.pk}-{number}", tenant_id=str(tenant.pk), tenant_slug=tenant.slug,
                        key_id=str(key.key.pk), key_name=key.key.name)
                for number in range(count)
            ]  # fmt: skip
            record_usage(rows)

    await sync_to_async(use)()
    authenticator = fresh_authenticator()
    books = await sync_to_async(issue)(people.acme, "books", scopes=["usage"])
    span = "start_time=0&end_time=4000000000"
    callers = [
        (Stranger("member", await sync_to_async(KeyClient)(authenticator, people.dev.user)), 13),
        (Stranger("owner", await sync_to_async(KeyClient)(authenticator, people.ann.user)), 50),
        (Stranger("operator", await sync_to_async(KeyClient)(authenticator, people.olga.user)), 120),
        (Stranger("finance", await sync_to_async(KeyClient)(authenticator, people.fay.user)), 120),
        (Stranger("usage key", KeyClient(authenticator), books.token), 50),
    ]
    for caller, expected in callers:
        for grouping in ("", "&group_by=tenant", "&group_by=tenant,key,model,tier"):
            answer = await caller.call("GET", f"usage?{span}{grouping}")
            assert requests_seen(answer) == expected, caller.name
        rows = json.loads(await text_of(await caller.call("GET", f"usage/records.json?{span}")))
        lines = (await text_of(await caller.call("GET", f"usage/records.csv?{span}"))).splitlines()
        assert (len(rows), len(lines) - 1) == (expected, expected), caller.name
        foreign = await caller.call("GET", f"usage?{span}&tenant=globex")
        assert requests_seen(foreign) == (70 if caller.name in ("operator", "finance") else 0)
        detail = await caller.call("GET", f"requests/r-{people.globex_key.key.pk}-0/trace")
        assert detail.status_code == {"operator": 200, "finance": 403}.get(caller.name, 404)
        for wrong in ("group_by=password", "order_by=cost", "limit=0", "limit=-1", "limit=1000000"):
            refused = await caller.call("GET", f"usage?{span}&{wrong}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, wrong.split("=")[0]), wrong
    plain = Stranger("inference key", KeyClient(authenticator), people.acme_key.token)
    assert (await plain.call("GET", f"usage?{span}")).status_code == 403
    own = f"requests/r-{people.dev_key.key.pk}-0/trace"
    others = f"requests/r-{people.acme_key.key.pk}-0/trace"
    (member, _), (owner, _) = callers[:2]
    assert [(await member.call("GET", path)).status_code for path in (own, others)] == [200, 404]
    assert [(await owner.call("GET", path)).status_code for path in (own, others)] == [200, 200]
    await authenticator.aclose()


# --- the data plane and what is not there ---------------------------------------------------------------------------

NOT_SERVED = (
    "/metrics", "/docs", "/openapi.json", "/redoc", "/debug", "/health/details", "/tokenize", "/detokenize",
    "/invocations", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/sleep", "/wake_up",
    "/collective_rpc", "/server_info", "/v1/../metrics", "/v1//metrics", "/v1/%2e%2e/metrics", "/v1/metrics;x",
    "/V1/METRICS", "/API/V1/KEYS", "/api/v1/keys/", "/api//v1/keys", "/api/v1/../v1/keys", "/admin;x",
)  # fmt: skip


async def test_fr_077_operational_routes_of_engines_and_tricks_with_paths_lead_nowhere(place: Site) -> None:
    """FR-077: never a 200, whoever asks; what is served says no more than whether it is alive."""
    people = place.people
    authenticator = fresh_authenticator()
    runtime = WebRuntime(None, authenticator, NoGateway())  # type: ignore[arg-type]  # no scheduler
    application = Application(pages, websocket_application, lambda: runtime)
    application._data_plane = OpenAIApp(runtime)
    ops = await sync_to_async(issue)(people.acme, "ops", scopes=["inference", "admin"])
    for token in (None, people.acme_key.token, ops.token):
        for path in NOT_SERVED:
            headers = [(b"host", b"localhost")]
            headers += [(b"authorization", f"Bearer {token}".encode())] if token else []
            for method in ("GET", "POST"):
                scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "query_string": b"",
                         "headers": headers, "client": ("127.0.0.1", 1), "server": ("localhost", 80), "scheme": "http",
                         "state": {"runtime": runtime}}  # fmt: skip
                reply = await Client(application, scope, [b""]).finish()
                assert reply.status in (301, 401, 403, 404, 405), f"{method} {path}"
                assert reply.status != 301 or reply.headers["location"] == path + "/", path
    await authenticator.aclose()
    assert await sync_to_async(UsageRecord.objects.count)() == 1
