"""Waiting for what a product of real processes does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil
import pytest

T = TypeVar("T")
PATIENCE = 15.0  # seconds; a loaded machine is slow, a hanging test must end


@pytest.fixture
def eventually() -> Callable[[Callable[[], T]], T]:
    """Returns a function that waits until its argument answers something true, and answers that."""

    def wait(condition: Callable[[], T], patience: float = PATIENCE) -> T:
        deadline = time.monotonic() + patience
        while not (value := condition()):
            assert time.monotonic() < deadline, f"it did not come true in {patience} s"
            time.sleep(0.02)
        return value

    return wait


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
