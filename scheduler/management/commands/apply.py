"""`harness apply FILE`: tiers, tenants, keys, limits, prices, deployments and policy as a file says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError, ProgrammingError

from scheduler.apply import apply
from tenants.apply import Result
from tenants.audit import shell_actor
from tenants.changes import current_version, wait_acknowledged
from tenants.database import complaint
from tenants.documents import DocumentError

WAIT_SECONDS = 5.0


class Command(BaseCommand):
    help = "Bring the configuration to what FILE (YAML) says; safe to repeat. New keys are shown once."
    requires_system_checks = ()  # pages and URLs have no part in it

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", type=Path, metavar="FILE")
        parser.add_argument("--json", action="store_true", help="print what was done as JSON")
        parser.add_argument("--reason", default="", help="noted in the audit log")

    def handle(self, *args: Any, file: Path, json: bool, reason: str, **options: Any) -> None:
        try:
            text = file.read_text(encoding="utf-8")
            result = apply(text, actor=shell_actor("apply"), reason=reason)
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"{file} cannot be read: {error}") from error
        except DocumentError as error:
            raise CommandError(f"{file}: {error}") from error
        except (OperationalError, ProgrammingError) as error:
            hint = "`harness up` or `harness migrate` prepares an empty one."
            raise CommandError(f"The database cannot be used: {complaint(error)}. {hint}") from error
        self.stdout.write(_as_json(result) if json else _as_text(result))
        # Said first, waited for after: the secrets are shown even if somebody interrupts the wait.
        self.stdout.flush()
        if result.did_anything:
            self._wait()

    def _wait(self) -> None:
        """Until every running process acts on the change; a silent one is reported, not an error."""
        if lagging := wait_acknowledged(current_version(), WAIT_SECONDS):
            names = ", ".join(lagging)
            self.stderr.write(f"Applied, but not yet acknowledged after {WAIT_SECONDS:.0f} s by: {names}.")


def _as_json(result: Result) -> str:
    return json.dumps(result.as_json())


def _as_text(result: Result) -> str:
    lines = [f"created {section[:-1]} {name}" for section, names in result.created.items() for name in names]
    lines += [f"changed {name}" for name in result.changed]
    lines += [f"removed {name}" for name in result.removed]
    lines.append(f"unchanged {result.unchanged}")
    if result.keys:
        lines.append("New keys, shown only now:")
        lines += [f"  {key['tenant']}/{key['name']}  {key['key']}" for key in result.keys]
    return "\n".join(lines)
