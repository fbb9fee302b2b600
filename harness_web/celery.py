"""The Celery application: `celery -A harness_web worker` and `beat`.

Celery only carries messages; the database is the truth for every job. With Redis the messages go through it, without
it through folders in the data directory (kombu's filesystem transport), whose paths are absolute because worker and
beat may be started from anywhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from celery import Celery
from celery.signals import setup_logging

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "harness_web.settings")

from django.conf import settings

HEARTBEAT = 10.0  # seconds between two beats of the task worker in `ProcessHeartbeat`


def folder_transport(root: Path) -> dict[str, Any]:
    """Settings of a broker that lives in folders under `root`; the folders are made."""
    messages = root / "messages"
    control = root / "control"
    for folder in (messages, control):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mend(messages, control)
    return {
        "broker_url": "filesystem://",
        # One folder both ways: what beat puts in, the worker takes out.
        "broker_transport_options": {
            "data_folder_in": str(messages),
            "data_folder_out": str(messages),
            "control_folder": str(control),
        },
    }


def mend(messages: Path, control: Path) -> None:
    """Take away what a full disk or a kill left half-written: the worker would die of it, at every start.

    Under the transport's own locks, so that a process which is just writing loses at most a message, and none matters.
    """
    for path in control.glob("*.exchange"):
        with path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_torn(file):
                file.seek(0)
                file.truncate()
                file.write(b"[]")  # the worker binds its queues anew
    for path in messages.glob("*.msg"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # gone: a worker has taken it
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_torn(file):
                path.unlink()


def _is_torn(file: BinaryIO) -> bool:
    try:
        json.load(file)
    except ValueError:
        return True
    return False


def configuration(data_dir: Path, redis_url: str | None) -> dict[str, Any]:
    """The Celery settings for this data directory and, if there is one, this Redis."""
    root = data_dir / "celery"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)  # for the beat schedule, whoever carries the messages
    broker = {"broker_url": redis_url} if redis_url else folder_transport(root)
    return {
        **broker,
        "broker_connection_retry_on_startup": True,
        "task_ignore_result": True,  # results are rows of the database
        "task_acks_late": True,
        "task_serializer": "json",
        "accept_content": ["json"],
        "worker_hijack_root_logger": False,
        "worker_prefetch_multiplier": 1,
        "worker_send_task_events": False,
        "enable_utc": True,
        "beat_schedule_filename": str(root / "beat-schedule"),
        "beat_schedule": {
            "heartbeat": {"task": "tenants.tasks.heartbeat", "schedule": HEARTBEAT, "options": {"expires": HEARTBEAT}},
            "forget-silent-processes": {"task": "tenants.tasks.forget_silent_processes", "schedule": 3600.0},
            "remove-old-usage": {
                "task": "tenants.tasks.remove_old_usage",
                "schedule": 300.0,
                "options": {"expires": 300.0},
            },
        },
    }


@setup_logging.connect  # type: ignore[untyped-decorator]
def keep_logging(**_: object) -> None:
    """Logging is configured by the settings, like that of every process; Celery adds nothing of its own."""


app = Celery("harness_web")
app.conf.update(configuration(settings.HARNESS_DATA_DIR, settings.HARNESS_REDIS_URL))
app.autodiscover_tasks()
