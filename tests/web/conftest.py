from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.web.cast import Stage


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.start()
    yield stage
    await stage.stop()
