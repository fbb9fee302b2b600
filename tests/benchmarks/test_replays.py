"""The benchmark of replays: its shapes, its arms, and the tables that it puts into the guide."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import replays
from benchmarks.arms import ABLATIONS, ARMS, BASELINES, OURS, Arm
from benchmarks.replays import SECTIONS, SHAPES, Setting, Table, Traces, parse, run, write_guide
from scheduler.core.policies import POLICIES
from scheduler.simulator.trace import TraceRow
from tests.core.traces import chat_rows, write_trace

SMALL = Setting("small.csv.gz", "a10g-7b", 3.0)


@pytest.fixture(autouse=True)
def small_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trace(tmp_path / SMALL.trace, chat_rows(200))
    monkeypatch.setattr(Traces, "folder", tmp_path, raising=False)
    monkeypatch.setattr(Setting, "title", "small")
    for cached in (Traces.rows, replays.workload_of, run):
        cached.cache_clear()


def test_bursts_keep_the_time_that_rows_span_and_triple_their_rate_for_a_tenth_of_it() -> None:
    rows = tuple(TraceRow(at / 10, 1, 1) for at in range(8000))  # 10 a second for 800 s
    warped = [row.arrival for row in SHAPES["bursts"](rows, 1.0)]
    assert warped == sorted(warped)
    assert warped[-1] == pytest.approx(rows[-1].arrival, abs=0.1)
    calm = sum(100 <= at < 120 for at in warped)
    burst = sum(180 <= at < 200 for at in warped)
    assert burst / calm == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize("arm", [*ABLATIONS, *BASELINES], ids=lambda arm: arm.name)
def test_every_arm_runs_to_the_end_and_leaves_the_products_policies_as_they_were(arm: Arm) -> None:
    before = dict(POLICIES)
    found = run(SMALL, arm)
    assert sum(found.requests.values()) == 200
    assert 0 < sum(found.attained.values()) <= 200
    assert before == POLICIES


def test_an_arm_that_refuses_nothing_serves_more_requests_than_one_that_does() -> None:
    no_refusal = next(arm for arm in ABLATIONS if arm.name == "no refusal")
    assert run(SMALL, no_refusal).throughput > run(SMALL, ARMS[OURS]).throughput


def test_the_highest_load_is_found_on_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "_holds", lambda setting, name: setting.rho <= 1.37)
    assert replays._highest_load(SMALL, OURS) == 1.35


def test_tables_are_put_between_the_markers_of_their_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = tmp_path / "guide.md"
    guide.write_text("before\n<!-- replays: speed -->\nold\n<!-- end -->\nafter\n")
    monkeypatch.setattr(replays, "GUIDE", guide)
    write_guide({"speed": [Table("How fast.", ["a", "b"], [["1", "2"]]).markdown()]})
    assert guide.read_text() == (
        "before\n<!-- replays: speed -->\nHow fast.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n<!-- end -->\nafter\n"
    )
    with pytest.raises(ValueError, match="no place for the section headline"):
        write_guide({"headline": []})


def test_the_guide_has_a_place_for_every_section() -> None:
    guide = replays.GUIDE.read_text()
    assert [name for name in SECTIONS if f"<!-- replays: {name} -->" not in guide] == []


def test_unknown_sections_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--traces", ".", "--only", "speed,speeed"])
    assert "no section 'speeed'" in capsys.readouterr().err
