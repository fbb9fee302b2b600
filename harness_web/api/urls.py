"""The management API under /api/: the schema, its documentation, and every area's own URLs."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, URLResolver, include, path, re_path
from django.views.decorators.csrf import csrf_exempt
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView

from harness_web.api.errors import answer_error
from harness_web.openai.errors import ApiError


@csrf_exempt  # it changes nothing, and a script is to be told in the API's words
def unknown(request: HttpRequest) -> HttpResponse:
    return answer_error(ApiError("unknown_url", f"Unknown URL: {request.method} {request.path[:200]}"))


urlpatterns: list[URLPattern | URLResolver] = [
    path("schema/", SpectacularAPIView.as_view(), name="schema"),
    path("docs/", SpectacularSwaggerSplitView.as_view(url_name="schema"), name="docs"),
    path("v1/", include("tenants.api.urls")),
    path("v1/", include("scheduler.api.urls")),
    re_path("", unknown),
]
