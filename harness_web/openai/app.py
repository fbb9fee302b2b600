"""The data plane: what is served under /v1, on one screen, and the last guard around it. Plain ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from harness_web.openai import limits, operator, views
from harness_web.openai.errors import ApiError, ClientGone
from harness_web.openai.exchange import Exchange, Receive, Scope, Send
from harness_web.runtime import WebRuntime

View = Callable[[Exchange, WebRuntime], Awaitable[None]]

ROUTES: dict[str, dict[str, View]] = {
    "/v1/chat/completions": {"POST": views.chat_completions},
    "/v1/models": {"GET": views.list_models},
    "/v1/models/…": {"GET": views.retrieve_model},  # model names may hold slashes
    "/v1/limits": {"GET": limits.read_limits},
    "/v1/config": {"GET": operator.read_config, "POST": operator.change_config},
    "/v1/queue/status": {"GET": operator.queue_status},
    "/v1/metrics": {"GET": operator.metrics},
    "/healthz": {"GET": operator.alive},
    "/readyz": {"GET": operator.ready},
}
HEALTH = ("/healthz", "/readyz")  # asked every second by supervisors and load balancers: no news
NOBODY_THERE = 499  # logged for a client that left before its answer was complete

log = structlog.get_logger("harness.access")


class OpenAIApp:
    """Serves ROUTES; every failure is the OpenAI envelope, every answer carries `x-request-id`."""

    def __init__(self, runtime: WebRuntime) -> None:
        self._runtime = runtime

    @staticmethod
    def serves(path: str) -> bool:
        return path.startswith("/v1/") or path == "/v1" or path in HEALTH

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        status = 0
        try:
            await self._answer(exchange)
        except ClientGone:
            status = NOBODY_THERE
        _log_access(exchange, status or exchange.status)

    async def _answer(self, exchange: Exchange) -> None:
        """Raises ClientGone, and nothing else."""
        try:
            await _dispatch(exchange, self._runtime)
        except ApiError as error:
            await exchange.fail(error)
        except ClientGone:
            raise
        except asyncio.CancelledError:
            # Only the server does this, to what outlasts the grace at its end: a last word, and the task is over.
            await exchange.fail(ApiError("shutdown", "The server is shutting down."))
        except Exception:  # the boundary of the process: a fault of ours is an answer and a log line, never silence
            log.exception("request_failed", request_id=exchange.id, path=exchange.path)
            await exchange.fail(ApiError("internal", "Something went wrong on our side. The request id finds it."))


async def _dispatch(exchange: Exchange, runtime: WebRuntime) -> None:
    methods = _methods(exchange.path)
    if methods is None:
        raise ApiError("unknown_url", f"Unknown URL: {exchange.method} {exchange.path[:200]}")
    allow = (b"allow", ", ".join([*methods, *(["HEAD"] if "GET" in methods else []), "OPTIONS"]).encode())
    if exchange.method == "OPTIONS":
        await exchange.respond(204, b"", headers=[allow])
        return
    view = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
    if view is None:
        message = f"{exchange.method} is not allowed here; use {' or '.join(methods)}."
        raise ApiError("method_not_allowed", message, headers=(allow,))
    await view(exchange, runtime)


def _methods(path: str) -> dict[str, View] | None:
    """The views of a path; one trailing slash is served as if it were not there."""
    path = path.removesuffix("/")
    if path.startswith("/v1/models/"):
        return ROUTES["/v1/models/…"]
    return ROUTES.get(path)


def _log_access(exchange: Exchange, status: int) -> None:
    write = log.debug if exchange.path in HEALTH else log.info
    write(
        "request",
        request_id=exchange.id,
        client_request_id=(exchange.header(b"x-client-request-id") or exchange.header(b"x-request-id"))[:200] or None,
        method=exchange.method,
        path=exchange.path[:200],
        status=status,
        ms=round(exchange.elapsed * 1000, 1),
        tenant=exchange.tenant or None,
        key=exchange.key or None,
    )
