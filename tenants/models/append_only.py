"""Rows that are written once: the ledger, its adjustments and the audit log.

The database holds to that by itself: triggers refuse what goes past these classes (migrations 0009, 0011). A
migration that makes one of their tables anew, as SQLite does for most changes, has to make its triggers again.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from django.db import models

ModelT = TypeVar("ModelT", bound=models.Model)


class AppendOnlyError(Exception):
    """Something tried to change or remove a row that stands for good."""


class AppendOnlyQuerySet(models.QuerySet[ModelT]):
    def update(self, **values: Any) -> NoReturn:
        raise AppendOnlyError(f"{self.model.__name__} rows are never changed.")

    def delete(self) -> NoReturn:
        raise AppendOnlyError(f"{self.model.__name__} rows are never removed.")


class AppendOnly(models.Model):
    """Base: rows can be added and read."""

    objects = AppendOnlyQuerySet.as_manager()

    class Meta:
        abstract = True

    def save(self, *args: Any, **kwargs: Any) -> None:
        if not self._state.adding:
            raise AppendOnlyError(f"{type(self).__name__} rows are never changed.")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AppendOnlyError(f"{type(self).__name__} rows are never removed.")
