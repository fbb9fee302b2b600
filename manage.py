#!/usr/bin/env python
"""The one command-line entry: `python manage.py …` in a checkout, `harness …` once installed."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version


def main() -> None:
    """Run a management command; `--version` answers without loading Django."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "harness_web.settings")
    if sys.argv[1:2] == ["--version"]:
        try:
            print("llm-harness", version("llm-harness"))
        except PackageNotFoundError:
            sys.exit("llm-harness is not installed in this environment: run `make setup`.")
        return
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
