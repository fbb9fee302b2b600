"""The scheduler process: staged start, configuration that follows the database, staged stop.

    start   one process per name (a lock) → engines left over are ended → epoch from the database →
            books of this epoch, books of earlier ones closed → configuration → pools → letters whose retry was
            interrupted are opened → listener
    stop    Goodbye, nothing new → pools drain → what is billed goes to the database → listener, lease, files

Every task here has an owner that hears it die: the process then stops, and its supervisor starts it anew.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from scheduler import dead_letters, engine_processes, ownership
from scheduler.clock import Clock, RealClock
from scheduler.core.admission import Admission
from scheduler.core.budgets import AccountKey
from scheduler.core.trace import TraceRecorder
from scheduler.core.types import Reason, Refusal
from scheduler.dead_letters import RetryError
from scheduler.engines import create_engine
from scheduler.engines.simulated import read_record
from scheduler.wire import messages
from scheduler.wire.connection import Connection
from scheduler.wire.session import TELEMETRY, Handler, Server, serve
from scheduler.wire.transport import Address, SocketTransport, Transport
from scheduler.worker.configuration import Configuration
from scheduler.worker.conversation import Answerer, Conversation
from scheduler.worker.database import Status, load_configuration
from scheduler.worker.dead_letters import DeadLetters
from scheduler.worker.endings import Endings
from scheduler.worker.files import EpochFiles
from scheduler.worker.garbage import Garbage
from scheduler.worker.housekeeping import Lease, StatusBoard, watch_engine_processes
from scheduler.worker.intake import Intake
from scheduler.worker.journal import Journal
from scheduler.worker.leases import Leases
from scheduler.worker.ledger import Ledger
from scheduler.worker.limits import LimitsDesk
from scheduler.worker.metrics import Metrics
from scheduler.worker.outbox import Outbox
from scheduler.worker.pool import Pool
from scheduler.worker.races import first
from scheduler.worker.recovery import carry_and_delete, close_books, restore_windows
from scheduler.worker.services import EngineFactory, Services
from scheduler.worker.settlement import Settlement
from scheduler.worker.snapshots import Snapshot
from scheduler.worker.spool import Spool
from scheduler.worker.statistics import Statistics
from scheduler.worker.telemetry import Telemetry
from scheduler.worker.trace_document import trace_document
from tenants.budgets import Charged
from tenants.changes import Poller
from tenants.database import DatabaseAway, DatabaseThread

log = structlog.get_logger(__name__)

LAST_DRAIN_SECONDS = 5.0  # for carrying usage to the database at the end
RETRY_STARTUP = 2.0  # seconds: what callers are told while this process goes away


class StartError(Exception):
    """The process cannot start; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a scheduler process is told. `pools` empty: all of them."""

    name: str
    address: Address
    data_dir: Path
    run_dir: Path
    spool_dir: Path
    salt_secret: bytes
    pools: tuple[str, ...] = ()
    drain_seconds: float = 10.0
    power_loss: bool = False  # books survive a power cut, at ten times the cost of a commit


class Runtime:
    """See the module text. One per process; `run` is its whole life."""

    def __init__(
        self,
        options: Options,
        *,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
        transport: Transport | None = None,
        engine_factory: EngineFactory = create_engine,
    ) -> None:
        self.pools: dict[str, Pool] = {}
        self._options = options
        self._clock = clock or RealClock()
        self._wall = wall
        self._transport = transport or SocketTransport()
        self._engine_factory = engine_factory
        self._database = DatabaseThread("scheduler")
        self._ledger = Ledger(options.name, self._charged)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pool_tasks: dict[str, asyncio.Task[None]] = {}
        self._pools_made = 0
        self._refreshing = asyncio.Lock()
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._server: Server | None = None
        self._failure: str | None = None
        self._lock: int | None = None

    async def run(self) -> str | None:
        """Start, serve until asked to stop, stop. Answers why it stopped by itself, or None. Raises StartError."""
        await self.start()
        await self._stop_asked.wait()
        await self.stop()
        return self._failure

    def ask_to_stop(self) -> None:
        """The first call drains, a second one stops at once."""
        if self._stop_asked.is_set():
            self._hurry.set()
        self._stop_asked.set()

    # --- start ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Everything up to the listener; engines go on starting in tasks of their own. Raises StartError."""
        options = self._options
        for folder in (options.run_dir, options.spool_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = _lock(options.run_dir, options.name)
        await asyncio.to_thread(engine_processes.kill_stale, options.run_dir, options.name)
        taken = self._clock.now()
        epoch = await self._take_epoch()
        self._make_services(epoch)
        self._lease = Lease(options.name, epoch, taken, self._database, self._clock, self._superseded)
        self._board = StatusBoard(options.name, epoch, self._database, self._clock)
        self._make_front()
        await self._recover(epoch)
        await self._follow_configuration()
        await self._database.run(dead_letters.reopen_interrupted, list(self.pools))
        self._server = await serve(
            options.address, self._converse, welcome=self._welcome, transport=self._transport, clock=self._clock
        )
        self._start_tasks()
        log.info("scheduler listens", name=options.name, epoch=epoch, models=sorted(self.pools))

    async def _take_epoch(self) -> int:
        options = self._options
        try:
            return await self._database.run(ownership.take, options.name, str(options.address))
        except ownership.OwnedElsewhereError as error:
            raise StartError(str(error)) from error
        except DatabaseAway as error:
            raise StartError(f"The database cannot be used ({type(error).__name__}: {error}).") from error

    def _make_services(self, epoch: int) -> None:
        options, clock, admission = self._options, self._clock, Admission()
        files = EpochFiles(options.spool_dir, options.name, epoch)
        spool = Spool(files.spool, power_loss=options.power_loss)
        journal = Journal(files.journal, power_loss=options.power_loss)
        settlement = Settlement(spool, journal, self._ledger.store, clock, self._wall)
        outbox, statistics, traces = Outbox(settlement.commit), Statistics(Metrics()), TraceRecorder()
        self.services = Services(
            clock=clock,
            wall=self._wall,
            data_dir=options.data_dir,
            epoch=epoch,
            drain_seconds=options.drain_seconds,
            salt_secret=options.salt_secret,
            create_engine=self._engine_factory,
            admission=admission,
            settlement=settlement,
            outbox=outbox,
            endings=Endings(clock, admission, settlement, outbox, statistics, traces, epoch),
            statistics=statistics,
            traces=traces,
            dead_letters=DeadLetters(clock, self._database),
            garbage=Garbage(),
            hurry=self._hurry,
        )

    def _make_front(self) -> None:
        services = self.services
        self._budget_leases = Leases(
            self._options.name,
            services.epoch,
            services.admission.budgets,
            self._clock,
            self._wall,
            services.statistics.budget_alert,
        )
        self._intake = Intake(services, self.pools, self._lease.admits, self.refresh, self._budget_leases)
        self._telemetry = Telemetry(self._options.name, self.services, self.pools, self._publish)
        self._answers: Mapping[str, Answerer] = {
            "limits": LimitsDesk(services, self.pools, self._budget_leases).answer,
            "queue_status": self._answer_queue_status,
            "metrics": self._answer_metrics,
            "simulated_request": self._answer_simulated_request,
            "trace": self._answer_trace,
            "retry_dead_letter": self._answer_retry,
        }

    async def _recover(self, epoch: int) -> None:
        options = self._options
        closed, endings = await asyncio.to_thread(close_books, options.spool_dir, options.name, epoch)
        restore_windows(self.services.admission, endings, self._wall(), self._clock.now())
        self._spawn(
            "recovery", carry_and_delete(closed, self._ledger.store, self._ledger.release, self._clock), ends=True
        )

    async def _follow_configuration(self) -> None:
        self._poller = Poller(
            self._options.name, "scheduler", info=self._info, clock=self._clock.now, sleep=self._clock.sleep
        )
        self._poller.on_change(self._changed)
        await self._poller.start()

    def _start_tasks(self) -> None:
        self._spawn("lease", self._lease.run(), ends=True)
        self._spawn("settlement", self.services.settlement.run())
        self._spawn("budgets", self._budget_leases.run())
        self._spawn("status", self._board.run())
        self._spawn("telemetry", self._telemetry.run())
        self._spawn("dead-letters", self.services.dead_letters.run())
        processes = watch_engine_processes(self._options.run_dir, self._options.name, self._clock)
        self._spawn("engine-processes", processes)
        self._spawn("garbage", self.services.garbage.tend(self._clock, self._is_idle))

    def _is_idle(self) -> bool:
        return not any(pool.flights for pool in self.pools.values())

    # --- configuration ----------------------------------------------------------------------------------------------

    async def _changed(self, version: int) -> None:
        await self.refresh()

    async def refresh(self) -> None:
        """Load the configuration and act on it."""
        async with self._refreshing:
            configuration = await self._database.run(load_configuration, self._options.pools)
            self.services.configuration = configuration
            for pool in self.pools.values():
                pool.reconfigure()
            self._reconcile(configuration)

    def _reconcile(self, configuration: Configuration) -> None:
        if self._stop_asked.is_set():
            return
        for model, pool in self.pools.items():
            pool.retarget(configuration.deployments.get(model))
        for model, spec in configuration.deployments.items():
            if model not in self.pools:
                self._pools_made += 1
                label = f"{model[:32]}-{self.services.epoch}.{self._pools_made}"
                pool = self.pools[model] = Pool(spec, label, self.services, self._tell_state)
                self._pool_tasks[model] = asyncio.create_task(pool.run(), name=f"pool-{model}")
                self._pool_tasks[model].add_done_callback(partial(self._pool_done, pool))
                self._tell_state(pool)
        self.services.statistics.forget(set(configuration.tiers), set(self.pools))

    def _pool_done(self, pool: Pool, task: asyncio.Task[None]) -> None:
        del self.pools[pool.model], self._pool_tasks[pool.model]
        self._tell_models()
        if not task.cancelled() and task.exception() is not None:
            self._fail(f"the pool of {pool.model} failed", task.exception())
        elif pool.model in self.services.configuration.deployments:
            self._reconcile(self.services.configuration)  # it was deployed again while it drained

    def _tell_state(self, pool: Pool) -> None:
        self._board.put(pool.spec.id, Status(str(pool.state), pool.message, pool.hint))
        self._tell_models()

    def _tell_models(self) -> None:
        if self._server is not None:  # None: not listening yet
            self._server.broadcast(messages.Models(self._models()))

    def _models(self) -> dict[str, str]:
        return {model: str(pool.state) for model, pool in self.pools.items()}

    # --- the wire ---------------------------------------------------------------------------------------------------

    def _welcome(self) -> messages.Welcome:
        return messages.Welcome(self._options.name, self.services.epoch, self._models())

    def _converse(self, connection: Connection, hello: messages.Hello) -> Handler:
        return Conversation(connection, hello.peer, self._intake, self._answers)

    def _publish(self, snapshot: Snapshot) -> None:
        if self._server is not None:
            self._server.broadcast(messages.Snapshot(snapshot.seq, snapshot.as_dict()), TELEMETRY)

    async def _answer_queue_status(self, args: Mapping[str, Any]) -> dict[str, Any]:
        return self._telemetry.snapshot().queue_status()

    async def _answer_metrics(self, args: Mapping[str, Any]) -> str:
        return self.services.statistics.metrics.render(self._telemetry.snapshot(), self.services.settlement.backlog)

    async def _answer_simulated_request(self, args: Mapping[str, Any]) -> dict[str, Any] | None:
        return await asyncio.to_thread(read_record, self._options.data_dir, str(args.get("id", "")))

    async def _answer_trace(self, args: Mapping[str, Any]) -> dict[str, Any] | None:
        trace = self.services.traces.find(str(args.get("id", "")))
        return None if trace is None else trace_document(trace, redacted=bool(args.get("redacted")))

    async def _answer_retry(self, args: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"retried_as": await self.services.dead_letters.retry(int(args["id"]), self._intake.submit)}
        except RetryError as error:
            return {"refused": str(error)}

    def _info(self) -> dict[str, Any]:
        return {"epoch": self.services.epoch, "models": self._models()}

    def _charged(self, charged: Charged) -> None:
        """The ledger has taken usage: what soft budgets have spent, and levels that were passed."""
        for key, spent in charged.spent.items():
            self.services.admission.budgets.charged(AccountKey(*key), spent)
        for alert in charged.alerts:
            self.services.statistics.budget_alert(alert)

    # --- stop -------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """See the module text. Bounded by the drain time, the engines' own end and LAST_DRAIN_SECONDS."""
        self._stop_asked.set()
        assert self._server is not None  # it has started
        self._server.broadcast(messages.Goodbye("draining"))
        await self._intake.close(Refusal(Reason.DRAINING, "The scheduler is stopping.", RETRY_STARTUP))
        for pool in self.pools.values():
            pool.retarget(None)
        await asyncio.gather(*self._pool_tasks.values(), return_exceptions=True)
        for name in list(self._tasks):
            await self._cancel(name)
        await first(self.services.settlement.drain(), self._clock.sleep(LAST_DRAIN_SECONDS))
        if self.services.settlement.is_done():
            await self._budget_leases.release()
        await self._board.write()
        await self.services.dead_letters.write()
        self.services.outbox.flush()
        await self._server.aclose()
        await self._poller.aclose()
        await self._release()
        self.services.settlement.close()
        log.info("scheduler stopped", name=self._options.name, epoch=self.services.epoch)

    async def _release(self) -> None:
        """The lease, the database threads and the lock; a database that is away changes nothing."""
        options = self._options
        try:
            await self._database.run(ownership.release, options.name, self.services.epoch)
        except DatabaseAway as error:
            log.warning("lease cannot be released; it ends by itself", error=type(error).__name__)
        await self._database.aclose()
        await self._ledger.aclose()
        await self._budget_leases.aclose()
        await asyncio.to_thread(engine_processes.record, options.run_dir, options.name, [])
        if self._lock is not None:
            os.close(self._lock)

    # --- tasks ------------------------------------------------------------------------------------------------------

    def _spawn(self, name: str, work: Coroutine[Any, Any, None], *, ends: bool = False) -> None:
        """Run `work` beside; `ends`: it may end by itself."""
        task = self._tasks[name] = asyncio.create_task(work, name=name)

        def done(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                return
            error = task.exception()
            if error is not None or not ends:
                self._fail(f"the task {name} ended", error)

        task.add_done_callback(done)

    async def _cancel(self, name: str) -> None:
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _superseded(self) -> None:
        self._hurry.set()
        self._fail("another scheduler has taken over", None)

    def _fail(self, reason: str, error: BaseException | None) -> None:
        log.critical("scheduler stops by itself", reason=reason, exc_info=error)
        self._failure = self._failure or reason
        self._stop_asked.set()


def _lock(run_dir: Path, name: str) -> int:
    """Hold the name on this machine; the kernel gives it back whatever happens to this process. Raises StartError."""
    fd = os.open(run_dir / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise StartError(f"A scheduler named {name!r} is running on this data directory already.") from error
    return fd
