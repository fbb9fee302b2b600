"""The documents speak of what is there: paths, `make` targets and `harness` commands that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.core.management import get_commands

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TREES = ("harness_web", "tenants", "scheduler", "templates", "tests", "docs", "benchmarks", "requirements", ".ci")

CODE = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(rf"(?:{'|'.join(map(re.escape, TREES))})/[\w./*-]*")
MAKE = re.compile(r"\bmake ([a-z]+)\b")
HARNESS = re.compile(r"(?:^|\bbin/|\$ )harness ([a-z_]+)\b", re.MULTILINE)


def code_of(text: str) -> list[str]:
    """Everything that a document sets as code: spans and fenced blocks."""
    return [*FENCED.findall(text), *CODE.findall(FENCED.sub("", text))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
class TestDocument:
    def test_named_paths_exist(self, document: Path) -> None:
        named = [path.rstrip(".") for code in code_of(document.read_text()) for path in PATH.findall(code)]
        assert [path for path in named if not any(ROOT.glob(path.rstrip("/")))] == []

    def test_links_lead_somewhere(self, document: Path) -> None:
        targets = [target for target in LINK.findall(document.read_text()) if "://" not in target]
        assert [target for target in targets if not (document.parent / target).exists()] == []

    def test_make_targets_exist(self, document: Path) -> None:
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        named = {name for code in code_of(document.read_text()) for name in MAKE.findall(code)}
        assert named <= targets

    def test_harness_commands_exist(self, document: Path) -> None:
        named = {name for code in code_of(document.read_text()) for name in HARNESS.findall(code)}
        assert named <= set(get_commands())


def test_every_make_target_has_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z]+):(?!=)(.*)$", makefile, re.MULTILINE)
    assert targets
    assert [name for name, rest in targets if "## " not in rest] == []


def test_locks_name_versions_and_no_address() -> None:
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    lines = [line for lock in locks for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"-r base\.txt|[\w.-]+==[\w.!+-]+", line)] == []
