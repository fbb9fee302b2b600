#!/usr/bin/env python
"""The one command-line entry: `python manage.py …` in a checkout, `harness …` once installed."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version

if sys.version_info < (3, 11):  # noqa: UP036  an older Python gets this sentence instead of a syntax error
    sys.exit("Harness needs Python 3.11 or newer; this is Python %d.%d." % sys.version_info[:2])  # noqa: UP031


def main() -> None:
    """Run a management command; `--version` answers without loading Django."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "harness_web.settings")
    if sys.argv[1:2] == ["--version"]:
        try:
            print("llm-harness", version("llm-harness"))
        except PackageNotFoundError:
            sys.exit("llm-harness is not installed in this environment: run `make setup`.")
        return
    take_data_dir(sys.argv[1:])
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(f"harness: {error}")


def take_data_dir(arguments: list[str]) -> None:
    """Let `harness up --data-dir DIR` decide before the settings are loaded, since they keep secrets there."""
    if arguments[:1] != ["up"]:
        return
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, has_value, value = argument.partition("=")
        if name == "--data-dir" and (value or following):
            os.environ["HARNESS_DATA_DIR"] = value if has_value else following


if __name__ == "__main__":
    main()
