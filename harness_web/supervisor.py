"""Keeps the processes of the product running on one machine: start, prefix logs, restart what dies, stop in order.

    Supervisor.run()
      start the children of each stage                  web and scheduler first, the rest once it serves
      SIGCHLD   -> reap -> end adopted orphans -> restart   at once if it had been ready, then after at most 1 s
      SIGTERM   -> stop stage by stage -> nothing is left

Children run in process groups of their own, so that only the supervisor gets the terminal's Ctrl-C. It is a child
subreaper: what a killed child leaves behind (an engine's processes) becomes its own child, and is ended. A child whose
supervisor is killed gets SIGTERM from the kernel, and the next supervisor waits for its end (`leftovers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import psutil

from harness_web.env import child_environment, read
from harness_web.process_logs import LogWriter

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
RESTART_PAUSE = 1.0  # seconds before a child that had been ready is restarted, after its first death in a while
CALM = 10.0  # seconds of life after which a death counts as the first in a while
MAX_BACKOFF = 30.0  # seconds, for a child that never became ready
POLL_STARTING = 0.1  # seconds between two readiness checks until the product is ready
POLL_RUNNING = 1.0
FIRST_WORD = 2.0  # seconds of starting after which the supervisor says what it waits for
LOG_PIPE = 1024 * 1024  # bytes that a child may be ahead of the supervisor
NEXT_WORD = 5.0  # seconds between further words

_libc = ctypes.CDLL(None, use_errno=True)


class Stage(Enum):
    """When a child starts, and when it stops: stages stop in this order."""

    EDGE = 0  # takes requests: stops first, so that nothing new comes in
    ENGINE = 1
    BACKGROUND = 2  # starts once the product is ready (or after BACKGROUND_PATIENCE): the first answer comes first


BACKGROUND_PATIENCE = 5.0  # seconds that background children wait for the others to become ready


@dataclass(frozen=True)
class Spec:
    """A child to keep running. `grace`: seconds between SIGTERM and SIGKILL when stopping."""

    name: str
    command: Sequence[str]
    stage: Stage
    grace: float = 10.0
    pass_fds: tuple[int, ...] = ()


@dataclass
class Child:
    """A spec and its present process."""

    spec: Spec
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0  # monotonic
    was_ready: bool = False  # this process has been part of a ready product
    failures: int = 0  # deaths in a row without having been ready
    last_death: float = -CALM
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # the present process has been taken leave of


def restart_delay(child: Child, now: float) -> float:
    """Seconds until a child that died at `now` is started again. Updates its record of deaths."""
    calm = now - child.last_death >= CALM
    child.last_death = now
    if child.was_ready:
        child.failures = 0
        return 0.0 if calm else RESTART_PAUSE
    child.failures += 1
    return min(MAX_BACKOFF, 2.0 ** (child.failures - 1))


@dataclass(frozen=True)
class Readiness:
    """Whether a request would succeed now, and if not, what it would wait for."""

    ready: bool
    missing: str = ""


class Supervisor:
    """See the module text. `ready_line` is printed once, when `probe` first says that the product serves.

    `note_children` is told the pids by name whenever they have changed.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        probe: Callable[[], Awaitable[Readiness]],
        ready_line: str,
        stop_listening: Callable[[], None],
        end_orphans: Callable[[], object],
        note_children: Callable[[Mapping[str, int]], object],
    ) -> None:
        self._children = [Child(spec) for spec in specs]
        self._probe = probe
        self._ready_line = ready_line
        self._stop_listening = stop_listening
        self._end_orphans = end_orphans
        self._note_children = note_children
        self._logs = LogWriter(sys.stdout.fileno())
        self._stopping = asyncio.Event()
        self._impatient = False
        self._restarts: dict[str, asyncio.TimerHandle] = {}

    async def run(self) -> None:
        """Returns when everything has been stopped after SIGINT or SIGTERM. A second signal skips the grace."""
        loop = asyncio.get_running_loop()
        become_subreaper()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_stop)
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        watching = loop.create_task(self._watch())
        try:
            self._start_stage(Stage.ENGINE)
            self._start_stage(Stage.EDGE)
            stop = loop.create_task(self._stopping.wait())
            await asyncio.wait({watching, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if watching.done():
                watching.result()  # it only ends by an error, which must not pass silently
        finally:
            watching.cancel()
            await self._stop_all()
            self._logs.close()

    # --- starting ----------------------------------------------------------------------------------------------------

    def _start_stage(self, stage: Stage) -> None:
        for child in self._children:
            if child.spec.stage is stage:
                self._start(child)

    def _start(self, child: Child) -> None:
        self._restarts.pop(child.spec.name, None)
        if self._stopping.is_set():
            return
        try:
            with log_pipe() as (near, far):
                self._logs.forward(child.spec.name, near)
                child.process = spawn(child.spec, far)
        except OSError as error:  # no memory, no process slot, no descriptor: all may come back
            self._restart(child, f"cannot be started ({error.strerror})", restart_delay(child, time.monotonic()))
            return
        child.started_at = time.monotonic()
        child.was_ready = False
        child.gone.clear()
        self._note()

    async def _watch(self) -> None:
        """Follow readiness: say it once, start the background children, remember who was part of it."""
        began = time.monotonic()
        announced = background = False
        next_word = FIRST_WORD
        while True:
            now = await self._probe()
            waited = time.monotonic() - began
            if now.ready:
                self._note_ready()
                if not announced:
                    announced = True
                    self._logs.put_plain(self._ready_line.encode())
            elif not announced and waited >= next_word:
                next_word = waited + NEXT_WORD
                self._logs.put("up", f"waiting for {now.missing} ({waited:.0f} s)".encode())
            if not background and (now.ready or waited > BACKGROUND_PATIENCE):
                background = True
                self._start_stage(Stage.BACKGROUND)
            await asyncio.sleep(POLL_RUNNING if now.ready else POLL_STARTING)

    def _note(self) -> None:
        running = {child.spec.name: child.process.pid for child in self._children if child.process is not None}
        self._note_children(running)

    def _note_ready(self) -> None:
        for child in self._children:
            # Background children take no part in readiness: a life without a fall is all they can show.
            if child.spec.stage is not Stage.BACKGROUND or time.monotonic() - child.started_at > CALM:
                child.was_ready = child.process is not None
                child.failures = 0

    # --- death -------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Take leave of everything that ended; what a dead child left behind is ended too."""
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                self._buried(child, child.process.returncode)
        self._end_adopted()

    def _buried(self, child: Child, code: int) -> None:
        child.process = None
        child.gone.set()
        self._note()
        if self._stopping.is_set():
            return
        delay = restart_delay(child, time.monotonic())
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self._restart(child, how, delay)

    def _restart(self, child: Child, cause: str, delay: float) -> None:
        when = f"in {delay:.0f} s" if delay else "now"
        self._logs.put("up", f"{child.spec.name} {cause}; starting it again {when}".encode())
        loop = asyncio.get_running_loop()
        self._restarts[child.spec.name] = loop.call_later(delay, self._start, child)

    def _end_adopted(self) -> None:
        """Kill processes whose parent died: they belong to a child that is gone, and hold its memory and ports."""
        own = {child.process.pid for child in self._children if child.process is not None}
        for orphan in psutil.Process().children():
            if orphan.pid in own:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                if orphan.status() != psutil.STATUS_ZOMBIE:
                    self._logs.put("up", f"ending process {orphan.pid}, left behind by one that died".encode())
                    for process in [orphan, *orphan.children(recursive=True)]:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan.pid, os.WNOHANG)  # a killed one raises SIGCHLD once more and is collected then

    # --- stopping ----------------------------------------------------------------------------------------------------

    def _asked_to_stop(self) -> None:
        if self._stopping.is_set():
            self._impatient = True
            for child in self._children:
                signal_group(child, signal.SIGKILL)
        self._stopping.set()

    async def _stop_all(self) -> None:
        """Stage by stage: no new requests, then the running ones, then the background; finally whatever is left."""
        self._stopping.set()
        self._stop_listening()
        for timer in self._restarts.values():
            timer.cancel()
        for stage in Stage:
            staged = [child for child in self._children if child.spec.stage is stage]
            await asyncio.gather(*(self._stop(child) for child in staged))
        deadline = time.monotonic() + 5.0
        while psutil.Process().children() and time.monotonic() < deadline:
            self._end_adopted()
            await asyncio.sleep(0.02)
        self._end_orphans()

    async def _stop(self, child: Child) -> None:
        if child.process is None:
            return
        self._logs.put("up", f"stopping {child.spec.name}".encode())
        signal_group(child, signal.SIGKILL if self._impatient else signal.SIGTERM)
        try:
            await asyncio.wait_for(child.gone.wait(), child.spec.grace)
        except TimeoutError:
            self._logs.put("up", f"{child.spec.name} did not stop in {child.spec.grace:.0f} s; killing it".encode())
            signal_group(child, signal.SIGKILL)
            await child.gone.wait()


@contextlib.contextmanager
def log_pipe() -> Iterator[tuple[int, int]]:
    """A pipe from a child to the supervisor; both ends are closed when the block is left. Raises OSError.

    Writing never blocks: while the supervisor is stopped (Ctrl-Z is enough), what does not fit is lost, and the product
    goes on. Children are unbuffered, so that Python drops such a line instead of raising.
    """
    near, far = os.pipe()
    try:
        with contextlib.suppress(PermissionError):  # more than this system allows: its own size will do
            fcntl.fcntl(far, fcntl.F_SETPIPE_SZ, LOG_PIPE)
        os.set_blocking(far, False)
        yield near, far
    finally:
        os.close(near)
        os.close(far)


def spawn(spec: Spec, output: int) -> subprocess.Popen[bytes]:
    """Start a child in a process group of its own, which writes to the descriptor `output`. Raises OSError.

    The child cannot see that its lines end on a terminal, so it is told.
    """
    changes = {"HARNESS_PROCESS": spec.name, "PYTHONUNBUFFERED": "1"}
    if read().log_format == "auto" and sys.stdout.isatty():
        changes["HARNESS_LOG_FORMAT"] = "console"
    return subprocess.Popen(
        spec.command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=child_environment(**changes),
        pass_fds=spec.pass_fds,
        process_group=0,
        preexec_fn=die_with_parent,  # safe here: it only calls into the kernel
    )


def signal_group(child: Child, number: signal.Signals) -> None:
    """SIGTERM goes to the child alone, which knows how to stop its own; SIGKILL to its whole group."""
    if child.process is None:
        return
    with contextlib.suppress(ProcessLookupError):
        if number is signal.SIGKILL:
            os.killpg(child.process.pid, number)
        else:
            os.kill(child.process.pid, number)


def die_with_parent() -> None:
    """In a new child: the kernel sends it SIGTERM when its parent dies, however that happens."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def become_subreaper() -> None:
    """Orphans among this process' descendants become its children."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
