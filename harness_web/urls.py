"""Pages and the management API. The data plane under /v1 never gets here: see `asgi.py`."""

from allauth.account import views as account
from allauth.account.decorators import secure_admin_login
from django.contrib import admin
from django.templatetags.static import static
from django.urls import URLPattern, URLResolver, include, path
from django.views.generic import RedirectView
from django.views.i18n import set_language

from harness_web.accounts import first_operator
from harness_web.appearance import choose_theme
from harness_web.portal.views import home

admin.site.login = secure_admin_login(admin.site.login)  # type: ignore[method-assign]  # one login page, with its rate limits

urlpatterns: list[URLPattern | URLResolver] = [
    path("", home, name="home"),
    path("console/", include("harness_web.console.urls")),
    path("setup/<str:token>/", first_operator, name="first-operator"),
    path("appearance/theme/", choose_theme, name="choose-theme"),
    path("appearance/language/", set_language, name="choose-language"),
    # Signing in and out, and nothing that would need mail: accounts are made and reset by an operator.
    path("accounts/login/", account.login, name="account_login"),
    path("accounts/logout/", account.logout, name="account_logout"),
    path("accounts/inactive/", account.account_inactive, name="account_inactive"),
    path("accounts/password/change/", account.password_change, name="account_change_password"),
    path("favicon.ico", RedirectView.as_view(url=static("harness/mark.svg"))),  # pages that are not ours ask for it
    path("api/", include("harness_web.api.urls")),
    path("admin/", admin.site.urls),
]
