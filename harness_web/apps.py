from django.apps import AppConfig


class HarnessWebConfig(AppConfig):
    name = "harness_web"
