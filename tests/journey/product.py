"""The whole product as `harness up` starts it, in a data directory of its own, for tests that use it from outside."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openai
import psutil

ROOT = Path(__file__).resolve().parents[2]


def command(data_dir: Path, *options: str) -> list[str]:
    """What `harness up` runs, also where the console script is not installed."""
    return [sys.executable, str(ROOT / "manage.py"), "up", "--data-dir", str(data_dir), *options]


def refusal(data_dir: Path, *options: str) -> str:
    """Start where it cannot start, and answer what it says on standard error."""
    result = subprocess.run(command(data_dir, *options), capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    return result.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass
class Product:
    """A running product. `seen` are the pids of all its processes that `note_processes` has met."""

    options: Sequence[str]
    data_dir: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="hj-", dir="/tmp")))
    port: int = field(default_factory=free_port)
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._lines: list[str] = []
        self._ended = False
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            command(self.data_dir, "--port", str(self.port), *self.options),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        with self._news:
            return "".join(self._lines)

    def key(self, tenant: str, name: str = "demo") -> str:
        """The secret of a seeded key."""
        keys = json.loads((self.data_dir / "seed-secrets.json").read_text())["keys"]
        return str(next(key["key"] for key in keys if (key["tenant"], key["name"]) == (tenant, name)))

    def client(self, tenant: str = "acme") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key(tenant), max_retries=0, timeout=30)

    def wait_for(self, words: str, patience: float) -> None:
        """Until the product prints a line that starts with `words`."""
        with self._news:
            self._news.wait_for(lambda: self._ended or self._said(words), patience)
            said = self._said(words)
        assert said, f"it never printed {words!r}:\n{self.output[-8000:]}"

    def pid_of(self, name: str) -> int | None:
        """The process that `up` runs under this name."""
        for child in self._supervisor().children():
            try:
                if child.environ().get("HARNESS_PROCESS") == name:
                    return int(child.pid)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return None

    def note_processes(self) -> set[int]:
        """All processes of the product now; remembered, to be looked for after it stopped."""
        now = {child.pid for child in self._supervisor().children(recursive=True)}
        self.seen |= now
        return now

    def stop(self, number: signal.Signals = signal.SIGINT, patience: float = 60.0) -> int:
        """Ctrl-C; answers the exit status."""
        if self.process.poll() is None:
            self.note_processes()
            self.process.send_signal(number)
        status = self.process.wait(patience)
        self._reader.join(5)
        return status

    def close(self) -> None:
        """Stop it if it runs, and remove its data."""
        try:
            self.stop()
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self.release()
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def release(self) -> None:
        """Read no more of what it says. Its process has ended."""
        assert self.process.stdout is not None
        self._reader.join(5)
        self.process.stdout.close()

    def _said(self, words: str) -> bool:
        return any(line.startswith(words) for line in self._lines)

    def _supervisor(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()
