"""Background jobs of tenancy. Each may be lost or run twice without harm: the database is the truth."""

from __future__ import annotations

from celery import shared_task
from django.conf import settings

from . import changes
from .models import ProcessHeartbeat


@shared_task  # type: ignore[untyped-decorator]  # Celery has no types
def heartbeat() -> None:
    """Show that the task worker lives and that messages get through from beat to it."""
    changes.beat(settings.HARNESS_PROCESS, ProcessHeartbeat.Kind.TASKS, changes.current_version())


@shared_task  # type: ignore[untyped-decorator]  # Celery has no types
def forget_silent_processes() -> None:
    """Remove the heartbeats of processes that ended long ago without saying so."""
    changes.forget_silent()
