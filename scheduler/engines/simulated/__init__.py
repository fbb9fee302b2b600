"""The simulated engine: a full engine whose tokens cost declared time instead of computation.

options.py   what a deployment may set
machine.py   the step machine: slots, chunked prefill, KV blocks, preemption; no loop and no clock
script.py    what a request answers, and the `simulate` field with its faults
record.py    the append-only file that remembers what the engine did, and its reader
engine.py    the asynchronous engine around the machine
"""

from __future__ import annotations

from scheduler.engines.simulated.engine import SimulatedEngine, create
from scheduler.engines.simulated.record import read_record

__all__ = ["SimulatedEngine", "create", "read_record"]
