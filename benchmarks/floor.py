"""The least that a server can do: an ASGI application that answers a chat request with bytes it has ready.

Served as Harness is, it is what `benchmarks/gateway.py` compares with. It reads no key and runs nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

TOKENS_HEADER = b"x-tokens"  # how many events a stream has
ANSWER = (
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1700000000,"model":"demo","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"w0","refusal":null},"logprobs":null,"finish_reason":'
    b'"length"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"demo",'
    b'"choices":[{"index":0,"delta":{"content":"w0 "},"logprobs":null,"finish_reason":null}]}\n\n'
)

Message = dict[str, Any]


async def application(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """An event per write if the header asks for a stream, else one JSON body."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    while (await receive()).get("more_body"):
        pass
    tokens = int(dict(scope["headers"]).get(TOKENS_HEADER, b"0"))
    if not tokens:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(tokens):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
