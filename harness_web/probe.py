"""Asks a running product, over its own front door, whether it serves: `GET /readyz`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from harness_web.supervisor import Readiness

TIMEOUT = 2.0  # seconds for one answer
LIMIT = 64 * 1024  # bytes of an answer that are read
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  how a socket on all addresses is reached


async def probe(address: tuple[Any, ...]) -> Readiness:
    """Ask at `address` (as `getsockname()` gives it). Never raises for what the network or the product do."""
    host, port = ANY_ADDRESS.get(address[0], address[0]), address[1]
    try:
        status, body = await asyncio.wait_for(_get(host, port, "/readyz"), TIMEOUT)
    except (OSError, TimeoutError, ValueError):
        return Readiness(ready=False, missing="the web process")
    return Readiness(ready=status == 200, missing=missing(body))


async def _get(host: str, port: int, path: str) -> tuple[int, Mapping[str, Any]]:
    """Status and JSON body. Raises OSError or ValueError."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read(LIMIT)
        while answer and (more := await reader.read(LIMIT - len(answer))):
            answer += more
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head[9:12] or 0)  # HTTP/1.1 200 OK
    report = json.loads(body) if body else {}
    return status, report if isinstance(report, dict) else {}


def missing(report: Mapping[str, Any]) -> str:
    """What a `/readyz` report says is not there yet."""
    if report.get("scheduler") != "connected":
        return "the scheduler"
    states = report.get("models") or {}
    if not states:
        return "a deployment: add one with `harness apply`"
    return ", ".join(f"model {model} ({state})" for model, state in sorted(states.items()))
