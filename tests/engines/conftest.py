"""Fixtures of the engine tests. The contract's assertions are rewritten like those of test files."""

import os
from pathlib import Path

import pytest
from django.conf import settings

from scheduler import demo_model as demo
from tests.engines.tiny_model import make_tiny_model

# Read when the library is first imported, which a test may do before the engine does: no test looks for models outside.
os.environ["HF_HUB_OFFLINE"] = "1"

pytest.register_assert_rewrite("tests.engines.contract")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's folder. It is made once (30 s) in the checkout's own data directory, not for every run."""
    return demo.prepare(Path(settings.BASE_DIR) / "var" / "models", print)


@pytest.fixture(scope="session")
def tiny_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), demo_model)
