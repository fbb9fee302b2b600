"""How pages look and what they may load: theme and language in the first byte, Content-Security-Policy by address."""

from __future__ import annotations

from typing import Any

from csp.middleware import CSPMiddleware, PolicyParts
from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST
from django_htmx.http import trigger_client_event

from harness_web.console.access import is_operator

THEME_COOKIE = "harness_theme"
THEMES = ("light", "dark", "system")
YEAR = 365 * 24 * 3600


class PagePolicyMiddleware(CSPMiddleware):  # type: ignore[misc]  # the package has no types
    """The strict policy everywhere but under the addresses of front ends that are not ours."""

    def get_policy_parts(
        self, request: HttpRequest, response: HttpResponseBase, report_only: bool = False
    ) -> PolicyParts:
        parts = super().get_policy_parts(request, response, report_only)
        exceptions = settings.HARNESS_CSP_EXCEPTIONS.items()
        parts.replace = next((rules for prefix, rules in exceptions if request.path_info.startswith(prefix)), None)
        return parts


def theme_of(request: HttpRequest) -> str:
    """light, dark or system: what the visitor chose last in this browser."""
    chosen = request.COOKIES.get(THEME_COOKIE, "system")
    return chosen if chosen in THEMES else "system"


def appearance(request: HttpRequest) -> dict[str, Any]:
    """Template context of every page."""
    return {
        "theme": theme_of(request),
        "languages": settings.LANGUAGES,
        "viewer_is_operator": is_operator(request.user) if hasattr(request, "user") else False,
    }


@require_POST
def choose_theme(request: HttpRequest) -> HttpResponse:
    """Remember the theme. By htmx the page changes in place, without scripts the visitor comes back to it."""
    theme = request.POST.get("theme", "")
    if theme not in THEMES:
        return HttpResponse("theme is one of: " + ", ".join(THEMES), status=400, content_type="text/plain")
    response: HttpResponse
    if request.htmx:  # type: ignore[attr-defined]  # set by HtmxMiddleware
        response = HttpResponse(status=204)
        trigger_client_event(response, "harness:theme", {"theme": theme})
    else:
        back = request.POST.get("next", "/")
        safe = url_has_allowed_host_and_scheme(back, allowed_hosts={request.get_host()})
        response = HttpResponseRedirect(back if safe else "/")
    response.set_cookie(THEME_COOKIE, theme, max_age=YEAR, samesite="Lax", httponly=True)
    return response
