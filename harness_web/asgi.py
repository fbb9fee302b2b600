"""The web process: one ASGI application in front of three.

lifespan                      -> WebRuntime, in `scope["state"]["runtime"]` of every request
/v1/…  /healthz  /readyz      -> harness_web.openai (plain ASGI)
websockets                    -> Channels
everything else               -> Django
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "harness_web.settings")

from django.core.asgi import get_asgi_application

pages = get_asgi_application()  # first: it loads the applications that the imports below need

from harness_web.openai.app import OpenAIApp
from harness_web.openai.exchange import Receive, Scope, Send
from harness_web.routing import websocket_application
from harness_web.runtime import WebRuntime, create_runtime

ASGIApp = Callable[[Any, Any, Any], Awaitable[None]]  # Django's and Channels' types of messages differ from ours


class Application:
    """Sends each scope where it belongs. The runtime lives as long as the server's lifespan."""

    def __init__(self, pages: ASGIApp, websockets: ASGIApp, make_runtime: Callable[[], WebRuntime]) -> None:
        self._pages = pages
        self._websockets = websockets
        self._make_runtime = make_runtime
        self._data_plane: OpenAIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websockets(scope, receive, send)
        elif self._data_plane is not None and OpenAIApp.serves(scope["path"]):
            await self._data_plane(scope, receive, send)
        else:
            await self._pages(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        runtime = self._make_runtime()
        await runtime.start()
        self._data_plane = OpenAIApp(runtime)
        scope["state"]["runtime"] = runtime
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await runtime.aclose()
        await send({"type": "lifespan.shutdown.complete"})


application = Application(pages, websocket_application, create_runtime)
