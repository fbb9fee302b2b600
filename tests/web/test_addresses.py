"""Where a request comes from: the peer, or, behind proxies that are trusted, the last address that they did not add."""

from __future__ import annotations

from typing import Any

import pytest
from uvicorn import Config

from harness_web.env import EnvError, read
from harness_web.serve import uvicorn_arguments

PROXIES = ("10.0.0.0/24", "2001:db8::1")


async def seen(peer: str, *forwarded: str, proxies: tuple[str, ...] = PROXIES) -> str:
    """The client's address as the application sees it."""
    found: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(scope["client"][0])

    options = uvicorn_arguments("127.0.0.1", 8000, 1, proxies)
    trusted = options[options.index("--forwarded-allow-ips") + 1] if proxies else ""
    config = Config(app, proxy_headers=bool(proxies), forwarded_allow_ips=trusted, lifespan="off", log_config=None)
    config.load()
    headers = [(b"x-forwarded-for", each.encode()) for each in forwarded]
    scope = {"type": "http", "client": (peer, 5000), "headers": headers, "scheme": "http", "server": ("h", 80)}
    await config.loaded_app(scope, None, None)  # type: ignore[arg-type]  # the application reads the scope only
    return found[0]


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("203.0.113.9", [], "203.0.113.9"),
        ("203.0.113.9", ["192.0.2.1"], "203.0.113.9"),  # not from a proxy: anybody can write that
        ("10.0.0.7", ["192.0.2.1"], "192.0.2.1"),
        ("10.0.0.7", ["6.6.6.6, 192.0.2.1"], "192.0.2.1"),  # what the client wrote itself is on the left
        ("10.0.0.7", ["6.6.6.6", "192.0.2.1"], "192.0.2.1"),
        ("10.0.0.7", ["6.6.6.6, 192.0.2.1, 10.0.0.8"], "192.0.2.1"),  # two proxies
        ("2001:db8::1", ["2001:db8:1::5"], "2001:db8:1::5"),
        ("10.0.0.7", ["nonsense"], "nonsense"),  # which is in no network
    ],
)
async def test_the_last_address_that_no_proxy_of_ours_added_is_the_clients(
    peer: str, forwarded: list[str], client: str
) -> None:
    assert await seen(peer, *forwarded) == client


async def test_without_proxies_only_the_peer_counts() -> None:
    assert await seen("10.0.0.7", "192.0.2.1", proxies=()) == "10.0.0.7"


@pytest.mark.parametrize("value", ["*", "proxy.example.com", "10.0.0.1/8", "10.0.0.1, everybody"])
def test_proxies_are_named_by_address(value: str) -> None:
    with pytest.raises(EnvError, match="HARNESS_TRUSTED_PROXIES"):
        read({"HARNESS_TRUSTED_PROXIES": value})


def test_proxies_may_be_networks() -> None:
    assert read({"HARNESS_TRUSTED_PROXIES": "10.0.0.0/24, 2001:db8::1"}).trusted_proxies == PROXIES
