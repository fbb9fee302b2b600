"""The import rules of docs/architecture.md, checked on the source and in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("harness_web", "tenants", "scheduler")
ENVIRONMENT_READERS = {"harness_web/env.py", "harness_web/settings.py"}
# Writing is another matter than reading: an engine takes some settings from the environment only.
ENVIRONMENT_WRITES = {"setdefault", "pop", "update"}


def sources() -> list[Path]:
    return [ROOT / "manage.py", *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))]


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def test_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_core_imports_only_the_standard_library_and_itself() -> None:
    """In an interpreter without site-packages, so that nothing else can have been loaded before."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "scheduler" / "core").rglob("*.py"))
    ]
    program = (
        f"import sys, importlib; sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(*sys.modules, sep='\\n')"
    )
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    strangers = [
        module
        for module in loaded
        if module.partition(".")[0] not in sys.stdlib_module_names | {"__main__", "scheduler"}
        or (module.startswith("scheduler.") and not module.startswith("scheduler.core"))
    ]
    assert strangers == []
    assert "asyncio" not in loaded
    assert "logging" not in loaded


def test_vllm_is_imported_only_by_its_engine() -> None:
    """Lazy imports too, which the contracts on modules do not tell from others."""
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if any(name.partition(".")[0] == "vllm" for name in imported_modules(ast.parse(path.read_text())))
    }
    assert importers <= {"scheduler/engines/vllm.py", "scheduler/engines/vllm_shaper.py"}


def environment_reads(tree: ast.Module) -> list[int]:
    """Lines that read `os.environ` or call `os.getenv`."""
    written = {
        id(node.value)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_WRITES)
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and id(node) not in written)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {"environ", "getenv"} & names_of(node))
    ]


def names_of(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    if path.relative_to(ROOT).as_posix() not in ENVIRONMENT_READERS:
        assert environment_reads(ast.parse(path.read_text())) == []
