"""`harness replay` from the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from tests.core.traces import chat_rows, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "chat.csv.gz", chat_rows(150))


def replay(*arguments: object) -> str:
    """What the command prints."""
    output = io.StringIO()
    call_command("replay", *[str(argument) for argument in arguments], stdout=output)
    return output.getvalue()


def replay_json(*arguments: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(replay(*arguments, "--json"))
    return document


def without_timings(document: dict[str, Any]) -> dict[str, Any]:
    """CPU times are the one thing that two runs may differ in."""
    for policy in document["policies"].values():
        assert policy.pop("decision_us").keys() == {"p50", "p99"}
    return document


def test_json_has_the_published_shape(trace: Path) -> None:
    document = replay_json(trace, "--rho", "1.2", "--policy", "continuous", "--policy", "priority")
    assert document.keys() >= {"trace", "rho", "seed", "requests", "bound", "policies"}
    assert (document["trace"], document["seed"], document["requests"]) == (str(trace), 1, 150)
    assert document["rho"] == pytest.approx(1.2)
    assert 0 < document["bound"]["value"] <= 1
    assert list(document["policies"]) == ["continuous", "priority"]
    policy = document["policies"]["priority"]
    assert policy.keys() >= {
        "throughput_rps", "throughput_tps", "goodput_rps", "value", "value_of_bound", "preemptions", "decision_us",
    }  # fmt: skip
    assert policy["value_of_bound"] == pytest.approx(policy["value"] / document["bound"]["value"])
    assert list(policy["tiers"]) == ["vip", "paid", "free"]
    tier = policy["tiers"]["vip"]
    assert tier.keys() == {
        "requests", "attained", "attainment", "rejected", "ttft", "e2e", "share_expected", "share_received",
    }  # fmt: skip
    assert tier["attainment"] == tier["attained"] / tier["requests"]
    assert tier["ttft"].keys() == tier["e2e"].keys() == {"p50", "p95", "p99"}
    assert sum(tier["requests"] for tier in policy["tiers"].values()) == 150


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(trace: Path) -> None:
    options = (trace, "--rho", "1.1", "--policy", "priority", "--stream-share", "0.7")
    first = without_timings(replay_json(*options))
    assert first == without_timings(replay_json(*options))
    assert first != without_timings(replay_json(*options, "--seed", "2"))


def test_without_options_time_is_the_traces_own_and_every_policy_runs(trace: Path) -> None:
    text = replay(trace, "--limit", "20")
    assert "20 requests over" in text
    assert all(name in text for name in ("continuous", "priority", "vip", "of the bound"))


def test_the_bound_can_be_left_out(trace: Path) -> None:
    document = replay_json(trace, "--no-bound", "--policy", "continuous")
    assert document["bound"]["value"] is None
    assert document["policies"]["continuous"]["value_of_bound"] is None


def test_tiers_and_policy_come_from_an_apply_document(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "apply.yaml"
    config.write_text(
        "tiers:\n"
        "  - {name: only, rank: 1, weight: 1, slo: {ttft: 9, tpot: 1}, max_tokens: 7}\n"
        "policy: {name: priority, max_batch: 3}\n"
    )
    document = replay_json(trace, "--config", config, "--policy", "continuous", "--rho", "0.5")
    policy = document["policies"]["continuous"]
    assert list(policy["tiers"]) == ["only"]
    assert policy["mean_batch"] <= 3
    assert policy["throughput_tps"] <= 7 * policy["throughput_rps"] + 1e-9


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("tiers: [{name: a, rankk: 1}]", "rankk"),
        ("tiers: [{name: a, rank: 1, floor: 7}]", "floor"),
        ("policy: {max_batch: none}", "policy.max_batch"),
        ("policy: nonsense", "nonsense"),
        ("tiers: {", "apply.yaml"),
    ],
)
def test_a_bad_apply_document_names_its_place(trace: Path, tmp_path: Path, content: str, says: str) -> None:
    config = tmp_path / "apply.yaml"
    config.write_text(content)
    with pytest.raises(CommandError, match=says):
        replay(trace, "--config", config)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--policy", "astrology"), "astrology"),
        (("--rho", "0"), "above 0"),
        (("--rho", "nan"), "above 0"),
        (("--limit", "0"), "at least 1"),
        (("--stream-share", "2"), "from 0 to 1"),
        (("--length-scale", "1,2,3"), "one factor above 0"),
        (("--mix", "1,2"), "share for each of the 3 tiers"),
        (("--mix", "a"), "invalid"),
        (("--profile", "abacus"), "abacus"),
        (("--config", "absent.yaml"), "absent.yaml"),
        (("--html", "/no/such/folder/page.html"), "page.html"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(trace: Path, options: tuple[str, ...], says: str) -> None:
    with pytest.raises(CommandError, match=says):
        replay(trace, "--limit", "5", *options)


def test_a_trace_that_is_none_is_refused(tmp_path: Path) -> None:
    path, page = tmp_path / "empty.csv", tmp_path / "page.html"
    path.touch()
    with pytest.raises(CommandError, match="lacks the column"):
        replay(path, "--html", page)
    assert not page.exists()


def test_the_page_of_charts_is_written_beside_the_results(trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = replay(trace, "--rho", "1.3", "--policy", "continuous", "--policy", "priority", "--html", page)
    written = page.read_text(encoding="utf-8")
    assert "<h2>Attainment by tier and policy</h2>" in written
    assert "all figures are predictions of h100-8b, derived from datasheets, not measured" in text
    assert "Predicted by h100-8b, derived from datasheets, not measured." in written


def test_a_long_run_says_how_far_it_is(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scheduler.management.commands.replay.PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("scheduler.simulator.replay.PROGRESS_EVERY", 100)
    replay(trace, "--policy", "continuous", "--no-bound")
    said = capsys.readouterr().err
    assert "continuous: 100 of 150" in said
    assert said.count("continuous: 150 of 150") == 1


def test_a_policy_that_is_named_twice_runs_once(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scheduler.management.commands.replay.PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("scheduler.simulator.replay.PROGRESS_EVERY", 100)
    replay(trace, "--policy", "priority", "--policy", "priority", "--no-bound")
    assert capsys.readouterr().err.count("priority: 150 of 150") == 1
