from __future__ import annotations

from django.urls import path

from scheduler.api.views import SimulatedRequestView

urlpatterns = [
    path("simulated/requests/<str:request_id>", SimulatedRequestView.as_view(), name="simulated-request"),
]
