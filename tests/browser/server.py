"""The pages with a scripted scheduler behind them: run by uvicorn as `tests.browser.server:application`.

The script is the file `scenario.json` in the data directory, read before each snapshot:
{"speaking": true, "schedulers": {"pool": {…a telemetry snapshot…}}}.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "harness_web.settings")
pages = get_asgi_application()  # first: it loads the applications that the imports below need

from django.conf import settings  # noqa: E402

from harness_web.console.live import fan_out  # noqa: E402
from harness_web.routing import websocket_application  # noqa: E402

SCENARIO = settings.HARNESS_DATA_DIR / "scenario.json"


async def scripted() -> AsyncIterator[dict[str, Any]]:
    while True:
        if SCENARIO.exists():
            scenario = json.loads(SCENARIO.read_text())
            for name, snapshot in scenario["schedulers"].items():
                if scenario["speaking"]:
                    yield {"scheduler": name, **snapshot}
        await asyncio.sleep(0.2)


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await receive()
        task = asyncio.create_task(fan_out(scripted()))
        await send({"type": "lifespan.startup.complete"})
        await receive()
        task.cancel()
        await asyncio.wait([task])
        await send({"type": "lifespan.shutdown.complete"})
    elif scope["type"] == "websocket":
        await websocket_application(scope, receive, send)
    else:
        await pages(scope, receive, send)
