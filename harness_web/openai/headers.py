"""Response headers that OpenAI clients read (identity, rate limits, retry advice), and one of our own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

Header = tuple[bytes, bytes]

OPENAI_VERSION: Header = (b"openai-version", b"2020-10-01")
JSON: Header = (b"content-type", b"application/json")
# A stream has no known length and must not be buffered or recompressed on its way.
STREAM: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


def duration(seconds: float) -> str:
    """Seconds as OpenAI writes them: `120ms`, `1s`, `7.66s`, `6m0s`, `1h0m5s`. Rounded up to the millisecond."""
    total_ms = math.ceil(max(seconds, 0.0) * 1000)
    if 0 < total_ms < 1000:
        return f"{total_ms}ms"
    if total_ms < 60_000:
        return f"{total_ms / 1000:g}s"
    minutes, rest = divmod(math.ceil(total_ms / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def rate_limits(limits: Mapping[str, float]) -> Iterator[Header]:
    """`x-ratelimit-*` from the counters after the reservation: counts are integers, resets are durations."""
    for name, value in limits.items():
        text = duration(value) if name.startswith("reset-") else str(max(math.floor(value), 0))
        yield b"x-ratelimit-" + name.encode(), text.encode()


def disclosure(level: int) -> Iterator[Header]:
    """`x-harness-degradation` while the service gives something up; without the header it does not."""
    if level:
        yield b"x-harness-degradation", str(level).encode()


def retry_advice(retry: bool, seconds: float) -> Iterator[Header]:
    """Whether, and after how long, the same request is worth sending again; every SDK generation finds its header."""
    yield b"x-should-retry", b"true" if retry else b"false"
    if retry:
        seconds = max(seconds, 0.001)
        yield b"retry-after", str(max(math.ceil(seconds), 1)).encode()
        yield b"retry-after-ms", str(math.ceil(seconds * 1000)).encode()
