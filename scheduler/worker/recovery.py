"""After a crash: the books of earlier epochs are closed, carried to the database, and only then deleted.

A request that was dispatched and has no end was interrupted: it is billed for what the journal says was delivered.
Requests of the last minute are counted again in the rate windows, so that a restart gives nobody a second allowance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from scheduler.clock import Clock
from scheduler.core.admission import Admission
from scheduler.core.types import Limit, Reason
from scheduler.worker import journal
from scheduler.worker.files import EpochFiles, epochs_of
from scheduler.worker.journal import JournalError, Progress
from scheduler.worker.settlement import Store, StoreError, carry
from scheduler.worker.spool import Ending, Intent, Spool, SpoolError

log = structlog.get_logger(__name__)

WINDOW_SECONDS = 60.0
RETRY_SECONDS = 5.0
NOTHING = Progress(0, 0.0, 0.0)

Release = Callable[[int], Awaitable[None]]
"""Gives the leases of an epoch back. Raises StoreError when the database is away."""


def close_books(folder: Path, process: str, epoch: int) -> tuple[list[EpochFiles], list[Ending]]:
    """Settle the open intents of every epoch of `process` before `epoch`; answers the files and all their endings.

    Blocking; run it before requests are taken in. Books that cannot be read are left where they are and logged: a start
    of the version that wrote them settles them.
    """
    closed: list[EpochFiles] = []
    endings: list[Ending] = []
    for files in epochs_of(folder, process):
        if files.epoch >= epoch:
            continue
        try:
            endings += _close(files)
        except (SpoolError, JournalError) as error:
            log.error(
                "books of an earlier epoch cannot be read; they are kept", spool=files.spool.name, error=str(error)
            )
            continue
        closed.append(files)
    return closed, endings


def restore_windows(admission: Admission, endings: Sequence[Ending], wall: float, now: float) -> None:
    """Count requests that arrived in the last minute in their rate windows again."""
    for ending in endings:
        intent = ending.intent
        if wall - intent.arrived_at < WINDOW_SECONDS:
            limits = [Limit(one.scope, one.owner, one.model, one.kind, one.value) for one in intent.limits]
            tokens = ending.prompt_tokens + ending.completion_tokens
            admission.restore(limits, intent.model, tokens, now - (wall - intent.arrived_at), now)


async def carry_and_delete(closed: Sequence[EpochFiles], store: Store, release: Release, clock: Clock) -> None:
    """Carry closed books to the database, however long it is away, and delete what has arrived there.

    Then the leases of budgets come back that their epoch had.
    """
    waiting = list(closed)
    while waiting:
        still: list[EpochFiles] = []
        for files in waiting:
            if not await _carry(files, store, release):
                still.append(files)
        waiting = still
        if waiting:
            await clock.sleep(RETRY_SECONDS)


async def _carry(files: EpochFiles, store: Store, release: Release) -> bool:
    """False: try again later."""
    try:
        spool = await asyncio.to_thread(Spool, files.spool)
    except SpoolError as error:
        log.error("spool of an earlier epoch cannot be read; it is kept", spool=files.spool.name, error=str(error))
        return True
    try:
        await carry(spool, store)
        done = spool.is_done()
        if done:
            await release(files.epoch)
    except (StoreError, SpoolError) as error:
        log.warning("usage of an earlier epoch waits in its spool", spool=files.spool.name, error=str(error))
        return False
    finally:
        spool.close()
    if done:
        files.delete()
        log.info("books of an earlier epoch are in the database", spool=files.spool.name)
    return True


def _close(files: EpochFiles) -> list[Ending]:
    """Give every open intent its end; all endings of the epoch that are still in its spool."""
    spool = Spool(files.spool)
    try:
        open_intents = spool.intents()
        progress = journal.read(files.journal) if open_intents else {}
        interrupted = [
            (serial, interruption(intent, progress.get(serial, NOTHING))) for serial, intent in open_intents.items()
        ]
        spool.end(interrupted)
        if interrupted:
            log.warning("requests were interrupted", spool=files.spool.name, requests=len(interrupted))
        return spool.recent(0.0)
    finally:
        spool.close()


def interruption(intent: Intent, progress: Progress) -> Ending:
    """The end of a request whose scheduler stopped under it: billed for what had been delivered."""
    return Ending(
        intent=intent,
        status="interrupted",
        finish_reason="",
        reason=str(Reason.SHUTDOWN),
        prompt_tokens=intent.prompt_tokens,
        cached_tokens=progress.cached_tokens,
        completion_tokens=progress.tokens,
        first_token_at=intent.dispatched_at + progress.first_token if progress.tokens else None,
        ended_at=intent.dispatched_at + progress.last_token,
        batch_size=0.0,
        attained=False,
        miss_reason="interrupted",
        engine_seconds=progress.engine_seconds,
    )
