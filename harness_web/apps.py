from django.apps import AppConfig


class HarnessWebConfig(AppConfig):
    name = "harness_web"

    def ready(self) -> None:
        from harness_web import checks  # noqa: F401  registers them
