"""Clients of a product under fault: streams, plain answers and callers that leave, and what each of them got."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType

import httpx

PATIENCE = 90.0  # seconds; whoever is silent for so long has been forgotten


class Fate(StrEnum):
    """How a request ended for its caller."""

    ANSWERED = "answered"
    REFUSED = "refused"  # a status with an error in its body
    BROKEN = "error event"
    CUT = "cut connection"
    LEFT = "left"
    FORGOTTEN = "forgotten"  # nothing came any more
    WRONG = "wrong"  # a stream that ends without a last word on an intact connection


@dataclass
class Receipt:
    """What one caller knows. `tokens`: counted chunks, or what the usage said."""

    fate: Fate = Fate.FORGOTTEN
    id: str = ""
    status: int = 0
    code: str = ""
    prompt_tokens: int = 0
    tokens: int = 0


@dataclass
class Load:
    """`callers` of `key` at a time, one request after the other, while the context is open."""

    url: str
    key: str
    callers: int
    seed: int
    receipts: list[Receipt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take no new requests and wait for the last answers."""
        self._stop.set()
        self._thread.join(PATIENCE + 30)
        assert not self._thread.is_alive()

    def answered(self) -> int:
        return self.fates()[Fate.ANSWERED]

    def fates(self) -> Counter[Fate]:
        return Counter(receipt.fate for receipt in self.receipts)

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=PATIENCE, limits=limits) as client:
            await asyncio.gather(*(self._call(client, number) for number in range(self.callers)))

    async def _call(self, client: httpx.AsyncClient, number: int) -> None:
        dice = random.Random(f"{self.seed} {number}")
        while not self._stop.is_set():
            receipt = Receipt()
            await one_request(client, dice, receipt)
            self.receipts.append(receipt)
            if receipt.fate not in (Fate.ANSWERED, Fate.LEFT):
                await asyncio.sleep(1.0)  # as a client does that is told to come back


async def one_request(client: httpx.AsyncClient, dice: random.Random, receipt: Receipt) -> None:
    """Send one of the mix and note what comes of it."""
    words = dice.randint(1, 40)
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": " ".join(["word"] * words)}],
        "max_tokens": dice.randint(1, 120),
        "stream": dice.random() < 0.7,
    }
    if dice.random() < 0.05:
        body["simulate"] = {"fail_at": dice.randint(0, 20)}
    leave_after = dice.uniform(0.0, 1.0) if dice.random() < 0.25 else None
    try:
        async with asyncio.timeout(leave_after):
            await (_stream if body["stream"] else _plain)(client, body, receipt)
    except TimeoutError:
        receipt.fate = Fate.LEFT
    except httpx.TimeoutException:
        receipt.fate = Fate.FORGOTTEN
    except httpx.TransportError:
        receipt.fate = Fate.CUT


async def _plain(client: httpx.AsyncClient, body: dict[str, object], receipt: Receipt) -> None:
    response = await client.post("/v1/chat/completions", json=body)
    _head(response, receipt)
    document = response.json()
    if response.status_code == 200:
        _usage(document, receipt)
        receipt.fate = Fate.ANSWERED
    else:
        receipt.code = document["error"]["code"]
        receipt.fate = Fate.REFUSED


async def _stream(client: httpx.AsyncClient, body: dict[str, object], receipt: Receipt) -> None:
    asked = body | {"stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
        _head(response, receipt)
        if response.status_code != 200:
            receipt.code = json.loads(await response.aread())["error"]["code"]
            receipt.fate = Fate.REFUSED
            return
        async for event in _events(response):
            if event == "[DONE]":
                receipt.fate = Fate.ANSWERED
                return
            document = json.loads(event)
            if "error" in document:
                receipt.code = document["error"]["code"]
                receipt.fate = Fate.BROKEN
                return
            if document.get("usage"):
                _usage(document, receipt)
            receipt.tokens = max(receipt.tokens, _words(document, receipt))
        receipt.fate = Fate.WRONG


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def _words(document: dict[str, Sequence[dict[str, dict[str, str]]]], receipt: Receipt) -> int:
    """Tokens so far: the simulated engine numbers its words."""
    text = "".join(choice["delta"].get("content") or "" for choice in document["choices"])
    return int(text.split()[-1].removeprefix("w")) + 1 if text.split() else receipt.tokens


def _head(response: httpx.Response, receipt: Receipt) -> None:
    receipt.status = response.status_code
    receipt.id = response.headers.get("x-request-id", "")


def _usage(document: dict[str, dict[str, int]], receipt: Receipt) -> None:
    receipt.prompt_tokens = document["usage"]["prompt_tokens"]
    receipt.tokens = document["usage"]["completion_tokens"]
