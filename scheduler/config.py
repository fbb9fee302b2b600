"""The scheduling configuration: tiers and policy, one document, versioned as a whole.

Tiers live in their own table. Whenever a tier or the policy changes, by whatever way, a snapshot of the whole document
becomes the next `PolicyVersion` in the same transaction; the newest one is in force.

    Error
    ├── ConfigError      the change is not valid; `path` names the field
    └── ConfigConflict   somebody else was faster; `diff` says with what
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.db import models

from scheduler.core.policies import POLICIES
from scheduler.core.types import Contract, OnInfeasible, PolicyConfig, TierSpec
from scheduler.models import PolicyVersion
from tenants.audit import record
from tenants.changes import one_change
from tenants.models import Tier
from tenants.models.change import lock, note
from tenants.tiers import TierError, assign, check_tiers, to_document

MAX_WAIT_MS = 60_000.0
MAX_COUNT = 1_000_000


class Error(Exception):
    """Root of what changing the configuration raises."""


class ConfigError(Error):
    """`path` is that of the field in the document, like `tiers.vip.floor`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


class ConfigConflict(Error):
    """The configuration is no longer at the version the change was meant for. `diff`: path -> [then, now]."""

    def __init__(self, current_version: int, diff: Mapping[str, list[Any]]) -> None:
        super().__init__(f"The configuration is at version {current_version} now.")
        self.current_version = current_version
        self.diff = dict(diff)


@dataclass(frozen=True, slots=True)
class ConfigDocument:
    """What `GET /v1/config` shows, and the same as the core's values."""

    version: int
    policy: dict[str, Any]
    tiers: dict[str, dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return {"version": self.version, "policy": self.policy, "tiers": self.tiers}

    def policy_config(self) -> PolicyConfig:
        return PolicyConfig(version=self.version, **self.policy)

    def tier_specs(self) -> dict[str, TierSpec]:
        return {name: _tier_spec(name, tier) for name, tier in self.tiers.items()}


def current() -> ConfigDocument:
    """The configuration in force. Version 0 with the defaults before the first change."""
    newest = PolicyVersion.objects.first()
    if newest is None:
        return ConfigDocument(0, _policy_fields(PolicyConfig()), _tier_documents())
    return _of(newest)


def at_version(version: int) -> ConfigDocument | None:
    """The configuration as it was, or None if there was no such version."""
    found = PolicyVersion.objects.filter(version=version).first()
    return None if found is None else _of(found)


def update(
    partial: Mapping[str, Any],
    *,
    if_version: int | None = None,
    reason: str = "",
    actor: str = "",
    source_ip: str | None = None,
) -> ConfigDocument:
    """Change what `partial` names, all of it or nothing, and return the document in force then.

    Changing nothing makes no new version. `version` in `partial` is ignored, so that a document can be fetched, edited
    and sent back. Raises ConfigError, or ConfigConflict when the version is not `if_version`.
    """
    with one_change(actor=actor, reason=reason):
        lock()
        before = current()
        if if_version is not None and if_version != before.version:
            raise ConfigConflict(before.version, _since(if_version, before))
        policy = _merge(before, partial)
        if policy != before.policy:
            note(PolicyVersion)
        after = snapshot(policy, actor=actor, reason=reason)
        if after.version != before.version:
            changes = diff(before, after)
            record(
                actor,
                "config.update",
                f"policy version {after.version}",
                before={path: pair[0] for path, pair in changes.items()},
                after={path: pair[1] for path, pair in changes.items()},
                reason=reason,
                source_ip=source_ip,
            )
    return after


def snapshot(policy: Mapping[str, Any], *, actor: str, reason: str) -> ConfigDocument:
    """Make the tiers as they are and `policy` the next version, unless that is what is in force already.

    Call inside a change: its lock keeps the numbers apart.
    """
    newest = PolicyVersion.objects.first()
    version = newest.version if newest else 0
    tiers = _tier_documents()
    if newest is not None and newest.policy == policy and newest.document["tiers"] == tiers:
        return _of(newest)
    document = ConfigDocument(version + 1, dict(policy), tiers)
    PolicyVersion.objects.create(
        version=document.version, document=document.as_json(), policy=document.policy, reason=reason, actor=actor
    )
    return document


def snapshot_on_change(models: frozenset[type[models.Model]], actor: str, reason: str, **kwargs: Any) -> None:
    """Receiver of `configuration_changed`: tiers may have changed through the admin or `harness apply`."""
    if Tier in models:
        snapshot(current().policy, actor=actor, reason=reason)


def diff(before: ConfigDocument, after: ConfigDocument) -> dict[str, list[Any]]:
    """What differs, by path: [before, after]. The version itself does not count."""
    old, new = _flat(before.as_json()), _flat(after.as_json())
    paths = [path for path in {**old, **new} if path != "version"]
    return {path: [old.get(path), new.get(path)] for path in paths if old.get(path) != new.get(path)}


def check_policy(fields: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `fields` laid over it. Raises ConfigError for an unknown name or a value out of range."""
    checks = {"name": _policy_name, "max_batch": _count, "max_wait_ms": _milliseconds, "step_tokens": _count}
    policy = dict(base)
    for name, value in fields.items():
        path = f"policy.{name}"
        if name not in checks:
            raise ConfigError(path, "There is no such field.")
        policy[name] = checks[name](path, value)
    return policy


def _merge(before: ConfigDocument, partial: Mapping[str, Any]) -> dict[str, Any]:
    """Write the tiers of `partial`; the policy with what `partial` says of it."""
    if unknown := partial.keys() - {"version", "policy", "tiers"}:
        raise ConfigError(min(unknown), "There is no such field.")
    _update_tiers(_mapping("tiers", partial.get("tiers", {})))
    policy = partial.get("policy", {})
    if isinstance(policy, str):
        policy = {"name": policy}
    return check_policy(_mapping("policy", policy), before.policy)


def _update_tiers(partial: Mapping[str, Any]) -> None:
    tiers = {tier.name: tier for tier in Tier.objects.all()}
    changed = []
    for name, fields in partial.items():
        if name not in tiers:
            raise ConfigError(f"tiers.{name}", "There is no such tier.")
        try:
            if assign(tiers[name], _mapping(f"tiers.{name}", fields)):
                changed.append(tiers[name])
        except TierError as error:
            raise ConfigError(f"tiers.{error.path}", error.message) from error
    try:
        check_tiers(tiers.values())
    except TierError as error:
        raise ConfigError(f"tiers.{error.path}", error.message) from error
    for tier in changed:
        tier.save()


def _mapping(path: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(path, "Expected an object.")
    return value


def _policy_name(path: str, value: Any) -> str:
    if not isinstance(value, str) or value not in POLICIES:
        raise ConfigError(path, f"There is no policy {value!r}; choose one of {', '.join(sorted(POLICIES))}.")
    return value


def _count(path: str, value: Any) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (whole and 1 <= value <= MAX_COUNT):
        raise ConfigError(path, f"Expected a whole number from 1 to {MAX_COUNT}, or null for the engine's own.")
    return value  # type: ignore[no-any-return]


def _milliseconds(path: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and 0 <= value <= MAX_WAIT_MS):
        raise ConfigError(path, f"Expected a number from 0 to {MAX_WAIT_MS:.0f}.")
    return float(value)


def _of(version: PolicyVersion) -> ConfigDocument:
    """Tiers in order of rank: PostgreSQL's JSON keeps no order of keys."""
    tiers = sorted(version.document["tiers"].items(), key=lambda item: (item[1]["rank"], item[0]))
    policy = {name: version.policy[name] for name in _policy_fields(PolicyConfig())}
    return ConfigDocument(version.version, policy, dict(tiers))


def _tier_documents() -> dict[str, dict[str, Any]]:
    return {tier.name: to_document(tier) for tier in Tier.objects.all()}


def _policy_fields(policy: PolicyConfig) -> dict[str, Any]:
    return {
        "name": policy.name,
        "max_batch": policy.max_batch,
        "max_wait_ms": policy.max_wait_ms,
        "step_tokens": policy.step_tokens,
    }


def _tier_spec(name: str, tier: Mapping[str, Any]) -> TierSpec:
    """Mirrors `tenants.tiers.FIELDS`; `slo` and `queue` are flat in the core."""
    flat = {key: value for key, value in tier.items() if key not in ("slo", "queue")}
    return TierSpec(
        name=name,
        **{
            **flat,
            **tier["slo"],
            "queue_max_length": tier["queue"]["max_length"],
            "queue_max_wait": tier["queue"]["max_wait"],
            "contract": Contract(tier["contract"]),
            "on_infeasible": OnInfeasible(tier["on_infeasible"]),
        },
    )


def _since(version: int, now: ConfigDocument) -> dict[str, list[Any]]:
    then = at_version(version)
    return {} if then is None else diff(then, now)


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
