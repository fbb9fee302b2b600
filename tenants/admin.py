"""Tenancy in the admin. Every write is one change and leaves an audit event; secrets are shown once and never again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from allauth.account.models import EmailAddress
from django import forms
from django.contrib import admin, messages
from django.contrib.auth.admin import GroupAdmin as BaseGroupAdmin
from django.contrib.auth.admin import UserAdmin as BaseUserAdmin
from django.contrib.auth.models import Group, User
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponseBase
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.text import Truncator
from django.utils.translation import gettext_lazy as _
from unfold.admin import ModelAdmin, TabularInline
from unfold.forms import ActionForm, AdminPasswordChangeForm, UserChangeForm, UserCreationForm
from unfold.widgets import UnfoldAdminTextInputWidget

from .audit import MAX_REASON, Act, describe
from .changes import one_change
from .key_changes import KeyConflictError, enable, issue, revoke, rotate
from .memberships import describe_leaving, keys_left_by
from .models import (
    Adjustment,
    ApiKey,
    AuditEvent,
    BudgetAccount,
    BudgetAlert,
    BudgetLease,
    KeySecret,
    Limit,
    Membership,
    Price,
    ProcessHeartbeat,
    Retention,
    Scope,
    Tenant,
    Tier,
    UsageRecord,
)
from .models.change import Change
from .running_budgets import running_budgets
from .tiers import FIELDS, TierError, check_tiers

SHORT_REASON = 60  # characters


def actor_of(request: HttpRequest) -> str:
    return f"user {request.user.get_username()}"


def act_of(request: HttpRequest) -> Act:
    return Act(actor_of(request), reason_of(request), request.META.get("REMOTE_ADDR"))


def reason_of(request: HttpRequest) -> str:
    return request.POST.get("reason", "")


def in_utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def reason_field() -> forms.CharField:
    return forms.CharField(label=_("Reason"), required=False, max_length=MAX_REASON, widget=UnfoldAdminTextInputWidget)


class ReasonedActionForm(ActionForm):  # type: ignore[misc]  # the package has no types
    """What is to be done with the selected rows, and why: two fields of one height, side by side."""

    reason = forms.CharField(
        label=_("Reason"),
        max_length=MAX_REASON,
        widget=forms.TextInput({"class": "bg-white/20 font-medium px-2 py-1 rounded-default text-white w-full"}),
    )


class AuditedAdmin(ModelAdmin):  # type: ignore[misc]  # the package has no types
    """Base: what is saved or deleted here is audited, and everything of one click is one change.

    What concerns many rows at once needs a reason.
    """

    action_form = ReasonedActionForm
    delete_confirmation_template: Any = "admin/removal.html"
    delete_selected_confirmation_template: Any = "admin/removal.html"

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if request.method != "POST":  # reading must not wait for the database's one writer
            return super().changeform_view(request, *args, **kwargs)  # type: ignore[no-any-return]
        with one_change(actor=actor_of(request), reason=reason_of(request)):
            return super().changeform_view(request, *args, **kwargs)  # type: ignore[no-any-return]

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any]) -> Any:
        if reason_of(request).strip():
            return super().response_action(request, queryset)
        messages.error(request, _("Nothing was done: say why, in the field beside the action."))
        return None

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """The model's form, and beside it why it is filled in."""
        form: Any = kwargs.get("form", self.form)
        reason = reason_field()
        kwargs["form"] = type(form.__name__, (form,), {"reason": reason})
        return super().get_form(request, obj, change, **kwargs)

    def save_model(self, request: HttpRequest, obj: Any, form: forms.ModelForm[Any], change: bool) -> None:
        before = describe(type(obj)._default_manager.get(pk=obj.pk)) if change else None
        form.before = before  # type: ignore[attr-defined]  # until the relations are saved too
        super().save_model(request, obj, form, change)

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        super().save_related(request, form, formsets, change)
        self.audit(request, "change" if change else "create", form.instance, form.before, describe(form.instance))

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        with one_change(actor=actor_of(request), reason=reason_of(request)):
            self.audit(request, "remove", obj, self.describe_removal(obj), None)
            super().delete_model(request, obj)

    def describe_removal(self, obj: Any) -> dict[str, Any]:
        """What the audit log keeps of a row that is removed."""
        return describe(obj)

    def delete_queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        with one_change(actor=actor_of(request), reason=reason_of(request)):
            for obj in queryset:
                self.delete_model(request, obj)

    def audit(
        self,
        request: HttpRequest,
        action: str,
        obj: Model,
        before: dict[str, Any] | None,
        after: dict[str, Any] | None,
    ) -> None:
        act_of(request).note(action, obj, before, after)


class ReadOnlyAdmin(ModelAdmin):  # type: ignore[misc]  # the package has no types
    """Base: to be looked at."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


class LeavingAdmin(AuditedAdmin):
    """Base for people and their memberships: whose keys stay valid is said to who removes them, and on record."""

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        left = keys_left_by(obj)
        super().delete_model(request, obj)
        if left:
            names = ", ".join(str(key) for key in left)
            messages.warning(request, _("These keys stay valid; revoke those that must end: %s") % names)

    def describe_removal(self, obj: Any) -> dict[str, Any]:
        return describe_leaving(obj)


class TierForm(forms.ModelForm):  # type: ignore[type-arg]  # generic in the stubs only
    """Checks the tier together with all others: floors and reserved slots are shares of one engine."""

    class Meta:
        model = Tier
        fields = ["name", *FIELDS.values()]
        labels = {"min_slo_threshold": _("Min SLO threshold")}

    def _post_clean(self) -> None:
        super()._post_clean()  # type: ignore[misc]  # builds self.instance; not in the stubs
        if self.errors:
            return
        others = Tier.objects.exclude(pk=self.instance.pk)
        try:
            check_tiers([*others, self.instance])
        except TierError as error:
            mine = error.tier == self.instance.name
            self.add_error(FIELDS[error.field] if mine else None, error.message)


@admin.register(Tier)
class TierAdmin(AuditedAdmin):
    form = TierForm
    list_display = ("name", "rank", "weight", "floor", "slo_ttft", "slo_e2e", "slo_tpot", "objective")


@admin.register(Tenant)
class TenantAdmin(AuditedAdmin):
    list_display = ("slug", "name", "tier", "state", "timezone")
    list_filter = ("tier", "state")
    search_fields = ("slug", "name")

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> tuple[str, ...]:
        return ("budgets",) if obj else ()

    @admin.display(description=_("Budgets"))
    def budgets(self, tenant: Tenant) -> str:
        """Its budgets as they stand. When they begin anew is the instant that `GET /v1/limits` tells."""
        return render_to_string("admin/running_budgets.html", {"budgets": running_budgets(tenant, timezone.now())})


@admin.register(Membership)
class MembershipAdmin(LeavingAdmin):
    """Somebody who is to work for another tenant leaves this one first."""

    list_display = ("user", "role", "tenant")
    list_filter = ("role", "tenant")

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> tuple[str, ...]:
        return ("user", "tenant") if obj else ()


class ApiKeyForm(forms.ModelForm):  # type: ignore[type-arg]  # generic in the stubs only
    scopes = forms.MultipleChoiceField(
        choices=Scope.choices, widget=forms.CheckboxSelectMultiple, initial=[Scope.INFERENCE.value]
    )

    class Meta:
        model = ApiKey
        fields = ["tenant", "name", "owner", "scopes", "models", "allowed_ips", "expires_at"]


class KeySecretInline(TabularInline):  # type: ignore[misc]  # the package has no types
    """What may be shown of a key's secrets."""

    model = KeySecret
    fields = readonly_fields = ("prefix", "created_at", "valid_until", "last_used_at")
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


@admin.register(ApiKey)
class ApiKeyAdmin(AuditedAdmin):
    """Rotation here leaves the old secret good for a day; the API takes any time."""

    form = ApiKeyForm
    list_display = ("name", "tenant", "owner", "may", "expires_at", "revoked_at")
    list_filter = ("tenant",)
    list_select_related = ("tenant", "owner")
    search_fields = ("name", "secrets__lookup", "tenant__slug")
    actions = ("rotate", "revoke", "enable")

    def get_inlines(self, request: HttpRequest, obj: Model | None) -> tuple[type[TabularInline], ...]:
        return (KeySecretInline,) if obj else ()

    def get_readonly_fields(self, request: HttpRequest, obj: Model | None = None) -> tuple[str, ...]:
        """A key stays with its tenant, and keeps its name."""
        return ("tenant", "name", "owner", "created_at", "revoked_at") if obj else ()

    def save_model(self, request: HttpRequest, obj: Any, form: forms.ModelForm[Any], change: bool) -> None:
        if change:
            super().save_model(request, obj, form, change)
        else:
            self._show(request, obj, issue(obj, act_of(request)))

    def save_related(self, request: HttpRequest, form: Any, formsets: Any, change: bool) -> None:
        if change:  # a new key is already on record
            super().save_related(request, form, formsets, change)

    @admin.display(description=_("Scopes"))
    def may(self, key: ApiKey) -> str:
        return ", ".join(key.scopes)

    @admin.action(description="Rotate the selected keys: the old secrets are good for one more day")
    def rotate(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        def one(key: ApiKey) -> None:
            self._show(request, key, rotate(key, timedelta(days=1), act_of(request)))

        self._each(request, queryset, one)

    @admin.action(description="Revoke the selected keys")
    def revoke(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        self._each(request, queryset, lambda key: revoke(key, act_of(request)))

    @admin.action(description="Enable the selected keys again")
    def enable(self, request: HttpRequest, queryset: QuerySet[ApiKey]) -> None:
        self._each(request, queryset, lambda key: enable(key, act_of(request)))

    def _each(self, request: HttpRequest, queryset: QuerySet[ApiKey], change: Callable[[ApiKey], None]) -> None:
        """One change for all of them. Those that cannot be changed so are named to the user."""
        with one_change(actor=actor_of(request), reason=reason_of(request)):
            for key in queryset.select_related("tenant"):
                try:
                    change(key)
                except KeyConflictError as error:
                    messages.error(request, f"{key}: {error}")

    def _show(self, request: HttpRequest, key: ApiKey, token: str) -> None:
        messages.warning(request, f"The secret of {key}, shown only now: {token}")


@admin.register(Limit)
class LimitAdmin(AuditedAdmin):
    list_display = ("__str__", "tier", "tenant", "key", "model", "hard")
    list_filter = ("kind", "tier", "tenant")


@admin.register(BudgetAccount)
class BudgetAccountAdmin(ReadOnlyAdmin):
    list_display = ("__str__", "limit", "spent", "hard", "begins_anew")
    exclude = ("starts_at", "ends_at")  # they would be shown without their zone
    readonly_fields = ("begins_anew",)
    list_filter = ("scope", "unit", "period")
    search_fields = ("owner", "tenant_id")

    @admin.display(description=_("Begins anew"), ordering="ends_at")
    def begins_anew(self, account: BudgetAccount) -> str:
        return in_utc(account.ends_at) if account.ends_at else str(_("never"))


@admin.register(BudgetLease)
class BudgetLeaseAdmin(ReadOnlyAdmin):
    list_display = ("process", "epoch", "account", "amount")
    list_filter = ("process",)


@admin.register(BudgetAlert)
class BudgetAlertAdmin(ReadOnlyAdmin):
    list_display = ("at", "account", "level", "spent", "limit")


@admin.register(Price)
class PriceAdmin(AuditedAdmin):
    """Prices are never edited: add one with a later date."""

    list_display = ("model", "tier", "tenant", "input_per_mtok", "output_per_mtok", "currency", "effective_from")
    list_filter = ("model",)

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False


@admin.register(UsageRecord)
class UsageRecordAdmin(ReadOnlyAdmin):
    list_display = (
        "request_id",
        "tenant_slug",
        "key_name",
        "tier",
        "model",
        "status",
        "prompt_tokens",
        "completion_tokens",
        "charge",
        "arrived_at",
    )
    list_filter = ("status", "model", "tier")
    search_fields = ("request_id", "tenant_slug")
    show_full_result_count = False  # the ledger grows long


@admin.register(Adjustment)
class AdjustmentAdmin(ReadOnlyAdmin):
    list_display = ("at", "tenant_slug", "model", "amount", "currency", "reason", "author")
    list_filter = ("currency",)
    search_fields = ("tenant_slug", "reason", "author")


@admin.register(Retention)
class RetentionAdmin(ReadOnlyAdmin):
    list_display = ("kept_since",)


@admin.register(AuditEvent)
class AuditEventAdmin(ReadOnlyAdmin):
    list_display = ("when", "actor", "action", "target", "why")
    fields = ("when", "actor", "action", "target", "before", "after", "reason", "source_ip", "tenant_id")
    readonly_fields = ("when",)
    list_filter = ("action",)
    search_fields = ("actor", "target", "reason")
    show_full_result_count = False

    @admin.display(description=_("At"), ordering="at")
    def when(self, event: AuditEvent) -> str:
        return in_utc(event.at)

    @admin.display(description=_("Reason"))
    def why(self, event: AuditEvent) -> str:
        """Its beginning: on a phone a row of the list has one line."""
        return Truncator(event.reason).chars(SHORT_REASON)


@admin.register(ProcessHeartbeat)
class ProcessHeartbeatAdmin(ReadOnlyAdmin):
    list_display = ("name", "kind", "seen_version", "beat_at")


@admin.register(Change)
class ChangeAdmin(ReadOnlyAdmin):
    list_display = ("version",)


# --- people: Django's own admins, in the same dress and audited -------------------------------------------------------

admin.site.unregister(User)
admin.site.unregister(Group)
admin.site.unregister(EmailAddress)  # nothing here sends mail


@admin.register(User)
class UserAdmin(BaseUserAdmin, LeavingAdmin):  # type: ignore[type-arg]  # generic in the stubs only
    form = UserChangeForm
    add_form = UserCreationForm
    change_password_form = AdminPasswordChangeForm

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        return (*super().get_fieldsets(request, obj), (None, {"fields": ("reason",)}))

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        """The page that sets a password saves by itself, and says so only here."""
        if request.resolver_match and request.resolver_match.url_name == "auth_user_password_change":
            self.audit(request, "password", obj, None, None)
        return super().log_change(request, obj, message)


@admin.register(Group)
class GroupAdmin(BaseGroupAdmin, AuditedAdmin):
    pass
