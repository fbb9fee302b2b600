"""The change row, and the base of every model whose writes it counts.

One row holds a counter. Each change of configuration, keys or limits moves it on in the same transaction; every web and
scheduler process polls it (`tenants/changes.py`). On PostgreSQL the row's lock is held until commit, and SQLite has one
writer, so the order of the numbers is the order of the commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from django.db import models, transaction
from django.db.models import F
from django.dispatch import Signal

# Sent inside the transaction, after the counter moved, once per change.
# Arguments: version: int, models: frozenset[type[Model]], actor: str, reason: str.
configuration_changed = Signal()

ONLY_ROW = 1


class Change(models.Model):
    """The counter. Its single row has primary key 1 and comes into being with the first change."""

    id = models.PositiveSmallIntegerField(primary_key=True, default=ONLY_ROW)
    version = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [models.CheckConstraint(condition=models.Q(id=ONLY_ROW), name="change_has_one_row")]

    def __str__(self) -> str:
        return f"change {self.version}"


def current_version() -> int:
    """The number of the last committed change; 0 before the first."""
    version = Change.objects.filter(pk=ONLY_ROW).values_list("version", flat=True).first()
    return version or 0


def bump() -> int:
    """Move the counter on and return its new value. Call inside the transaction of the change."""
    if not Change.objects.filter(pk=ONLY_ROW).update(version=F("version") + 1):
        Change.objects.bulk_create([Change(pk=ONLY_ROW)], ignore_conflicts=True)
        Change.objects.filter(pk=ONLY_ROW).update(version=F("version") + 1)
    return current_version()


def lock() -> None:
    """Make other changes wait until this transaction ends. For those that decide by what they read."""
    Change.objects.bulk_create([Change(pk=ONLY_ROW)], ignore_conflicts=True)
    Change.objects.select_for_update().get(pk=ONLY_ROW)


@dataclass
class _Open:
    """The change under construction in this thread or task."""

    models: set[type[models.Model]] = field(default_factory=set)


_open: ContextVar[_Open | None] = ContextVar("open_change", default=None)


@contextmanager
def one_change(*, actor: str = "", reason: str = "") -> Iterator[None]:
    """Everything written inside is one change: one transaction, one step of the counter, one signal.

    Writes of `Configured` models outside of it are a change each. Nothing written means no change. Inside another
    change it joins that one, whose actor and reason stand.
    """
    if _open.get() is not None:
        yield
        return
    change = _Open()
    with transaction.atomic():
        token = _open.set(change)
        try:
            yield
        finally:
            _open.reset(token)
        if change.models:
            configuration_changed.send(
                sender=Change, version=bump(), models=frozenset(change.models), actor=actor, reason=reason
            )


def note(model: type[models.Model]) -> None:
    """Say that rows of `model` are part of the change under construction."""
    change = _open.get()
    if change is None:
        raise RuntimeError("note() outside of one_change()")
    change.models.add(model)


ModelT = TypeVar("ModelT", bound=models.Model)


class ConfiguredQuerySet(models.QuerySet[ModelT]):
    """Writes through a query are changes too."""

    def update(self, **values: Any) -> int:
        with one_change():
            count = super().update(**values)
            if count:
                note(self.model)
        return count

    def touch(self, **values: Any) -> int:
        """Write book-keeping that is not configuration, such as `last_used_at`: no change is counted."""
        return super().update(**values)

    def delete(self) -> tuple[int, dict[str, int]]:
        with one_change():
            deleted = super().delete()
            if deleted[0]:
                note(self.model)
        return deleted

    def bulk_create(self, objs: Iterable[ModelT], *args: Any, **kwargs: Any) -> list[ModelT]:
        with one_change():
            created = super().bulk_create(objs, *args, **kwargs)
            if created:
                note(self.model)
        return created


class ConfiguredManager(models.Manager[ModelT]):
    """Every query of a `Configured` model is a `ConfiguredQuerySet`."""

    def get_queryset(self) -> ConfiguredQuerySet[ModelT]:
        return ConfiguredQuerySet(self.model, using=self._db)


class Configured(models.Model):
    """Base of configuration: saving and deleting is a change (see `one_change`)."""

    objects: ClassVar[ConfiguredManager[Self]] = ConfiguredManager()

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        with one_change():
            super().save(*args, **kwargs)
            note(type(self))

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        with one_change():
            deleted = super().delete(*args, **kwargs)
            note(type(self))
        return deleted


class ProcessHeartbeat(models.Model):
    """A running process, and the newest change it acts on."""

    class Kind(models.TextChoices):
        WEB = "web"
        SCHEDULER = "scheduler"
        TASKS = "tasks"

    name = models.CharField(max_length=100, unique=True)
    kind = models.CharField(max_length=16, choices=Kind.choices)
    seen_version = models.PositiveBigIntegerField(default=0)
    beat_at = models.DateTimeField()
    info = models.JSONField(default=dict, blank=True)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"
