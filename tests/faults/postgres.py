"""A PostgreSQL server of a test's own, which can go away and come back."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.journey.product import free_port

USER = "postgres"  # it refuses to run as root


def missing() -> str | None:
    """What this machine lacks for it; None if nothing."""
    if shutil.which("initdb") is None or shutil.which("pg_ctl") is None:
        return "PostgreSQL's server is not installed (apt-get install postgresql)"
    if os.geteuid() == 0 and USER not in {entry.pw_name for entry in pwd.getpwall()}:
        return f"there is no user {USER} that PostgreSQL could run as"
    return None


class Postgres:
    """Listens on this machine only and trusts it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._run("initdb", "--pgdata", str(folder / "data"), "--username", "harness", "--auth", "trust", "--no-sync")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://harness@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder}"
        self._control("start", "--options", options, "--log", str(self._folder / "log"))

    def go_away(self) -> None:
        """At once, as after a power cut: connections are cut, nobody listens. Nothing to do if it is away already."""
        if (self._folder / "data" / "postmaster.pid").exists():
            self._control("stop", "--mode", "immediate")

    def _control(self, *arguments: str) -> None:
        self._run("pg_ctl", "--pgdata", str(self._folder / "data"), "--wait", *arguments)

    def _run(self, *command: str) -> None:
        prefix = ["runuser", "-u", USER, "--"] if os.geteuid() == 0 else []
        done = subprocess.run(
            [*prefix, *command], cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@contextmanager
def running() -> Iterator[Postgres]:
    folder = Path(tempfile.mkdtemp(prefix="hp-", dir="/tmp"))
    if os.geteuid() == 0:
        shutil.chown(folder, USER)
    try:
        postgres = Postgres(folder)
        try:
            yield postgres
        finally:
            postgres.go_away()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
