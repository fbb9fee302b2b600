"""What the garbage collector may cost a scheduler process: nothing that anybody waits for.

A full collection looks at every object that can hold others. Once an engine is loaded that takes a tenth of a second or
more, whoever's turn it is. So garbage is collected while nothing waits or runs, and what is left is taken out of the
collector's sight (`gc.freeze`): the collections that load sets off look at what came with the load. What was taken out
may die later; now and then everything is looked at again.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

from scheduler.clock import Clock

EVERY = 1.0  # seconds between two looks whether there is time for it
EVERYTHING_EVERY = 3600.0  # seconds


class Garbage:
    """Made in the thread that serves. `thread_clock`: CPU seconds of the thread that asks."""

    def __init__(self, thread_clock: Callable[[], float] = time.thread_time) -> None:
        self._thread = threading.get_ident()
        self._thread_clock = thread_clock
        self._began = 0.0
        self._collecting = 0.0  # CPU seconds that collections have taken in this thread

    def cpu(self) -> float:
        """CPU seconds of this thread, those of collections left out: nobody's work causes them in particular."""
        return self._thread_clock() - self._collecting

    async def tend(self, clock: Clock, idle: Callable[[], bool]) -> None:
        """See the module text. Until cancelled; `idle`: nothing waits and nothing runs."""
        gc.callbacks.append(self._heard)
        everything_at = clock.now()
        try:
            while True:
                await clock.sleep(EVERY)
                if not idle():
                    continue
                if clock.now() >= everything_at:
                    gc.unfreeze()
                    everything_at = clock.now() + EVERYTHING_EVERY
                gc.collect()
                gc.freeze()
        finally:
            gc.callbacks.remove(self._heard)

    def _heard(self, phase: str, info: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._began = self._thread_clock()
        else:
            self._collecting += self._thread_clock() - self._began
