"""The tenants' views. A view's body is the list of what happens to a request, in order."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from harness_web.openai.access import authenticate
from harness_web.openai.completion import WholeAnswer
from harness_web.openai.errors import ApiError, unknown_model
from harness_web.openai.exchange import Exchange
from harness_web.openai.schema import ChatRequest, parse_chat
from harness_web.openai.sse import StreamedAnswer
from harness_web.runtime import WebRuntime
from scheduler.gateway import BudgetSpec, Caller, Event, LimitSpec, Submit
from tenants.auth import Principal

MODELS_SINCE = 1_767_225_600  # `created` of every model: 2026-01-01, the same on every worker and after every restart
PROJECT_LENGTH = 64  # characters of the tag that the ledger keeps


async def chat_completions(exchange: Exchange, runtime: WebRuntime) -> None:
    principal = await authenticate(exchange, runtime, "inference")
    chat = parse_chat(await exchange.json_body())
    if not principal.allows_model(chat.model):
        raise unknown_model(chat.model)
    events = runtime.gateway.submit(submission(exchange, principal, chat))
    if chat.stream:
        stream = StreamedAnswer(exchange, chat)
        await exchange.unless_gone(relay(events, stream), stream.keep_alive())
    else:
        await exchange.unless_gone(relay(events, WholeAnswer(exchange, chat)))


async def list_models(exchange: Exchange, runtime: WebRuntime) -> None:
    principal = await authenticate(exchange, runtime, None)
    check_connected(runtime)
    models = [model_object(name) for name in sorted(runtime.gateway.models()) if principal.allows_model(name)]
    await exchange.respond(200, msgspec.json.encode({"object": "list", "data": models}))


async def retrieve_model(exchange: Exchange, runtime: WebRuntime) -> None:
    principal = await authenticate(exchange, runtime, None)
    name = exchange.path.removeprefix("/v1/models/").removesuffix("/")
    check_connected(runtime)
    if not principal.allows_model(name) or name not in runtime.gateway.models():
        raise unknown_model(name)
    await exchange.respond(200, msgspec.json.encode(model_object(name)))


async def relay(events: AsyncGenerator[Event, None], answer: StreamedAnswer | WholeAnswer) -> None:
    """Hand every event to the answer. However this ends, the scheduler is told at once."""
    async with aclosing(events):
        async for event in events:
            await answer.take(event)


def check_connected(runtime: WebRuntime) -> None:
    if not runtime.gateway.connected():
        raise ApiError("engine_not_ready", "The scheduler is not connected; try again shortly.")


def model_object(name: str) -> dict[str, str | int]:
    return {"id": name, "object": "model", "created": MODELS_SINCE, "owned_by": "harness"}


def submission(exchange: Exchange, principal: Principal, chat: ChatRequest) -> Submit:
    """The request as the scheduler gets it: entitlements from the key, wishes from the body."""
    return Submit(
        id=exchange.id,
        attempt=1,
        age=exchange.age,
        caller=caller(principal),
        model=chat.model,
        messages=chat.prompt(),
        sampling=chat.sampling(),
        stream=bool(chat.stream),
        priority=chat.priority,
        slo_threshold=chat.slo_threshold,
        queue_timeout=chat.queue_timeout,
        simulate=chat.simulate,
        project=project(exchange.header(b"openai-project")),
        service_tier=chat.service_tier or "",
    )


def project(header: str) -> str:
    """The caller's tag as the ledger can keep it: no database takes every control character.

    Headers are Latin-1 by their standard and UTF-8 by what clients send.
    """
    with contextlib.suppress(UnicodeDecodeError):
        header = header.encode("latin-1").decode()
    return "".join(filter(str.isprintable, header)).strip()[:PROJECT_LENGTH]


def caller(principal: Principal) -> Caller:
    return Caller(
        tenant=principal.tenant_id,
        tenant_slug=principal.tenant_slug,
        key=principal.key_id,
        key_name=principal.key_name,
        tier=principal.tier,
        limits=tuple(
            LimitSpec(limit.scope, limit.owner, limit.model, limit.kind, limit.value) for limit in principal.limits
        ),
        version=principal.version,
        budgets=tuple(
            BudgetSpec(one.scope, one.owner, one.model, one.unit, one.period, one.zone, one.value, one.hard, one.alerts)
            for one in principal.budgets
        ),
    )
