"""The environment, read once, typed; nonsense is refused with a sentence that names the variable.

Besides `settings.py` this is the only module that reads `os.environ`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
LOG_FORMATS = ("auto", "json", "console")
DURABILITIES = ("process", "power-loss")
LEAST_MONTHS = 3  # for which usage is kept, if it is not kept for ever: until then its month is not closed


class EnvError(Exception):
    """A variable holds something that cannot be meant."""


@dataclass(frozen=True)
class Env:
    """What the environment says. Paths are absolute."""

    data_dir: Path
    database_url: str
    redis_url: str | None
    secret_key: str | None
    allowed_hosts: tuple[str, ...]
    trusted_proxies: tuple[str, ...]
    csrf_trusted_origins: tuple[str, ...]
    engine: str | None  # engine of the seeded demo deployment; None: not said
    model: str | None
    durability: str  # what usage survives: the death of any process, or a power cut too
    log_level: str
    log_format: str  # auto: console on a terminal, JSON elsewhere
    usage_months: int | None  # whole months for which the ledger is kept; None: for ever
    debug: bool
    process: str  # name of this process in heartbeats and logs, set by `harness up`


def _list(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _flag(name: str, value: str) -> bool:
    lowered = value.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("", "0", "false", "no", "off"):
        return False
    raise EnvError(f"{name}={value!r} is neither true nor false; use 1 or 0.")


def _networks(name: str, value: str) -> tuple[str, ...]:
    """Addresses and networks. Whoever is in one may say where a request comes from, so there is none for everybody."""
    entries = _list(value)
    for entry in entries:
        try:
            ipaddress.ip_network(entry)
        except ValueError as error:
            raise EnvError(f"{name}: {entry!r} is not an address or network (like 10.1.0.0/16).") from error
    return entries


def _months(name: str, value: str) -> int | None:
    if not value.strip():
        return None
    if not value.strip().isdecimal() or int(value) < LEAST_MONTHS:
        raise EnvError(f"{name}={value!r} is not a number of months; use {LEAST_MONTHS} or more.")
    return int(value)


def read(environ: Mapping[str, str] | None = None) -> Env:
    """Read and check all HARNESS_* variables. Raises EnvError naming the first bad one."""
    env = os.environ if environ is None else environ
    data_dir = Path(env.get("HARNESS_DATA_DIR") or BASE_DIR / "var").expanduser().absolute()
    level = (env.get("HARNESS_LOG_LEVEL") or "INFO").upper()
    if level not in LOG_LEVELS:
        raise EnvError(f"HARNESS_LOG_LEVEL={level!r} is not one of {', '.join(LOG_LEVELS)}.")
    log_format = (env.get("HARNESS_LOG_FORMAT") or "auto").lower()
    if log_format not in LOG_FORMATS:
        raise EnvError(f"HARNESS_LOG_FORMAT={log_format!r} is not one of {', '.join(LOG_FORMATS)}.")
    durability = (env.get("HARNESS_DURABILITY") or "process").lower()
    if durability not in DURABILITIES:
        raise EnvError(f"HARNESS_DURABILITY={durability!r} is not one of {', '.join(DURABILITIES)}.")
    redis_url = env.get("HARNESS_REDIS_URL") or None
    if redis_url and not redis_url.startswith(("redis://", "rediss://", "unix://")):
        raise EnvError("HARNESS_REDIS_URL must start with redis://, rediss:// or unix://.")
    database_url = env.get("HARNESS_DATABASE_URL") or f"sqlite:///{data_dir}/harness.sqlite3"
    if not database_url.startswith(("sqlite://", "postgres://", "postgresql://")):
        raise EnvError("HARNESS_DATABASE_URL must start with sqlite:// or postgresql://.")
    return Env(
        data_dir=data_dir,
        database_url=database_url,
        redis_url=redis_url,
        secret_key=env.get("HARNESS_SECRET_KEY") or None,
        allowed_hosts=_list(env.get("HARNESS_ALLOWED_HOSTS") or "127.0.0.1,localhost,[::1]"),
        trusted_proxies=_networks("HARNESS_TRUSTED_PROXIES", env.get("HARNESS_TRUSTED_PROXIES", "")),
        csrf_trusted_origins=_list(env.get("HARNESS_CSRF_TRUSTED_ORIGINS", "")),
        engine=env.get("HARNESS_ENGINE") or None,
        model=env.get("HARNESS_MODEL") or None,
        durability=durability,
        log_level=level,
        log_format=log_format,
        usage_months=_months("HARNESS_USAGE_MONTHS", env.get("HARNESS_USAGE_MONTHS", "")),
        debug=_flag("HARNESS_DEBUG", env.get("HARNESS_DEBUG", "")),
        process=env.get("HARNESS_PROCESS") or f"pid-{os.getpid()}",
    )


def child_environment(**changes: str) -> dict[str, str]:
    """This process' environment with `changes`, for a process that it starts."""
    return {**os.environ, **changes}


def secret_file(path: Path, size: int = 32) -> bytes:
    """The secret in `path`, created once with O_EXCL and mode 0600; two processes that race get the same bytes.

    The bytes are hex text on disk. Raises OSError when the folder is not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    if not path.exists():
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(size))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(scratch, path)  # never a half-written secret under the final name
        finally:
            scratch.unlink(missing_ok=True)
    return bytes.fromhex(path.read_text().strip())
