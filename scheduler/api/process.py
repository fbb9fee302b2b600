"""Asking the scheduler processes from a view: over the gateway of this web process, on its event loop."""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync
from rest_framework.request import Request

from scheduler.gateway import Gateway


def gateway_of(request: Request) -> Gateway:
    """The gateway of this web process, which the server puts into every scope."""
    gateway: Gateway = request._request.scope["state"]["runtime"].gateway  # type: ignore[attr-defined]
    return gateway


def ask(request: Request, what: str, **args: Any) -> Any:
    """The answer of a scheduler process. Raises GatewayUnavailable, AskError."""
    return async_to_sync(gateway_of(request).ask)(what, **args)


def find(request: Request, what: str, **args: Any) -> Any:
    """The answer of the process that has one, None if none has. Raises as `ask` does."""
    return async_to_sync(gateway_of(request).find)(what, **args)
