"""`harness up`: the whole product on this machine, from an empty data directory to a served model."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from django.conf import settings
from django.core.management.base import BaseCommand

from harness_web import bootstrap, leftovers, serve
from harness_web.accounts import setup_link
from harness_web.bootstrap import Demo, UpError
from harness_web.probe import probe
from harness_web.supervisor import Spec, Stage, Supervisor
from scheduler.engine_processes import kill_stale

SCHEDULER_GRACE = 20.0  # seconds: it drains for 10, then settles and closes its engines


class Command(BaseCommand):
    help = "Start web, scheduler and background tasks on this machine, and keep them running until Ctrl-C."
    requires_system_checks = ()  # the children check themselves; here it would only cost time

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="default: 8000")
        parser.add_argument("--host", default="127.0.0.1", help="address to listen on, default: 127.0.0.1")
        parser.add_argument("--data-dir", metavar="DIR", help="where everything is kept (HARNESS_DATA_DIR)")
        parser.add_argument("--engine", help=f"engine of the demo deployment: {' or '.join(bootstrap.ENGINES)}")
        parser.add_argument("--model", metavar="PATH_OR_ID", help="model of the demo deployment, for vllm")
        parser.add_argument("--policy", metavar="NAME", help="scheduling policy to switch to")
        parser.add_argument("--workers", type=int, default=1, metavar="N", help="number of web processes")
        parser.add_argument("--no-seed", action="store_true", help="create nothing in an empty database")

    def handle(self, *args: Any, **options: Any) -> None:
        signal.signal(signal.SIGTERM, _as_interrupt)  # until the supervisor takes over
        try:
            with (
                bootstrap.clear_errors(settings.HARNESS_DATA_DIR),
                bootstrap.only_one(settings.HARNESS_RUN_DIR),
            ):
                self._up(options)
        except UpError as error:
            self.stderr.write(f"harness: {error}")
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)

    def _up(self, options: Mapping[str, Any]) -> None:
        host, workers = options["host"], options["workers"]
        if workers < 1:
            raise UpError("--workers must be at least 1.")
        leftovers.wait_for_end(settings.HARNESS_RUN_DIR, self._say)
        listener = bootstrap.listen(host, options["port"])
        url = base_url(listener, host)
        self._prepare(options)
        ready_line = f"ready {url}"
        if link := setup_link(url):
            ready_line = f"First operator account, link valid once and for 24 hours: {link}\n{ready_line}"
        supervisor = Supervisor(
            children(listener, host, workers),
            probe=partial(probe, listener.getsockname()),
            ready_line=ready_line,
            stop_listening=listener.close,
            end_orphans=partial(kill_stale, settings.HARNESS_RUN_DIR),
            note_children=partial(leftovers.note, settings.HARNESS_RUN_DIR),
        )
        asyncio.run(supervisor.run())

    def _prepare(self, options: Mapping[str, Any]) -> None:
        data_dir: Path = settings.HARNESS_DATA_DIR
        engine = options["engine"] or settings.HARNESS_ENGINE
        model = settings.HARNESS_MODEL if engine != "simulated" else None
        demo = Demo(engine, options["model"] or model)
        if options["policy"] is not None:
            bootstrap.check_policy(options["policy"])
        bootstrap.check_disk(data_dir)
        bootstrap.migrate(self._say)
        if not options["no_seed"]:
            bootstrap.seed(demo, data_dir, self._say)
        if options["policy"] is not None:
            bootstrap.choose_policy(options["policy"])
        bootstrap.prepare_model(settings.HARNESS_MODELS_DIR, self._say)

    def _say(self, line: str) -> None:
        self.stdout.write(f"harness: {line}")
        self.stdout.flush()


def children(listener: socket.socket, host: str, workers: int) -> list[Spec]:
    """The processes of the product on one machine. The web processes share one listening socket."""
    python, manage = sys.executable, str(settings.BASE_DIR / "manage.py")
    descriptor = listener.fileno()
    port = listener.getsockname()[1]
    web = [
        Spec(
            name=f"web-{number}",
            command=[
                *(python, "-m", "uvicorn"),
                *serve.uvicorn_arguments(host, port, 1, settings.HARNESS_TRUSTED_PROXIES),
                *("--fd", str(descriptor)),
            ],
            stage=Stage.EDGE,
            grace=serve.GRACE + 3.0,
            pass_fds=(descriptor,),
        )
        for number in range(1, workers + 1)
    ]
    celery = (python, "-m", "celery", "--quiet", "--app", "harness_web")
    tasks = ("worker", "--pool", "threads", "--concurrency", "2", "--without-gossip", "--without-mingle")
    return [
        Spec("scheduler", [python, manage, "run_scheduler"], Stage.ENGINE, grace=SCHEDULER_GRACE),
        *web,
        Spec("tasks", [*celery, *tasks], Stage.BACKGROUND),
        Spec("beat", [*celery, "beat", "--pidfile", ""], Stage.BACKGROUND),
    ]


def base_url(listener: socket.socket, host: str) -> str:
    """The address that a person opens; a socket on all addresses is reached by this machine's own."""
    port = listener.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{name}:{port}"


def _as_interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
