"""Waiting for the first of several things."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first(*contenders: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> None:
    """Return when the first contender is done, with or without an error; the others are cancelled and have ended.

    A contender's own exception is not raised here: who gave a task asks it.
    """
    tasks = [one if isinstance(one, asyncio.Task) else asyncio.create_task(one) for one in contenders]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
