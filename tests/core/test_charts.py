"""The page of charts: what each chart shows is what the JSON document says, and no name can break out of it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from scheduler.core.types import Contract
from scheduler.simulator import charts
from scheduler.simulator.charts import COLOURS, Panel, panels, write_charts
from scheduler.simulator.replay import Replay
from scheduler.simulator.report import COLUMNS, Report
from scheduler.simulator.timeline import MOST_SLICES, Slice, Timeline
from scheduler.simulator.workload import DEFAULT_TIERS
from tests.core.replays import replayed

PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
KINDS = (("TTFT", "ttft"), ("E2E latency", "e2e"))
ROUNDED = 1e-3  # relative: figures of charts have four digits
HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run() -> tuple[Report, list[Replay]]:
    return replayed()


@pytest.fixture(scope="module")
def document(run: tuple[Report, list[Replay]]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(json.dumps(run[0].as_json(), allow_nan=False))
    return said


@pytest.fixture(scope="module")
def shown(run: tuple[Report, list[Replay]]) -> dict[str, Panel]:
    return {panel.heading: panel for panel in panels(*run)}


def traces(panel: Panel) -> dict[str, dict[str, Any]]:
    """By name; no two have the same."""
    named = {trace["name"]: trace for trace in panel.traces}
    assert len(named) == len(panel.traces)
    return named


# --- each chart against the document --------------------------------------------------------------------------------


def test_attainment_is_the_documents(document: dict[str, Any], shown: Mapping[str, Panel]) -> None:
    drawn = traces(shown["Attainment by tier and policy"])
    assert drawn.keys() == {"continuous", "priority", "objective"}
    for name, policy in document["policies"].items():
        by_tier = dict(zip(drawn[name]["x"], drawn[name]["y"], strict=True))
        assert by_tier == {tier: figures["attainment"] for tier, figures in policy["tiers"].items()}
    assert drawn["objective"]["y"] == [tier.objective for tier in DEFAULT_TIERS.values()]


def test_distributions_pass_through_the_documents_percentiles(
    document: dict[str, Any], shown: Mapping[str, Panel]
) -> None:
    for name, policy in document["policies"].items():
        for tier, figures in policy["tiers"].items():
            for kind, key in KINDS:
                drawn = traces(shown[f"{kind} of {tier}"])[name]
                points = list(zip(drawn["x"], drawn["y"], strict=True))
                assert len(points) == figures["requests"] - figures["rejected"]
                assert points[-1][1] == 1
                reached = {p: next(x for x, y in points if y >= share - 5e-5) for p, share in PERCENTILES.items()}
                assert reached == pytest.approx(figures[key], rel=ROUNDED)


def test_thinned_distributions_still_enclose_the_percentiles(
    run: tuple[Report, list[Replay]], document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "CDF_POINTS", 25)
    thin = {panel.heading: panel for panel in panels(*run)}
    for kind, key in KINDS:
        for name, policy in document["policies"].items():
            drawn = traces(thin[f"{kind} of free"])[name]
            assert len(drawn["x"]) == 26
            for p, share in PERCENTILES.items():
                value = policy["tiers"]["free"][key][p]
                below = [x for x, y in zip(drawn["x"], drawn["y"], strict=True) if y < share]
                above = [x for x, y in zip(drawn["x"], drawn["y"], strict=True) if y >= share]
                assert below[-1] * (1 - ROUNDED) <= value <= above[0] * (1 + ROUNDED)


def test_what_a_tier_promises_is_beside_what_it_got(shown: Mapping[str, Panel]) -> None:
    for name, tier in DEFAULT_TIERS.items():
        assert traces(shown[f"TTFT of {name}"])["promised"]["x"] == [tier.ttft, tier.ttft]
        assert "promised" not in traces(shown[f"E2E latency of {name}"]), "it depends on the length"


def test_a_total_contract_promises_a_last_token() -> None:
    total = {"all": replace(DEFAULT_TIERS["vip"], name="all", contract=Contract.E2E_TOTAL, e2e=7.0)}
    drawn = {panel.heading: traces(panel) for panel in panels(*replayed(count=20, tiers=total))}
    assert drawn["E2E latency of all"]["promised"]["x"] == [7.0, 7.0]
    assert "promised" not in drawn["TTFT of all"]


@pytest.mark.parametrize(
    ("heading", "mean", "most"),
    [
        ("Batch size over time", "mean_batch", 256),
        ("KV pool over time", "mean_kv_usage", 1),
        ("Waiting over time", "mean_waiting", 400),
    ],
)
def test_courses_over_time_add_up_to_the_documents_means(
    document: dict[str, Any], shown: Mapping[str, Panel], heading: str, mean: str, most: float
) -> None:
    for name, policy in document["policies"].items():
        drawn = traces(shown[heading])[name]
        busy = policy["busy"] * policy["duration"]
        assert policy[mean] > 0
        assert sum(drawn["y"]) * drawn["dx"] == pytest.approx(policy[mean] * busy, rel=ROUNDED)
        assert max(drawn["y"]) <= most
        assert drawn["x0"] == drawn["dx"] / 2
        assert (len(drawn["y"]) - 1) * drawn["dx"] <= policy["duration"] <= len(drawn["y"]) * drawn["dx"] * (1 + 1e-9)


def test_shares_are_the_documents_and_stand_beside_the_weights(
    document: dict[str, Any], shown: Mapping[str, Panel]
) -> None:
    drawn = traces(shown["Share of engine time"])
    for name, policy in document["policies"].items():
        for trace, key in ((f"{name} received", "share_received"), (f"{name} entitled to", "share_expected")):
            by_tier = dict(zip(drawn[trace]["x"], drawn[trace]["y"], strict=True))
            assert by_tier == {tier: figures[key] for tier, figures in policy["tiers"].items()}
        assert sum(drawn[f"{name} received"]["y"]) == pytest.approx(1)
    assert drawn["weight"]["y"] == pytest.approx([0.6, 0.3, 0.1])


def test_speed_up_and_utilisation_are_those_of_the_steps_cost(
    run: tuple[Report, list[Replay]], document: dict[str, Any], shown: Mapping[str, Panel]
) -> None:
    workload, cost = run[0].workload, run[0].profile.cost
    prompt = sum(request.prompt_tokens for request in workload.requests) / 400
    output = sum(workload.outputs) / 400
    sequence = cost.decode_seq + cost.kv_token * (prompt + output / 2) + cost.prefill_token * prompt / output

    def step(size: int) -> float:
        return cost.base + size * sequence

    drawn, engine = traces(shown["Speed-up and utilisation against batch size"]), document["engine"]
    sizes = list(range(1, engine["full_batch"] + 1))
    assert drawn["S(n)"]["x"] == drawn["U(n)"]["x"] == sizes
    assert drawn["S(n)"]["y"] == pytest.approx([n * step(1) / step(n) for n in sizes], rel=ROUNDED)
    assert drawn["U(n)"]["y"] == pytest.approx([1 - cost.base / step(n) for n in sizes], rel=ROUNDED)
    chosen = engine["chosen_batch"]
    assert drawn[f"n = {chosen}"]["x"] == [chosen]
    assert drawn[f"n = {chosen}"]["y"][0] == pytest.approx(engine["speed_up"], rel=ROUNDED)
    assert drawn["U(n)"]["y"][chosen - 1] == pytest.approx(engine["utilisation"], rel=ROUNDED)


def test_no_batch_size_beats_another_in_latency_and_throughput_and_the_chosen_one_keeps_every_pace() -> None:
    """With a pace that a full batch would not keep."""
    hasty = {name: replace(tier, tpot=0.02) for name, tier in DEFAULT_TIERS.items()}
    report, replays = replayed(count=100, tiers=hasty)
    document = report.as_json()
    drawn = traces({panel.heading: panel for panel in panels(report, replays)}["Latency against throughput"])
    rate, pace = drawn["engine"]["x"], drawn["engine"]["y"]
    assert (rate, pace) == (sorted(rate), sorted(pace))
    chosen = document["engine"]["chosen_batch"]
    assert 1 < chosen < len(pace) == document["engine"]["full_batch"]
    assert pace[chosen - 1] <= 0.02 < pace[chosen]
    marked = drawn[f"chosen: n = {chosen}"]
    assert (marked["x"], marked["y"]) == ([rate[chosen - 1]], [pace[chosen - 1]])
    for name, policy in document["policies"].items():
        at = round(policy["mean_batch"])
        assert drawn[name]["text"] == [f"n = {at}"]
        assert (drawn[name]["x"], drawn[name]["y"]) == ([rate[at - 1]], [pace[at - 1]])
    assert drawn["TPOT of vip"]["y"] == [0.02, 0.02]


# --- the page -------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements with their attributes in order; what is in scripts, by their ids; the text that a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.text = ""
        self._inside: tuple[str, str | None] = ("", None)
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        self._inside = (tag, attributes.get("id"))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ("", None)

    def handle_data(self, data: str) -> None:
        tag, id = self._inside
        if tag == "script":
            self.scripts[id] = self.scripts.get(id, "") + data
        elif tag != "style":
            self.text += data

    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    def attributes(self) -> Iterator[str]:
        return (name for _, attributes in self.elements for name in attributes)


def test_the_page_holds_the_charts_data_and_loads_nothing(run: tuple[Report, list[Replay]], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_charts(path, *run)
    page = Page(path.read_text(encoding="utf-8"))
    drawn = json.loads(page.scripts["figures"], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert drawn == [{"data": panel.traces, "layout": panel.layout} for panel in panels(*run)]
    assert not {"src", "href", "srcset", "action"} & set(page.attributes())
    assert not {"link", "img", "iframe", "object", "form"} & set(page.tags())
    policies = [
        values["content"] for tag, values in page.elements if values.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1 and (policies[0] or "").startswith("default-src 'none';")
    assert path.stat().st_size < 8e6


def test_the_table_of_the_page_says_what_the_text_says(run: tuple[Report, list[Replay]], tmp_path: Path) -> None:
    report, _ = run
    write_charts(tmp_path / "page.html", *run)
    shown, text = Page((tmp_path / "page.html").read_text(encoding="utf-8")).text, report.as_text()
    said = [*report.facts(), *COLUMNS]
    for name, result in report.policies.items():
        said += [name, report.summary(result), *(cell for row in report.rows(result) for cell in row)]
    assert [one for one in said if one not in shown or one not in text] == []


@pytest.mark.parametrize(
    ("profile", "says", "error"),
    [
        ("h100-8b", "derived from datasheets, not measured", None),
        ("cpu-tiny", "measured, median error of a step 7.5 %", 0.075),
        ("cpu-sim", "given figures, error unknown", None),
    ],
)
def test_every_prediction_says_how_far_it_can_be_trusted(
    tmp_path: Path, profile: str, says: str, error: float | None
) -> None:
    report, replays = replayed(["continuous"], count=20, profile=profile)
    write_charts(tmp_path / "page.html", report, replays)
    shown = Page((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert shown.count(f"Predicted by {profile}, {says}.") == len(list(panels(report, replays))) + 1
    assert says in report.as_text()
    document = report.as_json()
    assert (document["profile_derived"], document["profile_step_error"]) == (profile == "h100-8b", error)


def test_names_stay_names(tmp_path: Path) -> None:
    """Of tiers and files: neither the page, nor its scripts, nor the formatting of charts takes them for anything."""
    names = (HOSTILE, "<b>bold</b> & <a href='javascript:alert(1)'>link</a>", "2026")
    tiers = {name: replace(tier, name=name) for name, tier in zip(names, DEFAULT_TIERS.values(), strict=True)}
    report, replays = replayed(["continuous"], count=30, tiers=tiers, trace=f"/tmp/{HOSTILE}.csv")
    path = tmp_path / "page.html"
    write_charts(path, report, replays)
    page = Page(path.read_text(encoding="utf-8"))
    tags = page.tags()
    assert tags.count("script") == 3, "Plotly, the charts' data, and what draws them"
    assert not {"img", "b", "a"} & set(tags)
    assert page.text.count(HOSTILE) >= 3, "in the trace's name, in the table, in headings"
    figures = json.loads(page.scripts["figures"])
    first = figures[0]
    assert first["data"][0]["x"] == [html.escape(name, quote=False) for name in names]
    assert first["layout"]["xaxis"]["type"] == "category", "or a name like a number would be one"


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, as WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#ffffff", "#14181f"])
def test_colours_stand_out_from_light_and_dark_pages(page: str) -> None:
    for colour in COLOURS:
        lighter, darker = sorted((luminance(colour), luminance(page)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 3, colour


# --- the course over time -------------------------------------------------------------------------------------------


def test_a_step_is_divided_among_the_slices_that_it_covers() -> None:
    timeline = Timeline(1.0)
    timeline.add(0.5, 2.25, running=4, kv_usage=0.5, waiting=2)
    assert [part.busy for part in timeline.slices] == [0.5, 1.0, 0.25]
    assert [part.running for part in timeline.slices] == [2.0, 4.0, 1.0]
    assert timeline.total() == Slice(1.75, 7.0, 0.875, 3.5)


def test_a_run_that_goes_on_and_on_has_wider_slices_and_no_more_of_them() -> None:
    timeline = Timeline(1e-6)
    for second in range(1000):
        timeline.add(second, second + 0.5, running=2, kv_usage=1.0, waiting=0)
    assert MOST_SLICES / 2 <= len(timeline.slices) <= MOST_SLICES + 1
    assert timeline.total().running == pytest.approx(1000)
