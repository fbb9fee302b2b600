"""`make setup` where it cannot succeed: one sentence, and nothing that a later run takes for finished."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journey.product import ROOT

NAMES = ("python3", "python3.11", "python3.12", "python3.13")  # what the script looks for


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What set-up needs of a checkout."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def set_up(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "requirements/install.sh"],
        cwd=checkout,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_old_python_is_named_in_one_sentence(checkout: Path) -> None:
    programs = checkout / "bin"
    programs.mkdir()
    for name in NAMES:
        old = programs / name
        old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
        old.chmod(0o755)
    result = set_up(checkout, PATH=f"{programs}:{os.environ['PATH']}", PYTHON="")
    assert result.returncode == 1
    assert "Harness needs Python 3.11 or newer with pip and venv; found: Python 3.9.2" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_unreachable_package_index_is_one_sentence_and_not_a_finished_set_up(checkout: Path) -> None:
    nobody = "http://127.0.0.1:9/simple"  # the discard port: nothing listens
    result = set_up(
        checkout,
        PYTHON=sys.executable,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL=nobody,
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
    )
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "setup: the package index cannot be reached: check the network (or pip's configured mirror) "
        "and run make setup again."
    ]
    assert (checkout / ".venv" / ".setup-unfinished").exists()
    assert not (checkout / ".venv" / ".setup-complete").exists()
