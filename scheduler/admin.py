"""Deployments in the admin, and what the schedulers say of themselves."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils import timezone

from scheduler.engines import ENGINES
from scheduler.models import Deployment, DeploymentStatus, PolicyVersion, SchedulerProcess
from tenants.admin import AuditedAdmin, ReadOnlyAdmin, actor_of, reason_of
from tenants.audit import describe
from tenants.changes import one_change


class DeploymentForm(forms.ModelForm):  # type: ignore[type-arg]  # generic in the stubs only
    engine = forms.ChoiceField(choices=[(name, name) for name in sorted(ENGINES)])

    class Meta:
        model = Deployment
        fields = ["model", "engine", "options", "pool", "enabled"]


@admin.register(Deployment)
class DeploymentAdmin(AuditedAdmin):
    """Removing lets the scheduler drain; the row stays, so that the model can be deployed again."""

    form = DeploymentForm
    list_display = ("model", "engine", "pool", "enabled", "removed_at", "state")
    actions = ("remove", "deploy_again")

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> tuple[str, ...]:
        return ("removed_at",) if obj else ()

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    @admin.display
    def state(self, deployment: Deployment) -> str:
        status = DeploymentStatus.objects.filter(deployment=deployment).first()
        return status.state if status else ""

    @admin.action(description="Remove the selected deployments")
    def remove(self, request: HttpRequest, queryset: QuerySet[Deployment]) -> None:
        self._set(request, queryset.filter(removed_at__isnull=True), "remove", timezone.now())

    @admin.action(description="Deploy the selected deployments again")
    def deploy_again(self, request: HttpRequest, queryset: QuerySet[Deployment]) -> None:
        self._set(request, queryset.filter(removed_at__isnull=False), "deploy", None)

    def _set(self, request: HttpRequest, queryset: QuerySet[Deployment], action: str, removed_at: Any) -> None:
        with one_change(actor=actor_of(request), reason=reason_of(request)):
            for deployment in queryset:
                before = describe(deployment)
                deployment.removed_at = removed_at
                deployment.save(update_fields=["removed_at"])
                self.audit(request, action, deployment, before, describe(deployment))


@admin.register(DeploymentStatus)
class DeploymentStatusAdmin(ReadOnlyAdmin):
    list_display = ("deployment", "state", "message", "process", "updated_at")


@admin.register(PolicyVersion)
class PolicyVersionAdmin(ReadOnlyAdmin):
    list_display = ("version", "actor", "reason", "created_at")


@admin.register(SchedulerProcess)
class SchedulerProcessAdmin(ReadOnlyAdmin):
    list_display = ("name", "epoch", "address", "lease_until", "started_at")
