from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from django.utils import translation

from tests.web.cast import Stage
from tests.web.people import People, gather


@pytest.fixture(autouse=True)
def language() -> Iterator[None]:
    """A visitor's language, which a page activates for its thread, ends with the test."""
    yield
    translation.deactivate()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.start()
    yield stage
    await stage.stop()


@pytest.fixture
def people(db: None) -> People:
    return gather()
