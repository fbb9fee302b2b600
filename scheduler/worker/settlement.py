"""Billing that survives: intent at dispatch, progress per step, exact usage before the client sees the end.

    begin(intents) ──► moved(flight)* ──► ended(flight, ending)         on the loop, in this order
                             └───── commit() ─────┘                     once per flush, before its frames go out

`commit` writes one journal append and one spool transaction for everything since the last one. A background task
carries ended requests from the spool to the database; while that is away they wait in the spool. When the spool itself
cannot be written (disk full), `available` turns False: new requests are refused, running ones finish and their ends
wait in memory until it can be written again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog

from scheduler.clock import Clock
from scheduler.worker.flight import Flight
from scheduler.worker.journal import Journal, JournalError
from scheduler.worker.spool import Ending, Intent, Spool, SpoolError

log = structlog.get_logger(__name__)

DRAIN_BATCH = 500  # rows a database transaction
DRAIN_EVERY = 0.5  # seconds between two looks at the spool
RETRY_EVERY = 1.0  # seconds between two tries while the spool or the database is away
KEEP_SECONDS = 90.0  # a rate window is a minute; rows younger than this survive for rebuilding it
PRUNE_EVERY = 30.0  # seconds

Store = Callable[[Sequence[Ending]], Awaitable[list[int]]]
"""Writes rows to the database, idempotently, and answers the positions of those that it will never take.

Raises StoreError when the database is away.
"""


class StoreError(Exception):
    """The database cannot take usage rows now."""


class Settlement:
    """The books of one scheduler process and epoch. Files are written on the loop's thread."""

    def __init__(self, spool: Spool, journal: Journal, store: Store, clock: Clock, wall: Callable[[], float]) -> None:
        self._spool = spool
        self._journal = journal
        self._store = store
        self._clock = clock
        self._wall = wall
        self._running: dict[int, Flight] = {}  # by serial: open intents
        self._moved: dict[int, Flight] = {}  # have progressed since the last commit
        self._ended: list[tuple[int, Ending]] = []  # not committed yet
        self._pruned_at = clock.now()
        self.available = True
        self.backlog = 0  # rows in the spool that wait for the database, as last counted

    # --- on the way of a request ------------------------------------------------------------------------------------

    def begin(self, dispatched: Sequence[tuple[Flight, Intent]]) -> None:
        """Write the intents of one decision, all or none. Raises SpoolError: nothing may be dispatched then."""
        try:
            serials = self._spool.open_intents([intent for _, intent in dispatched])
        except SpoolError as error:
            self._lost("spool", error)
            raise
        for serial, (flight, _) in zip(serials, dispatched, strict=True):
            flight.serial = serial
            self._running[serial] = flight

    def moved(self, flight: Flight) -> None:
        """The flight has delivered tokens."""
        self._moved[flight.serial] = flight

    def ended(self, flight: Flight, ending: Ending) -> None:
        """The flight is over; exact counts."""
        self._running.pop(flight.serial, None)
        self._moved.pop(flight.serial, None)
        self._ended.append((flight.serial, ending))

    def commit(self) -> None:
        """Make everything since the last commit durable. Never raises: see the module text."""
        self._commit_progress()
        if self._ended:
            self._commit_endings()

    # --- behind the requests ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry rows to the database until cancelled."""
        while True:
            healthy = await self.drain()
            await self._clock.sleep(DRAIN_EVERY if healthy else RETRY_EVERY)

    async def drain(self) -> bool:
        """Carry everything that has ended to the database now; False if spool or database is away."""
        try:
            if not self.available:
                self._recover()
            await carry(self._spool, self._store)
            self._prune()
            self.backlog = 0
        except StoreError as error:
            self.backlog = self._spool.backlog()
            log.warning("usage waits in the spool", rows=self.backlog, error=str(error))
            return False
        except (SpoolError, JournalError) as error:
            self._lost("spool", error)
            return False
        return True

    def is_done(self) -> bool:
        """Everything that was dispatched has ended and is in the database."""
        try:
            return not self._running and not self._ended and self._spool.is_done()
        except SpoolError:
            return False

    def close(self) -> None:
        """Commit what is left and close the files."""
        self.commit()
        self._journal.close()
        self._spool.close()

    def open_intents(self) -> int:
        """How many requests are dispatched and not ended (for conservation checks)."""
        return len(self._running)

    # --- details ----------------------------------------------------------------------------------------------------

    def _commit_progress(self) -> None:
        moved, self._moved = self._moved, {}
        if not moved:
            return
        try:
            self._journal.append([(serial, flight.progress()) for serial, flight in moved.items()])
            if self._journal.is_long:
                self._journal.compact([(serial, flight.progress()) for serial, flight in self._running.items()])
        except JournalError as error:
            self._moved = moved  # cumulative, so that the next append makes up for this one
            self._lost("journal", error)

    def _commit_endings(self) -> None:
        try:
            self._spool.end(self._ended)
        except SpoolError as error:
            self._lost("spool", error)
            return
        self._ended = []

    def _lost(self, what: str, error: Exception) -> None:
        if self.available:
            log.error(f"{what} cannot be written; new requests are refused", ends=len(self._ended), error=str(error))
        self.available = False

    def _recover(self) -> None:
        """Both files take a write again: go on as before. Raises SpoolError or JournalError while they do not."""
        self._spool.probe()
        self._journal.probe()
        self._commit_progress()
        self._commit_endings()
        log.info("spool and journal can be written again")
        self.available = True

    def _prune(self) -> None:
        now = self._clock.now()
        if now - self._pruned_at >= PRUNE_EVERY:
            self._spool.prune(self._wall() - KEEP_SECONDS)
            self._pruned_at = now


async def carry(spool: Spool, store: Store) -> None:
    """Carry all ended requests of a spool to the database. Raises StoreError or SpoolError; carrying on is safe."""
    while rows := spool.to_store(DRAIN_BATCH):
        rejected = set(await store([ending for _, ending in rows]))
        spool.mark_stored([seq for position, (seq, _) in enumerate(rows) if position not in rejected])
        if rejected:
            spool.set_aside([seq for position, (seq, _) in enumerate(rows) if position in rejected])
            log.error("the ledger refuses rows; they stay in the spool", spool=spool.path.name, rows=len(rejected))
