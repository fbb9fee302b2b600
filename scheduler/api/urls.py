from __future__ import annotations

from django.urls import path

from scheduler.api.dead_letters import DeadLettersView, DiscardView, RetryView
from scheduler.api.traces import TraceView
from scheduler.api.views import SimulatedRequestView

urlpatterns = [
    path("dead-letters", DeadLettersView.as_view(), name="dead-letters"),
    path("dead-letters/<int:letter_id>/retry", RetryView.as_view(), name="dead-letter-retry"),
    path("dead-letters/<int:letter_id>/discard", DiscardView.as_view(), name="dead-letter-discard"),
    path("requests/<str:request_id>/trace", TraceView.as_view(), name="request-trace"),
    path("simulated/requests/<str:request_id>", SimulatedRequestView.as_view(), name="simulated-request"),
]
