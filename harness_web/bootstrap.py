"""What `harness up` does before it starts any process; every failure is an `UpError`, one sentence for the operator.

    only_one      one product per data directory
    listen        the port, taken now and kept, so that nothing else gets it
    check_disk
    migrate       under a lock
    seed          an empty database gets the demo; an existing one only what was asked for by option
    prepare_model

This is the one module of the edge that reaches into scheduling beside `scheduler/gateway.py`: it sets up a machine
for all parts of the product.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, transaction
from django.db.migrations.executor import MigrationExecutor

from scheduler import demo_model
from scheduler.core.policies import POLICIES
from scheduler.models import Deployment
from tenants.database import complaint
from tenants.models import Tenant, Tier

DEMO = Path(__file__).resolve().parent / "demo"
DEMO_MODEL = "demo"  # name under which the seeded deployment is served
ENGINES = tuple(sorted(path.stem.removeprefix("deployment-") for path in DEMO.glob("deployment-*.yaml")))
DEFAULT_ENGINE = "vllm"
SECRETS_FILE = "seed-secrets.json"
NEEDED_BYTES = 256 * 1024 * 1024  # free space below which a start would soon end in errors
MAX_PORT = 65535
BACKLOG = 2048  # connections that wait while the web processes start or are busy

Say = Callable[[str], None]


class UpError(Exception):
    """Harness cannot start; the text says why and what to do."""


@dataclass(frozen=True)
class Demo:
    """What options and environment say about the seeded deployment. None: nothing was said."""

    engine: str | None = None
    model: str | None = None  # folder or id of a model for vLLM

    def __post_init__(self) -> None:
        if self.engine is not None and self.engine not in ENGINES:
            raise UpError(f"There is no engine {self.engine!r}; choose one of: {', '.join(ENGINES)}.")
        if self.model is not None and self.engine == "simulated":
            raise UpError("The simulated engine runs no model: leave --model (HARNESS_MODEL) out.")

    def document(self) -> dict[str, Any]:
        """The `apply` document of the demo deployment."""
        document = _load(f"deployment-{self.engine or DEFAULT_ENGINE}.yaml")
        if self.model is not None:
            options = document["deployments"][0]["options"]
            path = Path(self.model).expanduser()
            del options["path"]
            options |= {"path": str(path.absolute())} if path.exists() else {"model": self.model}
        return document


# --- the machine ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_one(run_dir: Path) -> Iterator[None]:
    """Hold the data directory: a second `harness up` on it raises UpError. The kernel frees it with the process."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (run_dir / "up.pid").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UpError(
                f"Harness already runs on {run_dir.parent} (process {lock.read().strip() or 'unknown'}): "
                "stop it first, or choose another --data-dir."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for the web processes to share; port 0 takes any free one. Raises UpError."""
    if not 0 <= port <= MAX_PORT:  # the resolver would take the remainder
        raise UpError(f"Port {port} does not exist: choose one from 1 to {MAX_PORT}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it. uvicorn takes a socket that it is given for a Unix one and would leave it out, and
            # every answer would wait 40 ms for the client's delayed acknowledgement of its headers.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            on_failure.pop_all()
    except OSError as error:
        raise UpError(_cannot_listen(host, port, error)) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use by another program: choose another with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} needs rights that this user lacks: choose one above 1023."
    return f"Cannot listen on {host} port {port}: {error.strerror or error}."


def check_disk(data_dir: Path, needed: int = NEEDED_BYTES) -> None:
    """Raises UpError when the data directory's disk has less than `needed` bytes free."""
    free = shutil.disk_usage(data_dir).free
    if free < needed:
        raise UpError(
            f"The disk of {data_dir} is full: {free // 2**20} MB free, {needed // 2**20} MB needed. "
            "Free some space or choose another --data-dir."
        )


@contextlib.contextmanager
def clear_errors(data_dir: Path) -> Iterator[None]:
    """Turn what the disk and the database say into an UpError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UpError(f"The disk of {data_dir} is full: free some space and start again.") from error
        raise UpError(f"{error.filename or data_dir}: {error.strerror or error}.") from error
    except OperationalError as error:
        if "disk is full" in str(error):
            raise UpError(f"The disk of {data_dir} is full: free some space and start again.") from error
        raise UpError(f"The database cannot be used: {complaint(error)}.") from error
    except CommandError as error:
        raise UpError(str(error)) from error
    except demo_model.DemoModelError as error:
        raise UpError(str(error)) from error


# --- the database ---------------------------------------------------------------------------------------------------


def migrate(say: Say) -> None:
    """Bring the schema up to date; quick when it is."""
    executor = MigrationExecutor(connection)
    if plan := executor.migration_plan(executor.loader.graph.leaf_nodes()):
        say(f"preparing the database ({len(plan)} steps)")
        call_command("migrate", interactive=False, verbosity=0)


def seed(demo: Demo, data_dir: Path, say: Say) -> None:
    """Create the demo in an empty database; in any other, change only the demo deployment, and only if asked to.

    A deployment that already runs on the engine asked for keeps its options: an operator may have tuned them.
    """
    if not Tier.objects.exists() and not Tenant.objects.exists():
        _seed_everything(demo, data_dir, say)
    elif demo.model is not None or demo.engine not in (None, _demo_engine()):
        say(f"changing the deployment `{DEMO_MODEL}`")
        apply(demo.document())


def check_policy(name: str) -> None:
    """Raises UpError for a policy that there is not, before anything is created."""
    if name not in POLICIES:
        raise UpError(f"There is no policy {name!r}; choose one of: {', '.join(sorted(POLICIES))}.")


def choose_policy(name: str) -> None:
    """Make `name`, which there is, the scheduling policy."""
    apply({"version": 1, "policy": {"name": name}})


def apply(document: Mapping[str, Any]) -> dict[str, Any]:
    """Run `harness apply` on a document and return what it created. Raises CommandError."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(document, file)  # JSON is YAML
        file.flush()
        answer = io.StringIO()
        call_command("apply", file.name, "--json", stdout=answer)
    created: dict[str, Any] = json.loads(answer.getvalue())["created"]
    return created


def _seed_everything(demo: Demo, data_dir: Path, say: Say) -> None:
    say("creating three tiers, three tenants and their keys")
    document = _load("demo.yaml") | {"deployments": demo.document()["deployments"]}
    with transaction.atomic():  # keys whose secrets nobody has would be worse than none
        keys = apply(document)["keys"]
        _write_secrets(data_dir / SECRETS_FILE, keys)
    for key in keys:
        say(f"  key {key['tenant']}/{key['name']}: {key['key']}")
    say(f"these keys are shown only now; they are also in {data_dir / SECRETS_FILE}")


def _write_secrets(path: Path, keys: list[dict[str, str]]) -> None:
    """Whole or not at all, and never readable by others."""
    scratch = path.with_suffix(f".{os.getpid()}")
    with contextlib.ExitStack() as cleanup:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        cleanup.callback(scratch.unlink, missing_ok=True)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"keys": keys}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)


def _demo_deployment() -> Deployment | None:
    return Deployment.objects.filter(model=DEMO_MODEL, removed_at=None).first()


def _demo_engine() -> str | None:
    deployment = _demo_deployment()
    return deployment.engine if deployment else None


def _load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEMO / name).read_text())
    return document


# --- the demo model -------------------------------------------------------------------------------------------------


def prepare_model(models_dir: Path, say: Say) -> None:
    """Make the demo model if the demo deployment runs on it. Raises UpError or DemoModelError."""
    deployment = _demo_deployment()
    if deployment is None or not deployment.enabled or deployment.engine != "vllm":
        return
    if find_spec("vllm") is None:
        raise UpError("vLLM is not installed here: run `make setup`, or start with --engine simulated.")
    if deployment.options.get("path") != f"{models_dir.name}/{demo_model.NAME}":
        return
    if not demo_model.is_prepared(models_dir / demo_model.NAME):
        check_disk(models_dir.parent, NEEDED_BYTES + demo_model.NEEDED_BYTES)
    demo_model.prepare(models_dir, say)
