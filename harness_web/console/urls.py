from django.urls import path

from harness_web.console import views

app_name = "console"
urlpatterns = [
    path("", views.overview, name="overview"),
    path("overview.json", views.overview_frame, name="overview-frame"),
]
