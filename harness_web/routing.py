"""Websockets: who may open one, and which consumer answers."""

from __future__ import annotations

from channels.auth import AuthMiddlewareStack
from channels.routing import URLRouter
from channels.security.websocket import AllowedHostsOriginValidator, WebsocketDenier
from django.urls import path, re_path

from harness_web.console.consumers import ConsoleConsumer

routes = [
    path("ws/console/", ConsoleConsumer.as_asgi()),
    re_path("", WebsocketDenier.as_asgi()),  # anything else is refused, not an error
]
websocket_application = AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(routes)))
