"""The operators' views, for keys with the scope `admin`, and the health of this process for probes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from harness_web.openai.access import authenticate
from harness_web.openai.errors import ApiError, InvalidRequest
from harness_web.openai.exchange import Exchange
from harness_web.openai.headers import Header
from harness_web.openai.schema import parse_object
from harness_web.runtime import WebRuntime
from scheduler.gateway import (
    AskError,
    ConfigConflict,
    ConfigDocument,
    ConfigError,
    GatewayUnavailable,
    config_document,
    update_config,
)
from tenants.documents import is_storable

PROMETHEUS: Header = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


async def read_config(exchange: Exchange, runtime: WebRuntime) -> None:
    await authenticate(exchange, runtime, "admin")
    await exchange.respond(200, msgspec.json.encode((await runtime.database.run(config_document)).as_json()))


async def change_config(exchange: Exchange, runtime: WebRuntime) -> None:
    principal = await authenticate(exchange, runtime, "admin")
    partial = parse_object(await exchange.json_body())
    change = partial_change(partial, actor=f"key {principal.tenant_slug}/{principal.key_name}", ip=exchange.client_ip)
    try:
        document = await runtime.database.run(change)
    except ConfigError as error:
        raise ApiError("invalid_config", str(error), param=error.path) from None
    except ConfigConflict as error:
        raise ApiError("config_conflict", str(error), param="if_version") from None
    await exchange.respond(200, msgspec.json.encode(document.as_json()))


async def queue_status(exchange: Exchange, runtime: WebRuntime) -> None:
    await authenticate(exchange, runtime, "admin")
    await exchange.respond(200, msgspec.json.encode(await _ask(runtime, "queue_status")))


async def metrics(exchange: Exchange, runtime: WebRuntime) -> None:
    await authenticate(exchange, runtime, "admin")
    text: str = await _ask(runtime, "metrics")
    await exchange.respond(200, text.encode(), content_type=PROMETHEUS)


async def alive(exchange: Exchange, runtime: WebRuntime) -> None:
    await exchange.respond(200, b'{"status":"ok"}')


async def ready(exchange: Exchange, runtime: WebRuntime) -> None:
    """200 when a request could be answered: a scheduler is connected and one of its models is ready."""
    connected, models = runtime.gateway.connected(), runtime.gateway.models()
    good = connected and "ready" in models.values()
    report = {
        "status": "ready" if good else "not ready",
        "scheduler": "connected" if connected else "not connected",
        "models": models,
    }
    await exchange.respond(200 if good else 503, msgspec.json.encode(report))


def partial_change(partial: dict[str, Any], *, actor: str, ip: str | None) -> Callable[[], ConfigDocument]:
    """The change that a body asks for: any part of the document, with `if_version` and `reason` beside it."""
    if_version, reason = partial.pop("if_version", None), partial.pop("reason", None)
    if if_version is not None and type(if_version) is not int:
        raise InvalidRequest("'if_version' must be an integer.", "if_version", reason="invalid_type")
    if not isinstance(reason, str | None):
        raise InvalidRequest("'reason' must be a string.", "reason", reason="invalid_type")
    if not is_storable(reason or ""):
        raise InvalidRequest("'reason' cannot hold the character NUL or half a surrogate pair.", "reason")
    return functools.partial(
        update_config, partial, if_version=if_version, reason=reason or "", actor=actor, source_ip=ip
    )


async def _ask(runtime: WebRuntime, what: str) -> Any:
    try:
        return await runtime.gateway.ask(what)
    except GatewayUnavailable:
        raise ApiError("scheduler_lost", "The scheduler is not connected; try again shortly.") from None
    except AskError as error:
        raise ApiError("internal", f"The scheduler could not answer '{what}'.") from error
