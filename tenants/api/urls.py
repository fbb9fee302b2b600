from __future__ import annotations

from django.urls import path

from tenants.api.adjustments import AdjustmentsView
from tenants.api.audit import AuditCsvView, AuditJsonView, AuditView
from tenants.api.keys import EnableKeyView, KeysView, KeyView, RevokeKeyView, RotateKeyView
from tenants.api.tenants import MembershipsView, TenantsView, TenantView
from tenants.api.tiers import TiersView, TierView
from tenants.api.usage import CsvRecordsView, JsonRecordsView, UsageView

urlpatterns = [
    path("tenants", TenantsView.as_view(), name="tenants"),
    path("tenants/<str:slug>", TenantView.as_view(), name="tenant"),
    path("memberships", MembershipsView.as_view(), name="memberships"),
    path("tiers", TiersView.as_view(), name="tiers"),
    path("tiers/<str:name>", TierView.as_view(), name="tier"),
    path("keys", KeysView.as_view(), name="keys"),
    path("keys/<int:key_id>", KeyView.as_view(), name="key"),
    path("keys/<int:key_id>/rotate", RotateKeyView.as_view(), name="rotate-key"),
    path("keys/<int:key_id>/revoke", RevokeKeyView.as_view(), name="revoke-key"),
    path("keys/<int:key_id>/enable", EnableKeyView.as_view(), name="enable-key"),
    path("adjustments", AdjustmentsView.as_view(), name="adjustments"),
    path("audit", AuditView.as_view(), name="audit"),
    path("audit/export.json", AuditJsonView.as_view(), name="audit-json"),
    path("audit/export.csv", AuditCsvView.as_view(), name="audit-csv"),
    path("usage", UsageView.as_view(), name="usage"),
    path("usage/records.csv", CsvRecordsView.as_view(), name="usage-records-csv"),
    path("usage/records.json", JsonRecordsView.as_view(), name="usage-records-json"),
]
