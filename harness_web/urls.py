"""Pages and the management API. The data plane under /v1 never gets here: see `asgi.py`."""

from django.contrib import admin
from django.urls import URLPattern, URLResolver, include, path

urlpatterns: list[URLPattern | URLResolver] = [
    path("admin/", admin.site.urls),
    path("accounts/", include("allauth.account.urls")),
]
