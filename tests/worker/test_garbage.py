from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import pytest

from scheduler.clock import ManualClock
from scheduler.worker.garbage import EVERY, EVERYTHING_EVERY, Garbage


class Node:
    itself: Node


@contextlib.asynccontextmanager
async def tended(garbage: Garbage, idle):
    clock = ManualClock()
    task = asyncio.create_task(garbage.tend(clock, idle))
    await clock.advance(0.0)
    try:
        yield clock
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gc.unfreeze()


async def test_the_cpu_of_collections_is_not_that_of_the_work_they_interrupt() -> None:
    spent = 0.0

    def collecting_takes_five(phase: str, info: dict) -> None:
        nonlocal spent
        spent += 5.0 if phase == "stop" else 0.0

    garbage = Garbage(lambda: spent)
    async with tended(garbage, lambda: False):
        gc.callbacks.insert(0, collecting_takes_five)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(collecting_takes_five)
        assert spent >= 5.0
        assert garbage.cpu() == 0.0
        spent += 1.0
        assert garbage.cpu() == 1.0


@pytest.mark.parametrize("idle", [True, False])
async def test_what_lives_is_taken_out_of_the_collectors_sight_while_nothing_waits(idle: bool) -> None:
    gc.unfreeze()
    async with tended(Garbage(), lambda: idle) as clock:
        await clock.advance(EVERY)
        assert (gc.get_freeze_count() > 0) is idle


async def test_garbage_that_was_taken_out_is_found_in_the_end() -> None:
    node = Node()
    node.itself = node
    left = weakref.ref(node)
    async with tended(Garbage(), lambda: True) as clock:
        await clock.advance(EVERY)
        del node
        await clock.advance(EVERY)
        assert left() is not None
        await clock.advance(EVERYTHING_EVERY)
        assert left() is None
