"""Whole batches of up to a size after at most a delay: TorchServe and TensorFlow Serving 1.x."""

from __future__ import annotations

from scheduler.core.policies.static import Static


class Dynamic(Static):
    """A static batch that hardly waits to fill: 50 ms unless `max_wait_ms` says else. It too runs to its end."""

    default_wait = 0.050  # seconds
