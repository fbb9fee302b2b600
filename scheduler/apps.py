from django.apps import AppConfig


class SchedulerConfig(AppConfig):
    name = "scheduler"

    def ready(self) -> None:
        """Have every change of a tier, from wherever, become a policy version."""
        from scheduler.config import snapshot_on_change
        from tenants.changes import configuration_changed

        configuration_changed.connect(snapshot_on_change, dispatch_uid="scheduler.config")
