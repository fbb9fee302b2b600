"""docs/operations.md lists what there is: variables, options, tier fields, metrics; and its example can be applied."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from pathlib import Path

import pytest

from harness_web.management.commands.up import Command
from scheduler.apply import apply
from scheduler.config import check_policy
from scheduler.core.types import PolicyConfig
from scheduler.engines.simulated.options import Options
from scheduler.engines.vllm_options import ALIASES, SHAPER, TOOL_PARSER
from scheduler.worker.metrics import Metrics
from tenants.tiers import FIELDS

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def table(heading: str) -> list[str]:
    """The first column, without its code marks, of the table whose heading row starts with this cell."""
    _, found, rest = OPERATIONS.partition(f"| {heading} |")
    assert found, f"there is no table of {heading}"
    rows = rest.split("\n\n", 1)[0].splitlines()[2:]
    return [row.split("|")[1].strip(" `") for row in rows]


def test_the_environment_is_what_the_product_reads() -> None:
    read = re.findall(r"\"(HARNESS_[A-Z_]+)\"", (ROOT / "harness_web" / "env.py").read_text())
    assert sorted(table("variable")) == sorted(set(read))


def test_the_options_are_those_of_up() -> None:
    parser = ArgumentParser(add_help=False)
    Command().add_arguments(parser)
    assert table("option") == [action.option_strings[0] for action in parser._actions]


def test_the_metrics_are_those_of_the_scheduler() -> None:
    families = Metrics().registry.collect()
    names = [f"{family.name}_total" if family.type == "counter" else family.name for family in families]
    assert sorted(table("metric")) == sorted(names)


def test_the_fields_of_a_tier_are_those_of_documents() -> None:
    assert table("field") == list(FIELDS)


def test_the_fields_of_the_policy_are_those_of_the_configuration() -> None:
    defaults = PolicyConfig()
    assert check_policy({name: getattr(defaults, name) for name in table("field of `policy`")}, {}) == {
        "name": defaults.name,
        "max_batch": defaults.max_batch,
        "max_wait_ms": defaults.max_wait_ms,
        "step_tokens": defaults.step_tokens,
    }


def test_the_options_of_engines_are_those_that_they_take() -> None:
    assert table("option of `simulated`") == list(Options.__struct_fields__)
    assert set(table("option of `vllm`")) == {*ALIASES, SHAPER, TOOL_PARSER, "model"}


@pytest.mark.django_db
def test_the_example_can_be_applied_and_a_second_time_changes_nothing() -> None:
    found = re.search(r"```yaml\n(.*?)```", OPERATIONS, re.DOTALL)
    assert found
    first = apply(found[1], actor="docs")
    assert [key["name"] for key in first.keys] == ["ci"]
    second = apply(found[1], actor="docs")
    assert not second.did_anything
