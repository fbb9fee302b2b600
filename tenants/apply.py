"""Bringing tiers, tenants, keys, limits and prices to what a document says.

What exists and is as it should be is left alone; what the document does not name is never touched; `state: absent`
removes. Everything happens in one change or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeVar

from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import models
from msgspec import UNSET

from .audit import Act, describe
from .documents import (
    Budget,
    DocumentError,
    KeyPart,
    Limits,
    PricePart,
    RateLimits,
    TenancyDocument,
    TenantPart,
    TierPart,
    given,
)
from .key_changes import issue, revoke
from .models import ApiKey, Limit, Price, Tenant, Tier
from .models.limit import TOKENS
from .tiers import TierError, assign, check_tiers

ModelT = TypeVar("ModelT", bound=models.Model)


@dataclass
class Result:
    """What applying did. `keys` holds the only copy of the new secrets."""

    created: dict[str, list[str]] = field(default_factory=dict)  # section -> names
    keys: list[dict[str, str]] = field(default_factory=list, repr=False)  # tenant, name, key
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    unchanged: int = 0

    def add(self, section: str, name: str) -> None:
        self.created.setdefault(section, []).append(name)

    @property
    def did_anything(self) -> bool:
        return bool(self.created or self.keys or self.changed or self.removed)

    def as_json(self) -> dict[str, Any]:
        return {
            "created": {"keys": self.keys, **self.created},
            "changed": self.changed,
            "removed": self.removed,
            "unchanged": self.unchanged,
        }


@dataclass
class Run:
    """One application: whose act it is, and what it has done so far."""

    act: Act
    result: Result = field(default_factory=Result)

    def save(self, instance: ModelT, path: str, section: str, name: str, values: Mapping[str, Any]) -> ModelT:
        """Give `instance` these values, checked; create it, change it, or count it as unchanged."""
        new = instance.pk is None
        before = None if new else describe(instance)
        changed = [key for key, value in values.items() if new or getattr(instance, key) != value]
        for key in changed:
            setattr(instance, key, values[key])
        if not new and not changed:
            self.result.unchanged += 1
            return instance
        check_fields(instance, path)
        instance.save()
        self.act.note("create" if new else "change", instance, before, describe(instance))
        if new:
            self.result.add(section, name)
        else:
            self.result.changed.append(f"{section[:-1]} {name} ({', '.join(changed)})")
        return instance

    def remove(self, instance: models.Model, path: str, name: str) -> None:
        """Delete the row. Raises DocumentError when others need it."""
        self.act.note("remove", instance, describe(instance), None)
        try:
            instance.delete()
        except models.ProtectedError as error:
            users = sorted({str(user._meta.verbose_name_plural) for user in error.protected_objects})
            raise DocumentError(path, f"{name} cannot be removed: {' and '.join(users)} still refer to it.") from error
        self.result.removed.append(name)


def apply_tenancy(document: TenancyDocument, run: Run) -> Result:
    """Apply the sections of tenancy. Call inside `one_change()`, locked. Raises DocumentError; then nothing is kept."""
    _apply_tiers(document.tiers, run)
    _no_twins("tenants", [part.slug for part in document.tenants])
    for index, part in enumerate(document.tenants):
        apply_tenant(part, f"tenants[{index}]", run)
    for index, price in enumerate(document.prices):
        _apply_price(price, f"prices[{index}]", run)
    _remove_tiers(document.tiers, run)
    return run.result


def check_fields(instance: models.Model, path: str) -> None:
    """Raises DocumentError for the first field that is not valid."""
    try:
        instance.clean_fields()
        instance.clean()
    except ValidationError as error:
        name, messages = next(iter(error.message_dict.items()))
        raise DocumentError(f"{path}.{name}", messages[0]) from error


def _no_twins(section: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise DocumentError(f"{section}[{index}]", f"{name} is named twice.")


# --- tiers ----------------------------------------------------------------------------------------------------------


def _apply_tiers(parts: Sequence[TierPart], run: Run) -> None:
    names = [part.name for part in parts]
    _no_twins("tiers", names)
    tiers = {tier.name: tier for tier in Tier.objects.all()}
    before = {name: describe(tier) for name, tier in tiers.items()}
    changes: list[tuple[TierPart, list[str]]] = []
    try:
        for part in parts:
            if part.state == "present":
                tier = tiers.setdefault(part.name, Tier(name=part.name))
                changes.append((part, assign(tier, given(part, "name", "limits", "state"))))
        gone = {part.name for part in parts if part.state == "absent"}
        check_tiers(tier for tier in tiers.values() if tier.name not in gone)
    except TierError as error:
        where = f"tiers[{names.index(error.tier)}]" if error.tier in names else f"tiers.{error.tier}"
        raise DocumentError(f"{where}.{error.field}", error.message) from error
    for part, changed in changes:
        _save_tier(tiers[part.name], changed, before.get(part.name), run)
        apply_limits(part.limits, {"tier": tiers[part.name]}, f"tiers[{names.index(part.name)}].limits", run)


def _save_tier(tier: Tier, changed: list[str], before: dict[str, Any] | None, run: Run) -> None:
    if before is not None and not changed:
        run.result.unchanged += 1
        return
    tier.save()
    run.act.note("create" if before is None else "change", tier, before, describe(tier))
    if before is None:
        run.result.add("tiers", tier.name)
    else:
        run.result.changed.append(f"tier {tier.name} ({', '.join(changed)})")


def _remove_tiers(parts: Sequence[TierPart], run: Run) -> None:
    for index, part in enumerate(parts):
        tier = Tier.objects.filter(name=part.name).first() if part.state == "absent" else None
        if tier is None:
            continue
        if slugs := list(tier.tenants.values_list("slug", flat=True)[:5]):
            raise DocumentError(f"tiers[{index}]", f"Tier {tier.name} still has tenants: {', '.join(slugs)}.")
        run.remove(tier, f"tiers[{index}]", f"tier {tier.name}")


# --- tenants and keys -----------------------------------------------------------------------------------------------


def apply_tenant(part: TenantPart, path: str, run: Run) -> None:
    """One tenant with its limits and keys. `path` is where mistakes are said to be. Raises DocumentError."""
    tenant = Tenant.objects.filter(slug=part.slug).first()
    if part.state == "absent":
        if tenant is not None:
            run.remove(tenant, path, f"tenant {tenant.slug}")
        return
    values = given(part, "slug", "tier", "limits", "keys")
    if part.tier is not UNSET:
        values["tier"] = _find(Tier, f"{path}.tier", name=part.tier)
    elif tenant is None:
        raise DocumentError(f"{path}.tier", "A new tenant needs a tier.")
    if tenant is None:
        tenant = Tenant(slug=part.slug)
        values.setdefault("name", part.slug)
    run.save(tenant, path, "tenants", part.slug, values)
    apply_limits(part.limits, {"tenant": tenant}, f"{path}.limits", run)
    _no_twins(f"{path}.keys", [key.name for key in part.keys])
    for index, key in enumerate(part.keys):
        apply_key(key, tenant, f"{path}.keys[{index}]", run)


def apply_key(part: KeyPart, tenant: Tenant, path: str, run: Run, *, owner: User | None = None) -> None:
    """One key with its limits; `owner` is whose a new one is. Raises DocumentError."""
    key = tenant.keys.filter(name=part.name, revoked_at__isnull=True).first()
    if part.state == "absent":
        if key is not None:
            revoke(key, run.act)
            run.result.removed.append(f"key {key}")
        return
    values = given(part, "name", "limits", "state")
    if key is None:
        key = _create_key(ApiKey(tenant=tenant, name=part.name, owner=owner), values, path, run)
    else:
        run.save(key, path, "keys", f"{tenant.slug}/{part.name}", values)
    apply_limits(part.limits, {"key": key}, f"{path}.limits", run)


def _create_key(key: ApiKey, values: Mapping[str, Any], path: str, run: Run) -> ApiKey:
    for attribute, value in values.items():
        setattr(key, attribute, value)
    check_fields(key, path)
    run.result.keys.append({"tenant": key.tenant.slug, "name": key.name, "key": issue(key, run.act)})
    return key


def _find(model: type[ModelT], path: str, **by: Any) -> ModelT:
    found = model._default_manager.filter(**by).first()
    if found is None:
        raise DocumentError(path, f"There is no {model._meta.verbose_name} {next(iter(by.values()))!r}.")
    return found


# --- limits ---------------------------------------------------------------------------------------------------------


def apply_limits(part: Limits, owner: Mapping[str, Tier | Tenant | ApiKey], path: str, run: Run) -> None:
    """The limits of `owner`, which is their one foreign key, by name. Raises DocumentError."""
    present = {(one.model, one.kind, one.period, one.currency): one for one in Limit.objects.filter(**owner)}
    who = " ".join(f"{kind} {thing}" for kind, thing in owner.items())
    parts = [("", part, path), *((model, limits, f"{path}.models.{model}") for model, limits in part.models.items())]
    for model, limits, where in parts:
        of_model = f" of {model}" if model else ""
        for kind, value in _rates(limits):
            limit = present.get((model, kind, "", ""))
            label = f"{who} {kind}{of_model}"
            if value is None:
                if limit is not None:
                    run.remove(limit, where, f"limit {label}")
                continue
            limit = limit or Limit(**owner, model=model, kind=kind)
            run.save(limit, f"{where}.{kind}", "limits", label, {"value": value})
        units = [f"The budget per {one.period} in {_unit(one) or TOKENS}" for one in limits.budgets]
        _no_twins(f"{where}.budgets", units)
        for index, budget in enumerate(limits.budgets):
            unit = _unit(budget)
            limit = present.get((model, "budget", budget.period, unit))
            limit = limit or Limit(**owner, model=model, kind="budget", period=budget.period, currency=unit)
            label = f"{who} budget per {budget.period} in {limit.unit}{of_model}"
            _apply_budget(budget, limit, label, f"{where}.budgets[{index}]", run)


def _rates(part: RateLimits) -> Iterable[tuple[str, int | None]]:
    """The rates that the document gave; None means: remove."""
    for kind, value in (("rpm", part.rpm), ("tpm", part.tpm), ("concurrency", part.concurrency)):
        if value is not UNSET:
            yield kind, value


def _unit(part: Budget) -> str:
    """The currency; empty for tokens."""
    return "" if part.tokens is not None else part.currency


def _apply_budget(part: Budget, limit: Limit, label: str, path: str, run: Run) -> None:
    """`limit` is the one of the same period and unit, perhaps a new one."""
    if part.state == "absent":
        if limit.pk is not None:
            run.remove(limit, path, f"limit {label}")
        return
    if (part.tokens is None) == (part.amount is None):
        raise DocumentError(path, "A budget has either 'tokens' or an 'amount'.")
    amount = None if part.amount is None else Decimal(part.amount)
    values = {"value": part.tokens, "amount": amount, "hard": part.hard, "alerts": part.alerts}
    run.save(limit, path, "limits", label, values)


# --- prices ---------------------------------------------------------------------------------------------------------


def _apply_price(part: PricePart, path: str, run: Run) -> None:
    if part.tier and part.tenant:
        raise DocumentError(path, "A price is for a tier or for a tenant, not for both.")
    identity = {
        "model": part.model,
        "tier": _find(Tier, f"{path}.tier", name=part.tier) if part.tier else None,
        "tenant": _find(Tenant, f"{path}.tenant", slug=part.tenant) if part.tenant else None,
        "effective_from": part.effective_from,
    }
    label = f"price {part.model}{f' for {part.tier or part.tenant}' if part.tier or part.tenant else ''}"
    label += f" from {part.effective_from.isoformat()}"
    price = Price.objects.filter(**_exactly(identity)).first()
    if part.state == "absent":
        if price is not None:
            run.remove(price, path, label)
    elif price is None:
        run.save(Price(**identity), path, "prices", label.removeprefix("price "), part.columns())
    else:
        _must_be_same(price, part, path, label)
        run.result.unchanged += 1


def _exactly(identity: Mapping[str, Any]) -> dict[str, Any]:
    """None in a filter has to be spelled `isnull`."""
    return {f"{name}__isnull" if value is None else name: value is None or value for name, value in identity.items()}


def _must_be_same(price: Price, part: PricePart, path: str, label: str) -> None:
    for column, value in part.columns().items():
        if (held := getattr(price, column)) != value:
            raise DocumentError(
                f"{path}.{column}",
                f"The {label} is {held}, not {value}. Prices are never edited: give the new one a later 'from'.",
            )
