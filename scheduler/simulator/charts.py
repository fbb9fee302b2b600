"""A replay as one self-contained page of charts: nothing is loaded from anywhere.

Each chart is a `Panel` of Plotly's own JSON; `templates/replay/report.html` draws them in the reader's colour scheme.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.contrib.staticfiles import finders
from django.template.loader import render_to_string

from scheduler.core.types import Contract, TierSpec
from scheduler.simulator.engine_curve import EngineCurve
from scheduler.simulator.replay import Replay
from scheduler.simulator.report import COLUMNS, Report
from scheduler.simulator.results import counts, latencies
from scheduler.simulator.timeline import Slice

PLOTLY = "vendor/plotly-cartesian-4.1.1/plotly-cartesian.min.js"  # the static file of the console
CDF_POINTS = 300
DIGITS = 4  # significant ones: finer than a screen, and a third of the size
# By policy. At least 3:1 against the page in both colour schemes.
COLOURS = (
    "#3b82f6", "#d97706", "#16a34a", "#e11d48", "#8b5cf6", "#0d9488", "#c026d3", "#a16207", "#78818c",
)  # fmt: skip
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "pentagon", "hexagram", "triangle-down")
GREY = COLOURS[-1]
SHARE_AXIS = {"tickformat": ".0%", "range": [0, 1.03]}

Trace = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart under a heading, and what it shows. `traces` and `layout` are Plotly's; their texts are escaped."""

    heading: str
    text: str
    traces: list[Trace]
    layout: dict[str, Any] = field(default_factory=dict)


def write_charts(path: Path, report: Report, replays: Sequence[Replay]) -> None:
    """Write the page. Raises OSError."""
    shown = list(panels(report, replays))
    context = {
        "title": f"Replay of {Path(report.trace).name}, rho {report.workload.rho:.2f}",
        "facts": list(report.facts()),
        "accuracy": f"Predicted by {report.profile.name}, {report.profile.accuracy}.",
        "columns": COLUMNS,
        "policies": [
            {"name": name, "summary": report.summary(result), "rows": list(report.rows(result))}
            for name, result in report.policies.items()
        ],
        "panels": shown,
        "figures": [{"data": panel.traces, "layout": panel.layout} for panel in shown],
        "plotly": _plotly(),
    }
    path.write_text(render_to_string("replay/report.html", context), encoding="utf-8")


def _plotly() -> str:
    path = finders.find(PLOTLY)
    assert isinstance(path, str), f"{PLOTLY} is part of the product"
    return Path(path).read_text(encoding="utf-8")


def panels(report: Report, replays: Sequence[Replay]) -> Iterator[Panel]:
    """All charts from top to bottom."""
    yield _attainment(report)
    for tier in report.workload.tiers.values():
        yield from _latencies(tier, replays)
    yield _timeline("Batch size", "Sequences in a step", "sequences", replays, lambda part: part.running)
    yield _timeline("KV pool", "Share of the pool's blocks in use", "share", replays, lambda part: part.kv_usage)
    yield _timeline("Waiting", "Requests in the scheduler's queue", "requests", replays, lambda part: part.waiting)
    yield _shares(report)
    curve = report.curve()
    chosen = curve.chosen(report.workload.tiers.values())
    yield _speed_up(curve, chosen)
    yield _pareto(curve, chosen, report)


def _attainment(report: Report) -> Panel:
    tiers = list(report.workload.tiers.values())
    names = [_text(tier.name) for tier in tiers]
    traces = [
        _bars(policy, names, [result.tiers[tier.name].attainment for tier in tiers], _colour(number))
        for number, (policy, result) in enumerate(report.policies.items())
    ]
    objectives = [tier.objective for tier in tiers]
    traces.append(_reference("objective", names, objectives, {"symbol": "line-ew", "size": 40, "line": {"width": 2}}))
    return Panel(
        "Attainment by tier and policy",
        "Share of all requests whose contract was kept; refused ones are not.",
        traces,
        {"barmode": "group", "xaxis": {"type": "category"}, "yaxis": SHARE_AXIS},
    )


def _latencies(tier: TierSpec, replays: Sequence[Replay]) -> Iterator[Panel]:
    """How TTFT and E2E latency of a tier are distributed under each policy."""
    ordered = [
        latencies(record for record in replay.records if record.request.tier == tier.name and counts(record))
        for replay in replays
    ]
    total = tier.contract is Contract.E2E_TOTAL
    promises = (None, tier.e2e) if total else (tier.ttft, None)
    for at, (kind, promise) in enumerate(zip(("TTFT", "E2E latency"), promises, strict=True)):
        traces = [
            _line(replay.policy, *_distribution(both[at]), number, shape="hv")
            for number, (replay, both) in enumerate(zip(replays, ordered, strict=True))
        ]
        if promise is not None:
            traces.append(_mark("promised", [promise, promise], [0, 1]))
        yield Panel(
            f"{kind} of {tier.name}",
            "Share of the requests that ran to their end which took at most so long.",
            traces,
            {"xaxis": {"type": "log", "title": {"text": "seconds"}}, "yaxis": SHARE_AXIS},
        )


def _distribution(ordered: Sequence[float]) -> tuple[list[float], list[float]]:
    """The distribution of ascending values, thinned to what a screen shows; the first and the last are in it."""
    last = len(ordered) - 1
    picks = sorted({round(part * last / CDF_POINTS) for part in range(CDF_POINTS + 1)}) if ordered else []
    return [_short(ordered[pick]) for pick in picks], [_short((pick + 1) / len(ordered)) for pick in picks]


def _timeline(heading: str, what: str, unit: str, replays: Sequence[Replay], of: Callable[[Slice], float]) -> Panel:
    traces = []
    for number, replay in enumerate(replays):
        width = replay.timeline.width
        y = [_short(of(part) / width) for part in replay.timeline.slices]
        traces.append(_line(replay.policy, None, y, number) | {"x0": width / 2, "dx": width})
    span = replays[0].workload.span
    return Panel(
        f"{heading} over time",
        f"{what}, averaged over slices of the run; an idle engine counts as 0. A double click shows what runs on after "
        "the last arrival.",
        traces,
        {
            "xaxis": {"title": {"text": "seconds"}, "range": [0, _short(1.05 * span)]},
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        },
    )


def _shares(report: Report) -> Panel:
    tiers = list(report.workload.tiers.values())
    names = [_text(tier.name) for tier in tiers]
    traces = []
    for number, (policy, result) in enumerate(report.policies.items()):
        received = [result.tiers[tier.name].share_received for tier in tiers]
        expected = [result.tiers[tier.name].share_expected for tier in tiers]
        traces.append(_bars(f"{policy} received", names, received, _colour(number)))
        traces.append(_bars(f"{policy} entitled to", names, expected, _colour(number)) | {"opacity": 0.4})
    weight = sum(tier.weight for tier in tiers)
    if weight:
        y = [tier.weight / weight for tier in tiers]
        traces.append(_reference("weight", names, y, {"symbol": "diamond", "size": 10}))
    return Panel(
        "Share of engine time",
        "What each tier received, beside what weights and demand entitle it to and its weight's share of all weights.",
        traces,
        {"barmode": "group", "xaxis": {"type": "category"}, "yaxis": {"tickformat": ".0%", "rangemode": "tozero"}},
    )


def _speed_up(curve: EngineCurve, chosen: int) -> Panel:
    marked = _reference(f"n = {chosen}", [chosen], [_short(curve.speed_up[chosen - 1])], {"symbol": "star", "size": 13})
    return Panel(
        "Speed-up and utilisation against batch size",
        "S(n): tokens per second with n sequences over those with one. U(n): share of a step spent on sequences, not "
        "on what every step costs. Marked is the largest batch whose steps keep every tier's pace.",
        [
            _line("S(n)", curve.sizes, _shortened(curve.speed_up), 0),
            _line("U(n)", curve.sizes, _shortened(curve.utilisation), 1) | {"yaxis": "y2"},
            marked,
        ],
        {
            "xaxis": {"title": {"text": "sequences n"}},
            "yaxis": {"title": {"text": "S(n)"}, "rangemode": "tozero"},
            "yaxis2": {
                **SHARE_AXIS,
                "title": {"text": "U(n)"},
                "overlaying": "y",
                "side": "right",
                "dtick": 0.2,
                "showgrid": False,
            },
        },
    )


def _pareto(curve: EngineCurve, chosen: int, report: Report) -> Panel:
    rate, pace = _shortened(curve.throughput), _shortened(curve.token_time)
    labels = [f"n = {size}" for size in curve.sizes]
    engine = {"type": "scatter", "mode": "lines", "name": "engine", "x": rate, "y": pace, "text": labels}
    traces: list[Trace] = [engine | {"line": {"color": GREY, "width": 2}}]
    for tier in report.workload.tiers.values():
        if tier.tpot <= 2 * curve.token_time[-1]:
            traces.append(_mark(f"TPOT of {tier.name}", [rate[0], rate[-1]], [tier.tpot, tier.tpot]))
    star = {"symbol": "star", "size": 16}
    traces.append(_reference(f"chosen: n = {chosen}", [rate[chosen - 1]], [pace[chosen - 1]], star))
    for number, (policy, result) in enumerate(report.policies.items()):
        at = min(max(round(result.mean_batch), 1), curve.sizes[-1]) - 1
        marker = {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 11, "color": _colour(number)}
        traces.append(_markers(policy, [rate[at]], [pace[at]], marker) | {"text": [labels[at]]})
    return Panel(
        "Latency against throughput",
        f"The engine with every batch size from 1 to {curve.sizes[-1]}: none is better in both. Marked are the largest "
        "batch whose steps keep every tier's pace, and where each policy ran on average.",
        traces,
        {
            "xaxis": {"title": {"text": "tokens per second"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "seconds per token"}, "rangemode": "tozero"},
        },
    )


def _line(name: str, x: Sequence[float] | None, y: Sequence[float], number: int, shape: str = "linear") -> Trace:
    line = {"color": _colour(number), "width": 1.6, "shape": shape}
    trace: Trace = {"type": "scatter", "mode": "lines", "name": _text(name), "y": y, "line": line}
    return trace if x is None else trace | {"x": x}


def _mark(name: str, x: Sequence[float], y: Sequence[float]) -> Trace:
    """A dashed straight line from one point to another."""
    line = {"color": GREY, "width": 1.6, "dash": "dash"}
    return {"type": "scatter", "mode": "lines", "name": _text(name), "x": x, "y": y, "line": line}


def _reference(name: str, x: Sequence[Any], y: Sequence[float], marker: dict[str, Any]) -> Trace:
    """What the policies' figures are held against: the page draws it in the colour of its text."""
    return _markers(name, x, y, marker) | {"meta": "reference"}


def _markers(name: str, x: Sequence[Any], y: Sequence[float], marker: dict[str, Any]) -> Trace:
    return {"type": "scatter", "mode": "markers", "name": _text(name), "x": x, "y": y, "marker": marker}


def _bars(name: str, x: Sequence[str], y: Sequence[float | None], colour: str) -> Trace:
    return {"type": "bar", "name": _text(name), "x": x, "y": y, "marker": {"color": colour}}


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(name: str) -> str:
    """A name as it is: Plotly takes tags in its texts for formatting, and links."""
    return html.escape(name, quote=False)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _shortened(values: Sequence[float]) -> list[float]:
    return [_short(value) for value in values]
