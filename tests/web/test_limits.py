"""A tenant sees its limits: `GET /v1/limits`, and every refusal as the wire says it, with the official client too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from harness_web.openai.views import caller
from scheduler.core.types import Reason
from scheduler.gateway import Gateway
from scheduler.wire.memory import MemoryTransport
from scheduler.wire.messages import Limits, LimitState, QueueState
from tenants.limits import EffectiveBudget, EffectiveLimit
from tests.web.cast import Scheduler, Stage, principal, refuses, until
from tests.web.test_headers import UNANSWERED

AT = 1_785_510_000.25  # Unix time: 2026-07-31T15:00:00.25Z
AUGUST = 1_785_510_000 + 31 * 86_400
INSTANT = "2026-08-31T15:00:00Z"  # what AUGUST is


def rpm(model: str = "", *, used: int = 2) -> LimitState:
    return LimitState("tenant", "id-acme", model, "rpm", "requests", "minute", 600, used, 0, 600 - used, AT + 12.5)


def money(used: int, reserved: int, *, limit: int = 25 * 10**10) -> LimitState:
    left = limit - used - reserved
    return LimitState("key", "key-acme", "", "budget", "USD", "month", limit, used, reserved, left, AUGUST)


def queue(model: str = "demo", waiting: int = 3, wait: float | None = 1.5) -> QueueState:
    return QueueState(model, waiting, 2, wait)


BUDGET = EffectiveBudget("key", "key-acme", "", "USD", "month", "Asia/Tokyo", 25 * 10**10, False, ())


def give(stage: Stage, **changes: Any) -> None:
    """Acme's key has these limits, budgets, rights."""
    stage.keys.known["sk-acme"] = replace(principal("acme"), **changes)


# --- GET /v1/limits -------------------------------------------------------------------------------------------------


async def test_a_key_sees_its_limits_budgets_and_queues(stage: Stage) -> None:
    """FR-016: instants are in UTC, and marked as such."""
    give(stage, budgets=(BUDGET,))
    stage.scheduler.answers["limits"] = Limits(AT, (rpm(), money(10_800, 5 * 10**9)), (queue(),))
    reply = await stage.ask("GET", "/v1/limits")
    assert reply.status == 200
    assert reply.json == {
        "at": "2026-07-31T15:00:01Z",
        "tenant": "acme",
        "key": "prod",
        "tier": "vip",
        "limits": [
            {
                "scope": "tenant",
                "model": None,
                "kind": "rpm",
                "unit": "requests",
                "period": "minute",
                "hard": True,
                "limit": 600,
                "used": 2,
                "reserved": 0,
                "remaining": 598,
                "reset_at": "2026-07-31T15:00:13Z",
                "reset_seconds": 12.5,
            },
            {
                "scope": "key",
                "model": None,
                "kind": "budget",
                "unit": "USD",
                "period": "month",
                "hard": False,
                "limit": "25",
                "used": "0.00000108",
                "reserved": "0.5",
                "remaining": "24.49999892",
                "reset_at": INSTANT,
                "reset_seconds": AUGUST - AT,
            },
        ],
        "queues": [{"model": "demo", "waiting": 3, "running": 2, "expected_wait": 1.5}],
    }


async def test_a_key_asks_for_nobody_but_itself(stage: Stage) -> None:
    stage.scheduler.answers["limits"] = Limits(AT, (rpm(),), ())
    for key, tenant in (("sk-acme", "acme"), ("sk-globex", "globex")):
        assert (await stage.ask("GET", "/v1/limits", key=key)).json["tenant"] == tenant
        asked = stage.scheduler.asks[-1].args["caller"]
        other = "globex" if tenant == "acme" else "acme"
        assert f"id-{tenant}" in str(asked) and other not in str(asked)


async def test_models_that_the_key_may_not_use_are_not_named(stage: Stage) -> None:
    limits = tuple(EffectiveLimit("tenant", "id-acme", model, "rpm", 600) for model in ("", "demo", "org/name:tag"))
    give(stage, limits=limits, budgets=(replace(BUDGET, model="org/name:tag"),), models=("demo",))
    stage.scheduler.answers["limits"] = Limits(AT, (rpm(), rpm("demo")), (queue(), queue("org/name:tag")))
    reply = await stage.ask("GET", "/v1/limits")
    assert [limit["model"] for limit in reply.json["limits"]] == [None, "demo"]
    assert "org/name:tag" not in str(stage.scheduler.asks[-1].args) + reply.body.decode()


async def test_it_takes_a_key_that_may_infer(stage: Stage) -> None:
    stage.scheduler.answers["limits"] = Limits(AT, (rpm(),), ())
    statuses = [(await stage.ask("GET", "/v1/limits", key=key)).status for key in ("sk-acme", "sk-ops", "sk-no", None)]
    assert statuses == [200, 403, 401, 401]


async def test_what_is_not_known_is_503_and_no_part_of_it_is_shown(stage: Stage) -> None:
    stage.scheduler.answers["limits"] = Limits(AT, unavailable="What is left cannot be checked.")
    unknown = await stage.ask("GET", "/v1/limits")
    assert (unknown.status, unknown.error["code"]) == (503, "server_is_overloaded")
    assert (unknown.error["message"], unknown.headers["x-should-retry"]) == ("What is left cannot be checked.", "true")
    await stage.scheduler_goes()
    assert (await stage.ask("GET", "/v1/limits")).status == 503


async def test_the_answers_of_two_schedulers_are_one() -> None:
    transport, schedulers = MemoryTransport(), {"a": Scheduler(), "b": Scheduler()}
    for (address, scheduler), used in zip(schedulers.items(), (5, 7), strict=True):
        scheduler.models = {address: "ready"}
        await scheduler.start(transport, address)
        limits = (rpm(used=used), money(10**10, used))
        scheduler.answers["limits"] = Limits(AT, limits, (queue(wait=used), queue(address, 1, None)))
    gateway = Gateway(lambda: schedulers, "web", transport)
    await gateway.start()
    try:
        await until(lambda: set(gateway.models()) == {"a", "b"})
        answer = await gateway.limits(caller(principal("acme")))
        assert [(one.used, one.reserved) for one in answer.limits] == [(12, 0), (10**10, 12)]
        assert [one.remaining for one in answer.limits] == [588, 24 * 10**10 - 12]
        queues = [(one.model, one.waiting, one.running, one.expected_wait) for one in answer.queues]
        assert queues == [("a", 1, 2, None), ("b", 1, 2, None), ("demo", 6, 4, 5.0)]
    finally:
        await gateway.aclose()
        for scheduler in schedulers.values():
            await scheduler.stop()


# --- refusals -------------------------------------------------------------------------------------------------------

INVALID = "invalid_request_error"
QUOTA = "insufficient_quota"
OVERLOADED = (503, "service_unavailable_error", "server_is_overloaded", openai.InternalServerError)
RATE = (429, "rate_limit_error", "rate_limit_exceeded", openai.RateLimitError)
WAIT = 6.2  # seconds, of a refusal that says how long

# Status, type, code, the client's exception, and whether the same request may succeed by itself.
REFUSALS: dict[Reason, tuple[int, str, str, type[openai.APIStatusError], bool]] = {
    Reason.CONTEXT_LENGTH: (400, INVALID, "context_length_exceeded", openai.BadRequestError, False),
    Reason.NEVER_FITS: (400, INVALID, "request_too_large", openai.BadRequestError, False),
    Reason.LIMIT_TOO_LARGE: (400, INVALID, "request_too_large", openai.BadRequestError, False),
    Reason.TIER_NOT_ALLOWED: (400, INVALID, "service_tier_not_allowed", openai.BadRequestError, False),
    Reason.INVALID_PROMPT: (400, INVALID, "invalid_prompt", openai.BadRequestError, False),
    Reason.MODEL_NOT_SERVED: (404, INVALID, "model_not_found", openai.NotFoundError, False),
    Reason.LIMIT_RPM: (*RATE, True),
    Reason.LIMIT_TPM: (*RATE, True),
    Reason.LIMIT_CONCURRENCY: (*RATE, True),
    Reason.LIMIT_KEY_SPEND: (429, QUOTA, "project_spend_limit_exceeded", openai.RateLimitError, False),
    Reason.LIMIT_KEY_TOKENS: (429, QUOTA, "project_usage_limit_exceeded", openai.RateLimitError, False),
    Reason.LIMIT_TENANT_SPEND: (429, QUOTA, "organization_spend_limit_exceeded", openai.RateLimitError, False),
    Reason.LIMIT_TENANT_TOKENS: (429, QUOTA, "organization_usage_limit_exceeded", openai.RateLimitError, False),
    Reason.NO_PRICE: (503, "service_unavailable_error", "model_not_priced", openai.InternalServerError, False),
    Reason.QUEUE_FULL: (*OVERLOADED, True),
    Reason.ENGINE_NOT_READY: (*OVERLOADED, True),
    Reason.DRAINING: (*OVERLOADED, True),
    Reason.SPOOL_UNAVAILABLE: (*OVERLOADED, True),
    Reason.BUDGET_UNAVAILABLE: (*OVERLOADED, True),
    Reason.DEADLINE_INFEASIBLE: (*OVERLOADED, True),
    Reason.DEADLINE_UNREACHABLE: (
        503,
        "service_unavailable_error",
        "deadline_unreachable",
        openai.InternalServerError,
        False,
    ),
    Reason.DEGRADED: (*OVERLOADED, True),
    Reason.QUEUE_TIMEOUT: (*OVERLOADED, True),
}


def test_every_reason_for_a_refusal_is_in_the_list() -> None:
    failures = {Reason.ENGINE_FAILED, Reason.REQUEST_FAILED, Reason.SHUTDOWN}  # ends of what has begun
    assert set(REFUSALS) == set(Reason) - UNANSWERED - failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", REFUSALS, ids=str)
async def test_a_refusal_is_what_the_wire_and_the_official_client_expect(
    stage: Stage, reason: Reason, stream: bool
) -> None:
    status, type_, code, exception, retry = REFUSALS[reason]
    left = {"limit-requests": 600.0, "remaining-requests": 0.0, "reset-requests": WAIT}
    stage.scheduler.script = refuses(reason, limits=left, retry_after=WAIT)
    transport = httpx.ASGITransport(stage.app)
    async with openai.AsyncOpenAI(
        base_url="http://harness/v1",
        api_key="sk-acme",
        max_retries=0 if retry else 2,
        http_client=httpx.AsyncClient(transport=transport),
    ) as client:
        with pytest.raises(exception) as caught:
            await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "hi"}], stream=stream
            )
    assert len(stage.scheduler.submits) == 1  # what no retry can help is sent once, by a client that would retry
    error, headers = caught.value, caught.value.response.headers
    assert (error.status_code, error.type, error.code) == (status, type_, code)
    assert headers["x-should-retry"] == ("true" if retry else "false")
    waits = (headers.get("retry-after"), headers.get("retry-after-ms"))
    assert waits == (("7", "6200") if retry else (None, None))
    if reason is not Reason.MODEL_NOT_SERVED:  # the same answer as for a model that the key may not use
        shown = [headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")]
        assert shown == ["600", "0", "6.2s"]
