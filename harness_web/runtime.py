"""What one web process holds from its start to its end: who may ask, and the way to the schedulers."""

from __future__ import annotations

import asyncio
import contextlib
import os

import structlog
from django.conf import settings

from harness_web.console.live import fan_out
from scheduler.gateway import Gateway, socket_path
from tenants.auth import Authenticator
from tenants.changes import Poller
from tenants.database import DatabaseThread

log = structlog.get_logger(__name__)

FAN_OUT_AGAIN = 1.0  # seconds


class WebRuntime:
    """Started once per process. Neither a scheduler nor the database has to be there: requests then say so."""

    def __init__(self, poller: Poller, authenticator: Authenticator, gateway: Gateway) -> None:
        self.poller = poller
        self.authenticator = authenticator
        self.gateway = gateway
        self.database = DatabaseThread("web")
        self._fan_out: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.gateway.start()
        await self.poller.start()
        self._fan_out = asyncio.create_task(self._fan_out_telemetry(), name="telemetry")

    async def aclose(self) -> None:
        """In the order of dependence; requests have ended before."""
        if self._fan_out is not None:
            self._fan_out.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._fan_out
        await self.poller.aclose()
        await self.gateway.aclose()
        await self.authenticator.aclose()
        await self.database.aclose()

    async def _fan_out_telemetry(self) -> None:
        """Pass the schedulers' snapshots to the consoles of this process."""
        while True:
            try:
                await fan_out(self.gateway.snapshots())
            except Exception:  # the boundary of a task: a console without news must not be a console without end
                log.exception("telemetry_failed")
            await asyncio.sleep(FAN_OUT_AGAIN)


def create_runtime() -> WebRuntime:
    """The runtime that the settings describe. Call on the event loop."""
    name = f"{settings.HARNESS_PROCESS}.{os.getpid()}"  # uvicorn's workers share their environment
    poller = Poller(name, "web")
    authenticator = Authenticator(lambda: poller.fresh_at)
    poller.on_change(authenticator.refresh)
    address = socket_path(settings.HARNESS_RUN_DIR, "scheduler")
    return WebRuntime(poller, authenticator, Gateway(lambda: [address], name))
