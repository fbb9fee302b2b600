"""Background jobs of tenancy. Each may be lost or run twice without harm: the database is the truth."""

from __future__ import annotations

from celery import shared_task
from django.conf import settings
from django.utils import timezone

from . import changes
from .audit import Act
from .models import ProcessHeartbeat
from .retention import remove_old

REMOVE_SECONDS = 30.0  # of one task, so that it does not keep others waiting


@shared_task  # type: ignore[untyped-decorator]  # Celery has no types
def heartbeat() -> None:
    """Show that the task worker lives and that messages get through from beat to it."""
    changes.beat(settings.HARNESS_PROCESS, ProcessHeartbeat.Kind.TASKS, changes.current_version())


@shared_task  # type: ignore[untyped-decorator]  # Celery has no types
def forget_silent_processes() -> None:
    """Remove the heartbeats of processes that ended long ago without saying so."""
    changes.forget_silent()


@shared_task  # type: ignore[untyped-decorator]  # Celery has no types
def remove_old_usage() -> None:
    """Go on removing what is older than the installation keeps, for as long as one task may work."""
    if settings.HARNESS_USAGE_MONTHS is not None:
        act = Act("harness", "HARNESS_USAGE_MONTHS")
        remove_old(settings.HARNESS_USAGE_MONTHS, timezone.now(), act, most_seconds=REMOVE_SECONDS)
