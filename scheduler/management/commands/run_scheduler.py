"""`manage.py run_scheduler`: the process that owns the queues and the engines."""

from __future__ import annotations

import asyncio
import re
import signal
from argparse import ArgumentParser
from typing import Any

import uvloop
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from scheduler.wire.codec import WireError
from scheduler.wire.transport import socket_path
from scheduler.worker.runtime import Options, Runtime, StartError
from scheduler.worker.spool import SpoolError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


class Command(BaseCommand):
    help = "Runs the scheduler: takes requests from the web processes, decides who runs when, owns the engines."
    requires_migrations_checks = True
    requires_system_checks = []  # the URL map and the pages are the web processes' business

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--pool", action="append", default=[], help="serve only this pool (may be given again)")
        parser.add_argument("--name", default="scheduler", help="name of this process, one of its kind")
        parser.add_argument(
            "--drain", type=float, default=10.0, help="seconds that running requests may take at a stop"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if not NAME.match(options["name"]):
            raise CommandError("--name takes 1 to 64 letters, digits, dots, hyphens and underscores.")
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                failure = runner.run(serve(runtime_options(options)))
        except (StartError, WireError, SpoolError, OSError) as error:
            raise CommandError(str(error)) from error
        if failure is not None:
            raise CommandError(f"The scheduler stopped by itself: {failure}.")


def runtime_options(options: dict[str, Any]) -> Options:
    return Options(
        name=options["name"],
        address=socket_path(settings.HARNESS_RUN_DIR, options["name"]),
        data_dir=settings.HARNESS_DATA_DIR,
        run_dir=settings.HARNESS_RUN_DIR,
        spool_dir=settings.HARNESS_SPOOL_DIR,
        salt_secret=settings.HARNESS_CACHE_SALT,
        pools=tuple(options["pool"]),
        drain_seconds=options["drain"],
        power_loss=settings.HARNESS_POWER_LOSS,
    )


async def serve(options: Options) -> str | None:
    """The life of the process: SIGTERM and SIGINT drain, a second one stops at once."""
    runtime = Runtime(options)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, runtime.ask_to_stop)
    return await runtime.run()
