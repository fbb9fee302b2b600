"""Where a scheduler process keeps its books: one spool and one journal per epoch, named by process and epoch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SPOOL_NAME = re.compile(r"spool-(?P<process>.+)-(?P<epoch>\d+)\.sqlite3")


@dataclass(frozen=True, slots=True)
class EpochFiles:
    """The files of one process and epoch in `folder`."""

    folder: Path
    process: str
    epoch: int

    @property
    def spool(self) -> Path:
        return self.folder / f"spool-{self.process}-{self.epoch}.sqlite3"

    @property
    def journal(self) -> Path:
        return self.folder / f"journal-{self.process}-{self.epoch}.bin"

    def delete(self) -> None:
        """The journal last: without a spool it says nothing, without it a spool would say too little."""
        for path in (
            self.spool,
            self.spool.with_name(f"{self.spool.name}-wal"),
            self.spool.with_name(f"{self.spool.name}-shm"),
            self.journal.with_suffix(".new"),
            self.journal,
        ):
            path.unlink(missing_ok=True)


def epochs_of(folder: Path, process: str) -> Iterator[EpochFiles]:
    """The files of every epoch of `process` in `folder`, oldest first."""
    matches = (_SPOOL_NAME.fullmatch(path.name) for path in folder.glob("spool-*.sqlite3"))
    epochs = sorted(int(match["epoch"]) for match in matches if match and match["process"] == process)
    for epoch in epochs:
        yield EpochFiles(folder, process, epoch)
