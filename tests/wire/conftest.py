"""Two ends of a wire, over every carrier and on both event loops. Time is manual: heartbeats beat when a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

from tests.wire.cast import Wire, make_wire


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["memory", "unix", "tcp"])
async def wire(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Wire]:
    wire = make_wire(request.param, tmp_path)
    yield wire
    await wire.aclose()
