"""`harness apply`: bringing the whole configuration to what a document says, in one change."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from django.utils import timezone
from msgspec import UNSET, UnsetType

from scheduler.config import ConfigError, check_policy, current, snapshot
from scheduler.engines import ENGINES
from scheduler.models import Deployment, PolicyVersion
from tenants.apply import Result, Run, apply_tenancy
from tenants.audit import Act, describe, record
from tenants.changes import one_change
from tenants.documents import DocumentError, Part, Presence, TenancyDocument, given, read_document
from tenants.models.change import lock, note


class DeploymentPart(Part, frozen=True):
    """`options` are the engine's own and replace those that were set; the engine checks them when it starts."""

    model: str
    engine: str | UnsetType = UNSET
    options: dict[str, Any] | UnsetType = UNSET
    pool: str | UnsetType = UNSET
    enabled: bool | UnsetType = UNSET
    state: Presence = "present"


class Document(TenancyDocument, frozen=True):
    """The whole format: `docs/operations.md` shows it by example."""

    deployments: list[DeploymentPart] = []
    policy: dict[str, Any] | str = msgspec.field(default_factory=dict)
    degradation_rules: Literal["default"] = "default"


DEFAULT_ENGINE = "vllm"


def apply(text: str, *, actor: str, reason: str = "") -> Result:
    """Apply a document. Raises DocumentError naming the place; then nothing has changed."""
    document = read_document(text, Document)
    run = Run(Act(actor, reason))
    with one_change(actor=actor, reason=reason):
        lock()
        apply_tenancy(document, run)
        for index, part in enumerate(document.deployments):
            _apply_deployment(part, f"deployments[{index}]", run)
        _apply_policy(document.policy, run)
    return run.result


def _apply_deployment(part: DeploymentPart, path: str, run: Run) -> None:
    deployment = Deployment.objects.filter(model=part.model).first()
    if part.state == "absent":
        if deployment is not None and deployment.removed_at is None:
            _remove_deployment(deployment, run)
        return
    if part.engine is not UNSET and part.engine not in ENGINES:
        known = ", ".join(sorted(ENGINES))
        raise DocumentError(f"{path}.engine", f"There is no engine {part.engine!r}; choose one of {known}.")
    values = {**given(part, "model", "state"), "removed_at": None}
    if deployment is None:
        deployment = Deployment(model=part.model, engine=DEFAULT_ENGINE)
    run.save(deployment, path, "deployments", part.model, values)


def _remove_deployment(deployment: Deployment, run: Run) -> None:
    """Its scheduler drains it; the row stays for what refers to it."""
    before = describe(deployment)
    deployment.removed_at = timezone.now()
    deployment.save(update_fields=["removed_at"])
    run.act.note("remove", deployment, before, describe(deployment))
    run.result.removed.append(f"deployment {deployment.model}")


def _apply_policy(fields: dict[str, Any] | str, run: Run) -> None:
    """Make tiers and policy the next version, if either differs from what is in force."""
    before = current()
    try:
        policy = check_policy({"name": fields} if isinstance(fields, str) else fields, before.policy)
    except ConfigError as error:
        raise DocumentError(error.path, error.message) from error
    if policy != before.policy:
        note(PolicyVersion)
        record(run.act.actor, "policy.change", "policy", before=before.policy, after=policy, reason=run.act.reason)
        changed = ", ".join(name for name, value in policy.items() if value != before.policy[name])
        run.result.changed.append(f"policy ({changed})")
    elif fields:
        run.result.unchanged += 1
    if run.result.did_anything:
        snapshot(policy, actor=run.act.actor, reason=run.act.reason)
