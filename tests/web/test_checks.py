"""What `manage.py check` says about an installation."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.checks import run_checks
from pytest_django.fixtures import Settings


def found() -> list[str]:
    return [str(message.id) for message in run_checks() if str(message.id).startswith("harness.")]


def test_a_fresh_installation_has_nothing_to_say() -> None:
    assert found() == []


def test_secrets_that_others_can_read_are_a_warning(settings: Settings, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    settings.HARNESS_SECRETS_DIR = tmp_path
    assert found() == ["harness.W001"]


@pytest.mark.parametrize(("hosts", "ids"), [(["localhost"], []), (["localhost", "llm.example"], ["harness.E001"])])
def test_debugging_in_front_of_strangers_is_an_error(settings: Settings, hosts: list[str], ids: list[str]) -> None:
    settings.DEBUG = True
    settings.ALLOWED_HOSTS = hosts
    assert found() == ids
