"""The usage spool: what must be billed, on local disk before the client sees the end of its answer.

One SQLite file per scheduler process and epoch, one connection, used on one thread. Two tables: `intents` (dispatched,
not ended) and `usage` (ended, exact). An end moves a row from the first to the second in one transaction. Rows stay
for a while after they have reached the database, because a restart rebuilds the rate windows from them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from scheduler.core.budgets import AccountKey
from tenants.pricing import TokenPrice

_WAITING, _STORED, _SET_ASIDE = 0, 1, 2  # values of usage.stored

_SCHEMA = """
CREATE TABLE IF NOT EXISTS intents (serial INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS usage (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, arrived_at REAL NOT NULL, stored INTEGER NOT NULL DEFAULT 0,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS usage_stored ON usage (stored, arrived_at);
"""


class SpoolError(Exception):
    """The spool cannot be written or read (disk full, file damaged)."""


class LimitCharge(msgspec.Struct, array_like=True, frozen=True):
    """A limit the request was reserved against, so that a restart can charge it again."""

    scope: str
    owner: str
    model: str
    kind: str
    value: int


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known about a request when it is handed to the engine. Instants are Unix seconds."""

    request_id: str
    attempt: int
    tenant_id: str
    tenant_slug: str
    key_id: str
    key_name: str
    tier: str
    model: str
    deployment: str
    stream: bool
    prompt_tokens: int
    max_tokens: int
    arrived_at: float
    dispatched_at: float
    batch_id: str
    policy_version: int
    price: TokenPrice | None  # what it was reserved at, and is billed at whatever becomes of the price book
    limits: tuple[LimitCharge, ...]
    project: str = ""
    leased: tuple[AccountKey, ...] = ()  # accounts of budgets that pay from a lease
    epoch: int


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended. `status` is finished | aborted | failed | interrupted; `attained` None: not judged."""

    intent: Intent
    status: str
    finish_reason: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_at: float | None
    ended_at: float
    batch_size: float
    attained: bool | None
    miss_reason: str
    engine_seconds: float = 0.0  # engine time that it was charged; of an interrupted one, up to its last token


_encode = msgspec.msgpack.Encoder().encode
_decode_intent = msgspec.msgpack.Decoder(Intent).decode
_decode_ending = msgspec.msgpack.Decoder(Ending).decode


class Spool:
    """See the module text. `power_loss`: commits also survive a power cut (FULL, ten times slower)."""

    def __init__(self, path: Path, *, power_loss: bool = False) -> None:
        self.path = path
        try:
            # Transactions are explicit (isolation_level None). Only the loop's thread uses it, but it may be closed
            # by the interpreter's shutdown from another.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={'FULL' if power_loss else 'NORMAL'}")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise SpoolError(f"{path.name}: {error}") from error

    def open_intents(self, intents: Sequence[Intent]) -> list[int]:
        """Write intents in one transaction; answers their serials, in order."""
        with self._transaction():
            return [self._insert("INSERT INTO intents (body) VALUES (?)", _encode(intent)) for intent in intents]

    def end(self, endings: Sequence[tuple[int, Ending]]) -> None:
        """Turn the intents of these serials into usage, in one transaction."""
        with self._transaction():
            for serial, ending in endings:
                self._db.execute("DELETE FROM intents WHERE serial = ?", (serial,))
                arrived_at = ending.intent.arrived_at
                self._insert("INSERT INTO usage (arrived_at, body) VALUES (?, ?)", arrived_at, _encode(ending))

    def intents(self) -> dict[int, Intent]:
        """Dispatched and not ended, by serial."""
        with self._reading():
            rows = self._db.execute("SELECT serial, body FROM intents ORDER BY serial").fetchall()
        return {serial: _decode_intent(body) for serial, body in rows}

    def to_store(self, limit: int) -> list[tuple[int, Ending]]:
        """The oldest ended requests that have not reached the database yet."""
        with self._reading():
            rows = self._db.execute(
                "SELECT seq, body FROM usage WHERE stored = ? ORDER BY seq LIMIT ?", (_WAITING, limit)
            ).fetchall()
        return [(seq, _decode_ending(body)) for seq, body in rows]

    def backlog(self) -> int:
        """How many ended requests have not reached the database yet."""
        with self._reading():
            (count,) = self._db.execute("SELECT COUNT(*) FROM usage WHERE stored = ?", (_WAITING,)).fetchone()
        return int(count)

    def mark_stored(self, seqs: Sequence[int]) -> None:
        """These are in the database."""
        self._mark(seqs, _STORED)

    def set_aside(self, seqs: Sequence[int]) -> None:
        """The database will never take these; they stay until somebody has looked at them."""
        self._mark(seqs, _SET_ASIDE)

    def is_done(self) -> bool:
        """Everything in it is in the database."""
        with self._reading():
            row = self._db.execute(
                "SELECT EXISTS (SELECT 1 FROM intents) OR EXISTS (SELECT 1 FROM usage WHERE stored <> ?)", (_STORED,)
            ).fetchone()
        return not row[0]

    def prune(self, arrived_before: float) -> None:
        """Forget what is in the database and too old to matter to a rate window."""
        with self._transaction():
            self._db.execute("DELETE FROM usage WHERE stored = ? AND arrived_at < ?", (_STORED, arrived_before))

    def recent(self, arrived_since: float) -> list[Ending]:
        """Ended requests that arrived since then, for rebuilding rate windows."""
        with self._reading():
            rows = self._db.execute("SELECT body FROM usage WHERE arrived_at >= ?", (arrived_since,)).fetchall()
        return [_decode_ending(body) for (body,) in rows]

    def probe(self) -> None:
        """Write something and take it back, to see whether the disk takes it. Raises SpoolError."""
        with self._transaction():
            serial = self._insert("INSERT INTO intents (body) VALUES (?)", bytes(4096))
            self._db.execute("DELETE FROM intents WHERE serial = ?", (serial,))

    def close(self) -> None:
        self._db.close()

    def _mark(self, seqs: Sequence[int], mark: int) -> None:
        with self._transaction():
            self._db.executemany("UPDATE usage SET stored = ? WHERE seq = ?", [(mark, seq) for seq in seqs])

    def _insert(self, statement: str, *values: object) -> int:
        serial = self._db.execute(statement, values).lastrowid
        assert serial is not None  # an INSERT always has one
        return serial

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._reading():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise SpoolError(f"{self.path.name}: {error}") from error
