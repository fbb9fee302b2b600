"""What the parts of one scheduler process share. Built once by `runtime.py`, never changed but for `configuration`."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from scheduler.clock import Clock
from scheduler.core.admission import Admission
from scheduler.core.trace import TraceRecorder
from scheduler.engines.base import Engine, StepListener
from scheduler.worker.configuration import Configuration
from scheduler.worker.dead_letters import DeadLetters
from scheduler.worker.endings import Endings
from scheduler.worker.garbage import Garbage
from scheduler.worker.outbox import Outbox
from scheduler.worker.settlement import Settlement
from scheduler.worker.statistics import Statistics


class EngineFactory(Protocol):
    """`scheduler.engines.create_engine`, or a test's."""

    def __call__(
        self, name: str, model: str, options: Mapping[str, Any], *, clock: Clock, on_step: StepListener, data_dir: Path
    ) -> Engine: ...


@dataclass(slots=True)
class Services:
    clock: Clock
    wall: Callable[[], float]  # Unix time
    data_dir: Path
    epoch: int
    drain_seconds: float  # how long running requests may take to finish when their engine is taken away
    salt_secret: bytes
    create_engine: EngineFactory
    admission: Admission
    settlement: Settlement
    outbox: Outbox
    endings: Endings
    statistics: Statistics
    traces: TraceRecorder
    dead_letters: DeadLetters
    garbage: Garbage
    hurry: asyncio.Event  # set: drain no longer, stop now
    configuration: Configuration = field(default_factory=Configuration)


def cache_salt(secret: bytes, tenant: str) -> str:
    """Prefix caches are shared within a tenant only: timing must not tell one tenant what another asked."""
    return hmac.new(secret, tenant.encode(), hashlib.sha256).hexdigest()
