"""Database calls beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from django.db import InterfaceError, OperationalError, connections

P = ParamSpec("P")
T = TypeVar("T")

# What a database that is away raises. Not what a database that is there says of the data it is given.
DatabaseAway = (OperationalError, InterfaceError, OSError)


def complaint(error: Exception) -> str:
    """The first line of what the database says, without its full stop."""
    return str(error).strip().partition("\n")[0].rstrip(".")


class DatabaseThread:
    """One thread with one connection, looked after: neither a call that fails nor a database that went away and came
    back leaves the next call with a dead one.
    """

    def __init__(self, name: str) -> None:
        self._closed = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"database-{name}")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args)` on the thread. Raises what it raises; a database that is away raises `DatabaseAway`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(_closing_on_error, function, *args, **kwargs))

    async def aclose(self) -> None:
        """Wait for the call in progress, close the connection and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._executor, connections.close_all)
        self._executor.shutdown()


def _closing_on_error(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    for connection in connections.all(initialized_only=True):
        # A server that restarted while nobody asked it anything has closed what is open here.
        if connection.connection is not None and not connection.in_atomic_block and not connection.is_usable():
            connection.close()
    try:
        return function(*args, **kwargs)
    except DatabaseAway:
        connections.close_all()
        raise
