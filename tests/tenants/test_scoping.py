"""A query of what tenants own says whose rows it is for."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.db.models import Model
from django.urls import URLPattern, get_resolver

from tenants.ledger import record_usage
from tenants.models import ApiKey, AuditEvent, KeySecret, Membership, Tenant, UsageRecord
from tenants.scoping import Reach, TenantOwned, UnscopedQueryError

from .conftest import issue
from .test_ledger import ROW

OWNED: list[Any] = [model for model in apps.get_models() if issubclass(model, TenantOwned)]
# Of tenants too, but read through what they belong to (limits), or by operators and schedulers alone.
ELSEWHERE = {"Limit", "Price", "BudgetAccount", "BudgetAlert", "BudgetLease", "DeadLetter"}


def names_a_tenant(model: type[Model]) -> bool:
    fields = {field.name for field in model._meta.get_fields() if not field.auto_created}
    return bool(fields & {"tenant", "tenant_id", "key", "account"})


def test_what_belongs_to_a_tenant_says_so() -> None:
    """A new model that names a tenant is scoped, or on the list above with its reason."""
    ours = [model for model in apps.get_models() if model._meta.app_label in ("tenants", "scheduler")]
    named = {model.__name__ for model in ours if names_a_tenant(model)}
    assert named - ELSEWHERE == {model.__name__ for model in OWNED} - {"Tenant"}


@pytest.mark.parametrize("model", OWNED, ids=lambda model: model.__name__)
@pytest.mark.django_db
class TestScoped:
    def test_without_a_tenant_every_query_is_an_error(self, model: Any) -> None:
        for query in (
            model.scoped.all,
            model.scoped.first,
            model.scoped.count,
            lambda: model.scoped.filter(pk=1),
            lambda: model.scoped.get(pk=1),
            lambda: list(model.scoped.iterator()),
            lambda: model.scoped.within(Reach()),
            lambda: model.scoped.unscoped(""),
        ):
            with pytest.raises(UnscopedQueryError):
                query()

    def test_the_installation_itself_queries_as_ever(self, model: Any) -> None:
        assert model._default_manager.name == "objects" and model.objects.count() == 0
        assert model.scoped.unscoped("a test").count() == 0


def test_rows_are_those_of_the_tenants_within_reach(acme: Tenant, globex: Tenant) -> None:
    for tenant in (acme, globex):
        issue(tenant)
        AuditEvent(actor="a", action="b", target="c", tenant_id=str(tenant.pk)).save()
    record_usage([ROW])
    used_by = UsageRecord.objects.get().tenant_id
    reach = Reach(frozenset({str(acme.pk)}))
    assert list(Tenant.scoped.within(reach)) == [acme]
    assert [key.tenant for key in ApiKey.scoped.within(reach)] == [acme]
    assert [secret.key.tenant for secret in KeySecret.scoped.within(reach)] == [acme]
    assert [event.tenant_id for event in AuditEvent.scoped.within(reach)] == [str(acme.pk)]
    assert UsageRecord.scoped.within(Reach(frozenset({used_by}))).count() == 1
    assert UsageRecord.scoped.within(Reach(frozenset({"999"}))).count() == 0
    assert Membership.scoped.within(reach).count() == 0
    assert Tenant.scoped.within(Reach(everything="a test")).count() == 2


def api_modules() -> set[Path]:
    """The modules of the views of the management API, and of what they inherit from."""

    def walk(patterns: list[Any], prefix: str = "") -> set[Path]:
        found: set[Path] = set()
        for pattern in patterns:
            route = prefix + str(pattern.pattern)
            if not isinstance(pattern, URLPattern):
                found |= walk(pattern.url_patterns, route)
            elif route.startswith("api/v1/"):
                for base in pattern.callback.view_class.__mro__:  # type: ignore[attr-defined]  # every view is a class
                    if base.__module__.startswith(("tenants", "scheduler", "harness_web")):
                        found.add(Path(inspect.getfile(base)))
        return found

    return walk(get_resolver().url_patterns)


def unscoped_queries(source: str) -> list[str]:
    """Uses of a manager of what tenants own, other than `scoped`."""
    names = {model.__name__ for model in OWNED}
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
        and node.attr in ("objects", "_default_manager", "_base_manager")
    ]


def test_the_api_reads_what_tenants_own_through_scoped_only() -> None:
    modules = api_modules()
    assert {path.name for path in modules} >= {"keys.py", "tenants.py", "audit.py", "usage.py", "traces.py", "base.py"}
    assert {path.name: found for path in modules if (found := unscoped_queries(path.read_text()))} == {}


def test_a_view_that_forgets_the_scope_is_found() -> None:
    assert unscoped_queries("rows = ApiKey.objects.filter(pk=1)") == ["ApiKey.objects"]
    assert unscoped_queries("rows = Tier.objects.all(); mine = ApiKey.scoped.within(reach)") == []
