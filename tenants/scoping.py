"""Whose rows: a query of what tenants own says it, or is an error.

    ApiKey.scoped.within(reach)          the rows of the tenants that the caller is for
    ApiKey.scoped.unscoped("reason")     the rows of all, and why
    ApiKey.scoped.all()                  UnscopedQueryError

Everything that answers a caller reads through `scoped`. `objects` stays for what works for the installation itself:
authentication, admission, `harness apply`, the admin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn, Self, TypeVar

from django.db import models

ModelT = TypeVar("ModelT", bound=models.Model)


class UnscopedQueryError(Exception):
    """A query of what tenants own does not say whose rows it is for."""


@dataclass(frozen=True, slots=True)
class Reach:
    """The tenants, by id, whose rows a caller may see; of all of them where `everything` gives the reason."""

    tenants: frozenset[str] = frozenset()
    everything: str = ""


class ScopedManager(models.Manager[ModelT]):
    """Refuses every query but those that begin with `within` or `unscoped`."""

    def get_queryset(self) -> NoReturn:
        name = self.model.__name__
        raise UnscopedQueryError(f"Say whose: {name}.scoped.within(reach) or {name}.scoped.unscoped(reason).")

    def within(self, reach: Reach) -> models.QuerySet[ModelT]:
        """The rows that `reach` covers. Raises UnscopedQueryError for the reach of nobody."""
        if reach.everything:
            return self.unscoped(reach.everything)
        if not reach.tenants:
            raise UnscopedQueryError(f"A query of {self.model.__name__} for no tenant.")
        return self._all().filter(**{f"{self.model.tenant_path}__in": reach.tenants})  # type: ignore[attr-defined]

    def unscoped(self, reason: str) -> models.QuerySet[ModelT]:
        """The rows of all tenants. `reason` tells the reader why that is right."""
        if not reason:
            raise UnscopedQueryError(f"A query of every {self.model.__name__} needs a reason.")
        return self._all()

    def _all(self) -> models.QuerySet[ModelT]:
        everything: models.QuerySet[ModelT] = self.model._default_manager.all()
        return everything


class TenantOwned(models.Model):
    """Base of what belongs to a tenant. `tenant_path` is the lookup that ends at the tenant's id.

    List it after the base that has `objects`, which must stay the default manager.
    """

    tenant_path: ClassVar[str] = "tenant_id"

    scoped: ClassVar[ScopedManager[Self]] = ScopedManager()

    class Meta:
        abstract = True
