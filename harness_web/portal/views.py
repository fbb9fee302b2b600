"""The front door: operators go to the console, everybody else learns how to call the API."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from harness_web.console.access import is_operator
from harness_web.console.live import BOARD


@require_safe
@never_cache
def home(request: HttpRequest) -> HttpResponse:
    """Base URL, first request, and which models are being served at this moment."""
    if is_operator(request.user):
        return redirect("console:overview")
    view = BOARD.view()
    context = {
        "base_url": request.build_absolute_uri("/v1"),
        "view": view,
        "example_model": next((engine.model for engine in view.engines if engine.state == "ready"), "demo"),
    }
    return render(request, "portal/home.html", context)
