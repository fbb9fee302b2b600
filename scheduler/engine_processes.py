"""Engine processes on this machine: written down while they live, so that none outlives the scheduler it belongs to.

SIGKILL of a scheduler leaves its engine's processes alive, holding all memory. `run/engine-pids.json` names them by
pid *and* start time (pids are reused): `{"scheduler name": [{"pid": 123, "started": 1700000000.12}, …]}`. The
scheduler ends its own leftovers before it starts an engine, the supervisor those of a scheduler that died.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import structlog

log = structlog.get_logger(__name__)

FILE = "engine-pids.json"
KILL_WAIT = 5.0  # seconds that the kernel may take to remove a killed process
SAME_START = 0.05  # seconds by which two readings of a process' start time may differ

Entry = dict[str, float]  # `pid` and `started`, Unix time
Records = dict[str, list[Entry]]


def record(run_dir: Path, scheduler: str, pids: Iterable[int]) -> None:
    """Write down the processes of `scheduler`'s engines; replaces what was there. Pids that are gone are left out."""
    entries = [entry for pid in sorted(set(pids)) if (entry := identify(pid)) is not None]
    with _locked(run_dir):
        records = _read(run_dir)
        if entries:
            records[scheduler] = entries
        else:
            records.pop(scheduler, None)
        _write(run_dir, records)


def children() -> list[int]:
    """All processes below this one, however deep."""
    return [child.pid for child in psutil.Process().children(recursive=True)]


def kill_stale(run_dir: Path, scheduler: str | None = None) -> list[int]:
    """End what is left of `scheduler`'s engines (of all schedulers if None) and forget it; answers the pids ended.

    Blocks up to KILL_WAIT seconds.
    """
    if not (run_dir / FILE).exists():
        return []
    with _locked(run_dir):
        records = _read(run_dir)
        names = list(records) if scheduler is None else [scheduler]
        stale = [process for name in names for entry in records.pop(name, []) if (process := find(entry))]
        for process in stale:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(stale, timeout=KILL_WAIT)
        _write(run_dir, records)
    if stale:
        log.warning("stale engine processes ended", pids=[process.pid for process in stale])
    return [process.pid for process in stale]


def identify(pid: int) -> Entry | None:
    """What tells this process from a later one of the same pid; None if it is gone."""
    try:
        return {"pid": pid, "started": psutil.Process(pid).create_time()}
    except psutil.NoSuchProcess:
        return None


def find(entry: Entry) -> psutil.Process | None:
    """The very process that was identified, not one that got its pid later; None if it has ended."""
    try:
        process = psutil.Process(int(entry["pid"]))
        same = abs(process.create_time() - entry["started"]) < SAME_START
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (run_dir / f"{FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(run_dir: Path) -> Records:
    try:
        records: Records = json.loads((run_dir / FILE).read_text())
    except (FileNotFoundError, ValueError):  # a file that cannot be read names nobody
        return {}
    return records


def _write(run_dir: Path, records: Records) -> None:
    scratch = run_dir / f"{FILE}.{os.getpid()}"
    scratch.write_text(json.dumps(records))
    scratch.replace(run_dir / FILE)
