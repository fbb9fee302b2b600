"""FR-079: a prompt is found in an engine's cache by the keys of its own tenant, and by nobody else's.

What vLLM does with the salts is tried in `tests/engines/test_vllm.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from scheduler.engines import create_engine
from scheduler.engines.base import Engine, EngineEvent, EngineRequest
from scheduler.gateway import Caller

from .test_budgets import all_done

pytestmark = pytest.mark.usefixtures("demo")

CALLERS = {"own": ("1", "acme", "7"), "colleague": ("1", "acme", "8"), "stranger": ("2", "globex", "9")}


class Heard:
    """Builds real engines and keeps the salt of every request that they are given."""

    def __init__(self) -> None:
        self.salts: dict[str, str | None] = {}

    def __call__(self, *args: Any, **options: Any) -> Engine:
        engine = create_engine(*args, **options)
        generate = engine.generate

        def listened(request: EngineRequest) -> AsyncIterator[EngineEvent]:
            self.salts[request.id] = request.cache_salt
            return generate(request)

        engine.generate = listened  # type: ignore[method-assign]
        return engine


async def salts_of(start: Any, secret: bytes) -> tuple[dict[str, str | None], str]:
    """The salt of each caller, and everything that callers were told."""
    heard = Heard()
    async with start(salt_secret=secret, engine_factory=heard) as product:
        await product.ready()
        answers = {
            name: product.submit(id=name, caller=Caller(tenant, slug, key, "vip", (), 1, "prod"))
            for name, (tenant, slug, key) in CALLERS.items()
        }
        await all_done(product, answers.values())
        assert set(heard.salts) == set(CALLERS)
        return heard.salts, repr([answer.events for answer in answers.values()])


async def test_a_salt_is_the_tenants_and_nobody_can_know_it(start) -> None:
    salts, told = await salts_of(start, b"secret")
    assert salts["own"] == salts["colleague"] != salts["stranger"]
    for salt in salts.values():
        assert salt is not None and len(salt) == 64  # of 256 bits
        assert salt not in told


async def test_another_secret_makes_other_salts(start) -> None:
    """None of it follows from what a tenant may know of itself."""
    first, _ = await salts_of(start, b"secret")
    second, _ = await salts_of(start, b"another")
    assert not set(first.values()) & set(second.values())
