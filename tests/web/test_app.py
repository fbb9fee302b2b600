"""Routes, envelopes, access, and the operators' part of the data plane, on raw ASGI."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness_web.openai import app, operator
from scheduler.gateway import ConfigConflict, ConfigDocument, ConfigError
from tenants.auth import AddressRefusedError, AuthUnavailableError, TenantSuspendedError
from tests.web.cast import Stage, words

CHAT = "/v1/chat/completions"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "param"),
    [
        ("POST", CHAT, b'{"model":', {}, 400, None),
        ("POST", CHAT, b"[]", {}, 400, None),
        ("POST", CHAT, {"messages": BODY["messages"]}, {}, 400, "model"),
        ("POST", CHAT, {**BODY, "temperature": "hot"}, {}, 400, "temperature"),
        ("POST", CHAT, {**BODY, "messages": [{"role": "x", "content": "y"}]}, {}, 400, "messages[0].role"),
        ("POST", CHAT, {**BODY, "model": "no-such"}, {}, 404, "model"),
        ("GET", "/v1/nonsense", None, {}, 404, None),
        ("GET", "/v1", None, {}, 404, None),
        ("GET", "/v1/models/no-such", None, {}, 404, "model"),
        ("GET", CHAT, None, {}, 405, None),
        ("DELETE", "/v1/models", None, {}, 405, None),
        ("POST", CHAT, b"model=demo", {"content-type": "text/plain"}, 415, None),
    ],
)
async def test_every_failure_is_the_same_envelope(
    stage: Stage, method: str, path: str, body: Any, headers: dict[str, str], status: int, param: str | None
) -> None:
    """FR-038."""
    reply = await stage.ask(method, path, body, headers=headers)
    assert (reply.status, reply.error["param"]) == (status, param)
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"].startswith("req_")
    assert reply.headers["x-should-retry"] == "false"
    assert stage.scheduler.submits == []


async def test_a_body_that_is_too_large_is_read_to_its_end_and_refused(stage: Stage) -> None:
    parts = [b" " * 1024 * 1024] * 17
    reply = await stage.ask("POST", CHAT, parts=parts)
    assert (reply.status, reply.error["code"], reply.headers["connection"]) == (413, "request_body_too_large", "close")


async def test_an_unhandled_fault_is_an_envelope_without_its_text(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-038."""

    async def broken(*_: object) -> None:
        raise RuntimeError("SELECT secret FROM table")

    monkeypatch.setitem(app.ROUTES, "/v1/models", {"GET": broken})
    reply = await stage.ask("GET", "/v1/models")
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "secret" not in reply.body.decode()
    assert reply.headers["x-request-id"] in caplog.text


async def test_allow_names_the_methods(stage: Stage) -> None:
    assert (await stage.ask("GET", CHAT)).headers["allow"] == "POST, OPTIONS"
    assert (await stage.ask("POST", "/v1/models")).headers["allow"] == "GET, HEAD, OPTIONS"
    options = await stage.ask("OPTIONS", "/v1/config")
    assert (options.status, options.headers["allow"]) == (204, "GET, POST, HEAD, OPTIONS")
    assert "content-length" not in options.headers


async def test_head_is_get_without_a_body(stage: Stage) -> None:
    got, head = await stage.ask("GET", "/v1/models"), await stage.ask("HEAD", "/v1/models")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(got.body)))


async def test_one_trailing_slash_is_served(stage: Stage) -> None:
    stage.scheduler.script = words("x")
    assert (await stage.ask("POST", CHAT + "/", BODY)).status == 200
    assert (await stage.ask("POST", CHAT + "//", BODY)).status == 404


# --- access ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-wrong"}, {"authorization": "Basic c2stYWNtZQ=="}])
async def test_no_wrong_and_odd_credentials_are_one_401_before_the_body_is_looked_at(
    stage: Stage, headers: dict[str, str]
) -> None:
    """FR-004, FR-006."""
    reply = await stage.ask("POST", CHAT, b"{nonsense", key=None, headers={"cookie": "sessionid=1", **headers})
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert (reply.error["type"], reply.error["param"]) == ("invalid_request_error", None)
    assert reply.headers["www-authenticate"].startswith("Bearer ")
    assert "sk-" not in reply.error["message"]
    assert reply.body == (await stage.ask("POST", CHAT, BODY, key=None)).body


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (AddressRefusedError(), 401, "ip_not_authorized"),
        (TenantSuspendedError(), 403, "account_suspended"),
        (AuthUnavailableError(), 503, "authentication_unavailable"),
    ],
)
async def test_other_failures_of_authentication_are_told_apart(
    stage: Stage, error: Any, status: int, code: str
) -> None:
    stage.keys.known["sk-x"] = error
    reply = await stage.ask("POST", CHAT, BODY, key="sk-x")
    assert (reply.status, reply.error["code"]) == (status, code)
    assert stage.keys.addresses == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/config"), ("POST", "/v1/config"), ("GET", "/v1/queue/status"), ("GET", "/v1/metrics")],
)
async def test_the_operator_plane_needs_the_scope_admin(stage: Stage, method: str, path: str) -> None:
    """FR-006."""
    assert (await stage.ask(method, path, {}, key=None)).status == 401
    reply = await stage.ask(method, path, {})
    assert (reply.status, reply.error["code"]) == (403, "insufficient_permissions")


async def test_an_operators_key_without_the_scope_runs_nothing(stage: Stage) -> None:
    assert (await stage.ask("POST", CHAT, BODY, key="sk-ops")).status == 403


# --- models ---------------------------------------------------------------------------------------------------------


async def test_models_are_those_the_key_may_use(stage: Stage) -> None:
    listed = (await stage.ask("GET", "/v1/models")).json
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["demo", "org/name:tag"]
    assert all(set(model) == {"id", "object", "created", "owned_by"} for model in listed["data"])
    limited = (await stage.ask("GET", "/v1/models", key="sk-globex")).json
    assert [model["id"] for model in limited["data"]] == ["demo"]


async def test_a_model_is_found_by_its_id_even_with_slashes(stage: Stage) -> None:
    for path in ("/v1/models/org/name:tag", "/v1/models/org/name:tag/"):
        assert (await stage.ask("GET", path)).json["id"] == "org/name:tag"


@pytest.mark.parametrize("name", ["no-such", "Demo", "demo ", "../../etc", "x" * 5000])
async def test_an_unknown_model_is_404_and_its_name_is_not_repeated_at_length(stage: Stage, name: str) -> None:
    """FR-041."""
    reply = await stage.ask("POST", CHAT, {**BODY, "model": name})
    assert (reply.status, reply.error["code"], reply.error["type"]) == (404, "model_not_found", "invalid_request_error")
    assert len(reply.error["message"]) < 250


async def test_a_model_outside_the_keys_list_looks_like_one_that_does_not_exist(stage: Stage) -> None:
    """FR-006."""
    body = {**BODY, "model": "org/name:tag"}
    hidden = await stage.ask("POST", CHAT, body, key="sk-globex")
    del stage.scheduler.models["org/name:tag"]
    stage.transport.cut()
    await stage.scheduler_is_back()
    assert hidden.body == (await stage.ask("POST", CHAT, body, key="sk-acme")).body


async def test_without_a_scheduler_requests_and_lists_are_503_and_not_404(stage: Stage) -> None:
    """FR-040 f."""
    await stage.scheduler_goes()
    for reply in (await stage.chat(), await stage.ask("GET", "/v1/models")):
        assert (reply.status, reply.error["code"]) == (503, "server_is_overloaded")
        assert int(reply.headers["retry-after"]) >= 1


# --- the operator plane ---------------------------------------------------------------------------------------------


async def test_queue_status_and_metrics_are_the_schedulers(stage: Stage) -> None:
    status = {"policy": "continuous", "tiers": {"vip": {"waiting": 0}}}
    stage.scheduler.answers = {"queue_status": status, "metrics": "harness_up 1\n"}
    assert (await stage.ask("GET", "/v1/queue/status", key="sk-ops")).json == status
    metrics = await stage.ask("GET", "/v1/metrics", key="sk-ops")
    assert (metrics.body, metrics.headers["content-type"]) == (
        b"harness_up 1\n",
        "text/plain; version=0.0.4; charset=utf-8",
    )


async def test_what_the_scheduler_cannot_answer_is_an_envelope(stage: Stage) -> None:
    assert (await stage.ask("GET", "/v1/queue/status", key="sk-ops")).status == 500
    await stage.scheduler_goes()
    assert (await stage.ask("GET", "/v1/queue/status", key="sk-ops")).status == 503


async def test_config_is_read_and_changed_by_parts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def update(partial: Any, **options: Any) -> ConfigDocument:
        calls.append((partial, options))
        return ConfigDocument(8, {"name": "priority"}, {})

    monkeypatch.setattr(operator, "config_document", lambda: ConfigDocument(7, {"name": "continuous"}, {}))
    monkeypatch.setattr(operator, "update_config", update)
    assert (await stage.ask("GET", "/v1/config", key="sk-ops")).json["version"] == 7
    change = {"policy": {"name": "priority"}, "if_version": 7, "reason": "rush hour"}
    assert (await stage.ask("POST", "/v1/config", change, key="sk-ops")).json["version"] == 8
    assert calls == [
        (
            {"policy": {"name": "priority"}},
            {"if_version": 7, "reason": "rush hour", "actor": "key ops/prod", "source_ip": "127.0.0.1"},
        )
    ]


@pytest.mark.parametrize(
    ("raised", "status", "code", "param"),
    [
        (ConfigError("policy.max_batch", "Too small."), 400, "invalid_config", "policy.max_batch"),
        (ConfigConflict(9, {}), 409, "config_conflict", "if_version"),
    ],
)
async def test_a_bad_change_of_config_names_its_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, raised: Exception, status: int, code: str, param: str
) -> None:
    def update(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(operator, "update_config", update)
    reply = await stage.ask("POST", "/v1/config", {}, key="sk-ops")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)


@pytest.mark.parametrize(
    ("field", "value"), [("if_version", "7"), ("if_version", True), ("reason", 5), ("reason", "a\0")]
)
async def test_the_wrapping_of_a_change_is_typed(stage: Stage, field: str, value: Any) -> None:
    reply = await stage.ask("POST", "/v1/config", {field: value}, key="sk-ops")
    assert (reply.status, reply.error["param"]) == (400, field)


# --- health ---------------------------------------------------------------------------------------------------------


async def test_alive_is_not_ready(stage: Stage) -> None:
    ready = await stage.ask("GET", "/readyz", key=None)
    assert (ready.status, ready.json["scheduler"], ready.json["models"]["demo"]) == (200, "connected", "ready")
    await stage.scheduler_goes()
    gone = await stage.ask("GET", "/readyz", key=None)
    assert (gone.status, gone.json) == (503, {"status": "not ready", "scheduler": "not connected", "models": {}})
    assert (await stage.ask("GET", "/healthz", key=None)).status == 200


async def test_a_starting_model_is_not_ready(stage: Stage) -> None:
    stage.scheduler.models = {"demo": "starting"}
    stage.transport.cut()
    await stage.scheduler_is_back()
    assert (await stage.ask("GET", "/readyz", key=None)).status == 503


# --- logs -----------------------------------------------------------------------------------------------------------


async def test_a_request_is_one_line_with_both_ids_and_neither_key_nor_prompt(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="harness.access")
    stage.scheduler.script = words("confidential answer")
    body = {**BODY, "messages": [{"role": "user", "content": "confidential prompt"}]}
    reply = await stage.ask("POST", CHAT, body, headers={"x-client-request-id": "mine-1"})
    (record,) = [record for record in caplog.records if record.name == "harness.access"]
    line = record.msg if isinstance(record.msg, dict) else json.loads(record.getMessage())
    assert (line["request_id"], line["client_request_id"]) == (reply.headers["x-request-id"], "mine-1")
    assert (line["status"], line["tenant"], line["path"]) == (200, "acme", CHAT)
    assert "confidential" not in caplog.text
    assert "sk-acme" not in caplog.text


async def test_a_client_that_left_is_logged_as_such(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """FR-034."""
    caplog.set_level("INFO", logger="harness.access")
    client = stage.open_chat()
    client.leave()
    await client.finish()
    assert [record.msg["status"] for record in caplog.records if record.name == "harness.access"] == [499]
