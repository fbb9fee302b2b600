"""How the web process is served: uvicorn's arguments, and the bounds that uvicorn itself does not have.

python -m uvicorn <uvicorn_arguments(...)>
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADERS = 64 * 1024  # bytes of names and values
HEADER_TIME = 10.0  # seconds from the connection, or from the end of an answer's idle time, to complete headers
KEEP_ALIVE = 75  # seconds; longer than proxies keep idle connections, so that they close first
GRACE = 15  # seconds that running answers get at shutdown; the scheduler drains for 10


def uvicorn_arguments(host: str, port: int, workers: int, trusted_proxies: tuple[str, ...] = ()) -> list[str]:
    """Command-line arguments that serve Harness. Forwarded addresses are believed from `trusted_proxies` only."""
    proxies = ["--proxy-headers", "--forwarded-allow-ips", ",".join(trusted_proxies)]
    return [
        "harness_web.asgi:application",
        *("--host", host, "--port", str(port), "--workers", str(workers)),
        *("--loop", "uvloop", "--http", "harness_web.serve:BoundedHttp", "--ws", "websockets-sansio"),
        *("--ws-max-size", str(MAX_HEADERS)),  # consoles send a few words at most
        *("--lifespan", "on", "--no-access-log", "--no-server-header", "--log-level", "warning"),
        *("--timeout-keep-alive", str(KEEP_ALIVE), "--timeout-graceful-shutdown", str(GRACE)),
        *(proxies if trusted_proxies else ["--no-proxy-headers"]),
    ]


class HeadersTooLargeError(Exception):
    """More than MAX_HEADERS bytes before the end of the headers."""


class BoundedHttp(HttpToolsProtocol):
    """HTTP whose headers have a size and a time in which to arrive."""

    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        if self._header_timer is None:
            self._expect_headers()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def _expect_headers(self) -> None:
        self._header_timer = self.loop.call_later(HEADER_TIME, self._give_up)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADERS:
            raise HeadersTooLargeError  # the parser stops, and the connection ends with a plain 400

    def _give_up(self) -> None:
        """Not yet a request, so there is nobody to write an envelope to."""
        self._header_timer = None
        self.transport.close()
