"""Customers of all tiers, for as long as a block lasts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

import httpx

from tests.journey.product import Product

Rates = Callable[[float], Mapping[str, float]]  # seconds since the start -> tenant -> requests per second


def steady(_: float) -> Mapping[str, float]:
    """A little more than the demo's simulated engine takes."""
    return {"acme": 2.0, "globex": 3.0, "initech": 2.0}


def waves(at: float) -> Mapping[str, float]:
    """Two rushes in five minutes: the least important tier queues, the most important one does not."""
    if at % 150 > 80:
        return {"acme": 0.9, "globex": 1.1, "initech": 1.5}
    return {"acme": 0.8, "globex": 0.7, "initech": 0.5}


@contextlib.contextmanager
def load(product: Product, rates: Rates = steady, tokens: int = 40) -> Iterator[None]:
    """Streamed chat completions from three tenants; what is refused or cut is the product's to show."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_drive(product, rates, tokens, stop)))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def _drive(product: Product, rates: Rates, tokens: int, stop: threading.Event) -> None:
    loop = asyncio.get_running_loop()
    start = loop.time()
    due: dict[str, float] = {}
    running: set[asyncio.Task[None]] = set()
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=product.url, limits=limits, timeout=30, trust_env=False) as client:
        while not stop.is_set():
            at = loop.time() - start
            for tenant, rate in rates(at).items():
                if at >= due.get(tenant, 0.0):
                    due[tenant] = at + 1 / rate
                    task = asyncio.create_task(_ask(client, product.key(tenant), tokens))
                    running.add(task)
                    task.add_done_callback(running.discard)
            await asyncio.sleep(0.05)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _ask(client: httpx.AsyncClient, key: str, tokens: int) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me something about queues " * 4}],
        "max_tokens": tokens,
        "stream": True,
    }
    with contextlib.suppress(httpx.HTTPError):  # a restart in between cuts streams
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as answer:
            async for _ in answer.aiter_bytes():
                pass
