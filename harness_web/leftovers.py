"""What a supervisor that was killed leaves behind: its children. They have been told to end, and finish what they run.

Until then they hold its port and its pools. `run/children.json` names them while they live, by pid *and* start time
(pids are reused), so that the next `harness up` waits for them, and in the end kills them and nobody else:
`{"web-1": {"pid": 123, "started": 1700000000.12}, …}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from scheduler.engine_processes import KILL_WAIT, Entry, find, identify

FILE = "children.json"
PATIENCE = 20.0  # seconds: as long as the slowest child is given to stop in order
POLL = 0.05  # seconds

Running = dict[str, psutil.Process]


def note(run_dir: Path, children: Mapping[str, int]) -> None:
    """Write down the pids of the children by name; replaces what was there."""
    entries = {name: entry for name, pid in children.items() if (entry := identify(pid)) is not None}
    scratch = run_dir / f"{FILE}.{os.getpid()}"
    with contextlib.suppress(OSError):  # a full disk stops no process; the next start then waits for nobody
        scratch.write_text(json.dumps(entries))
        scratch.replace(run_dir / FILE)


def wait_for_end(run_dir: Path, say: Callable[[str], None], patience: float = PATIENCE) -> None:
    """Return when nothing of an earlier run runs any more; what takes longer than `patience` seconds is killed.

    To be called by the one product that holds the data directory.
    """
    left = _running(run_dir)
    if left:
        say(f"waiting for {', '.join(left)} of the last run to end")
        left = _wait(left, patience)
    if left:
        say(f"killing {', '.join(left)}: not ended within {patience:.0f} s")
        for process in left.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # every child leads a process group of its own
        _wait(left, KILL_WAIT)
    note(run_dir, {})


def _running(run_dir: Path) -> Running:
    found = {name: find(entry) for name, entry in _read(run_dir).items()}
    return {name: process for name, process in found.items() if process is not None}


def _read(run_dir: Path) -> dict[str, Entry]:
    try:
        entries: dict[str, Entry] = json.loads((run_dir / FILE).read_text())
    except (FileNotFoundError, ValueError):  # a file that cannot be read names nobody
        return {}
    return entries


def _wait(processes: Running, seconds: float) -> Running:
    """Those that still run after `seconds`, or as soon as none does."""
    until = time.monotonic() + seconds
    while processes and time.monotonic() < until:
        time.sleep(POLL)
        processes = {name: process for name, process in processes.items() if _runs(process)}
    return processes


def _runs(process: psutil.Process) -> bool:
    """A zombie does not: it holds nothing, and whether it is ever collected is its new parent's matter."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
