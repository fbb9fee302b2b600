"""A replay as one self-contained page of charts: nothing is loaded from anywhere."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from scheduler.simulator.engine_curve import EngineCurve
from scheduler.simulator.replay import Replay, TimelinePoint
from scheduler.simulator.report import Report
from scheduler.simulator.results import latencies

CDF_POINTS = 300
HEIGHT = 380  # pixels
COLOURS = ("#3b6fd4", "#d9822b", "#3a9a5c", "#b4456e", "#7d5bc2", "#8a8f98", "#1f9aa5", "#c2a300", "#5a4a42")

GREY, INK = "#8a8f98", "#1c2128"

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1c2128; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.1rem; margin: 2rem 0 0 }} p {{ color: #57606a; margin: .2rem 0 }}
pre {{ background: #f6f8fa; padding: 1rem; overflow-x: auto; font-size: 12px }}
</style>
<script>{plotly}</script>
</head>
<body>
<h1>{title}</h1>
<pre>{text}</pre>
{sections}
</body>
</html>
"""


def write_charts(path: Path, report: Report, replays: Sequence[Replay]) -> None:
    """Write the page. Raises OSError."""
    sections = "\n".join(_section(*section) for section in _sections(report, replays))
    page = PAGE.format(
        title=html.escape(f"Replay of {Path(report.trace).name}, rho {report.workload.rho:.2f}"),
        plotly=get_plotlyjs(),
        text=html.escape(report.as_text()),
        sections=sections,
    )
    path.write_text(page, encoding="utf-8")


def _sections(report: Report, replays: Sequence[Replay]) -> Iterator[tuple[str, str, go.Figure]]:
    """(heading, what it shows, figure) from top to bottom."""
    yield (
        "Attainment by tier",
        "Share of all requests whose contract was kept; refused ones are not.",
        _attainment(report),
    )
    for tier in report.workload.tiers:
        yield f"Latency of {tier}", "Of the requests that ran: the share that was at most so slow.", _cdf(tier, replays)
    yield (
        "Sequences per step",
        "Mean over the busy time; 0 where the engine was idle.",
        _timeline("sequences", replays, lambda point: point.running),
    )
    yield (
        "KV pool",
        "Share of the pool's blocks in use.",
        _timeline("share", replays, lambda point: point.kv_usage),
    )
    yield (
        "Waiting",
        "Requests in the scheduler's queue.",
        _timeline("requests", replays, lambda point: point.waiting),
    )
    yield (
        "Share of engine time",
        "What each tier received, beside what weights and demand entitle it to.",
        _shares(report),
    )
    curve = EngineCurve.of(report.workload, report.profile)
    yield (
        "Speed-up and utilisation against batch size",
        "S(n): tokens per second with n sequences over those with one. "
        "U(n): share of a step spent on sequences, not on what every step costs.",
        _speed_up(curve),
    )
    yield (
        "Latency against throughput",
        f"Every batch size from 1 to {curve.sizes[-1]}; marked: where each policy ran on average.",
        _pareto(curve, report),
    )


def _section(heading: str, text: str, figure: go.Figure) -> str:
    figure.update_layout(
        template="plotly_white", colorway=COLOURS, height=HEIGHT, margin={"l": 60, "r": 20, "t": 70, "b": 50},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    )  # fmt: skip
    chart = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    return f"<h2>{html.escape(heading)}</h2>\n<p>{html.escape(text)}</p>\n{chart}"


def _attainment(report: Report) -> go.Figure:
    figure = go.Figure()
    for name, result in report.policies.items():
        tiers = list(result.tiers)
        figure.add_bar(name=name, x=tiers, y=[result.tiers[tier].attainment for tier in tiers])
    for tier in report.workload.tiers.values():
        figure.add_scatter(
            x=[tier.name],
            y=[tier.objective],
            mode="markers",
            marker={"symbol": "line-ew-open", "size": 60, "color": INK},
            hovertemplate=f"objective {tier.objective:.3f}<extra></extra>",
            showlegend=False,
        )
    return figure.update_layout(yaxis={"tickformat": ".0%", "range": [0, 1.03]}, barmode="group")


def _cdf(tier: str, replays: Sequence[Replay]) -> go.Figure:
    figure = go.Figure()
    for number, replay in enumerate(replays):
        ttft, e2e = latencies(record for record in replay.records if record.request.tier == tier)
        for kind, ordered, dash in (("TTFT", ttft, "solid"), ("E2E", e2e, "dot")):
            x, y = _steps(ordered)
            line = {"dash": dash, "color": COLOURS[number % len(COLOURS)]}
            figure.add_scatter(x=x, y=y, mode="lines", line=line, name=f"{replay.policy} {kind}")
    contract = replays[0].workload.tiers[tier]
    promise = [contract.ttft, contract.ttft]
    figure.add_scatter(x=promise, y=[0, 1], mode="lines", line={"dash": "dash", "color": GREY}, name="TTFT promised")
    return figure.update_layout(
        xaxis={"type": "log", "title": "seconds"}, yaxis={"tickformat": ".0%", "range": [0, 1.03]}
    )


def _steps(ordered: Sequence[float]) -> tuple[list[float], list[float]]:
    """The distribution of ascending values, thinned to what a screen shows."""
    count = len(ordered)
    picks = (
        sorted({min(round(part * (count - 1) / CDF_POINTS), count - 1) for part in range(CDF_POINTS + 1)})
        if count
        else []
    )
    return [ordered[pick] for pick in picks], [(pick + 1) / count for pick in picks]


def _timeline(unit: str, replays: Sequence[Replay], of: Callable[[TimelinePoint], float]) -> go.Figure:
    figure = go.Figure()
    for replay in replays:
        points = range(max(replay.timeline, default=-1) + 1)
        x = [(point + 0.5) * replay.slice for point in points]
        y = [of(replay.timeline[at]) / replay.timeline[at].busy if at in replay.timeline else 0.0 for at in points]
        figure.add_scatter(x=x, y=y, mode="lines", line={"width": 1.3}, name=replay.policy)
    return figure.update_layout(xaxis={"title": "seconds"}, yaxis={"title": unit, "rangemode": "tozero"})


def _shares(report: Report) -> go.Figure:
    figure = go.Figure()
    for number, (name, result) in enumerate(report.policies.items()):
        tiers = list(result.tiers)
        colour = COLOURS[number % len(COLOURS)]
        received = [result.tiers[tier].share_received for tier in tiers]
        expected = [result.tiers[tier].share_expected for tier in tiers]
        figure.add_bar(name=f"{name} received", x=tiers, y=received, marker={"color": colour})
        figure.add_bar(name=f"{name} expected", x=tiers, y=expected, marker={"color": colour, "opacity": 0.35})
    total = sum(tier.weight for tier in report.workload.tiers.values())
    if total:
        tiers = list(report.workload.tiers)
        weights = [report.workload.tiers[tier].weight / total for tier in tiers]
        figure.add_scatter(
            name="weight", x=tiers, y=weights, mode="markers", marker={"symbol": "diamond", "color": INK}
        )
    return figure.update_layout(yaxis={"tickformat": ".0%"}, barmode="group")


def _speed_up(curve: EngineCurve) -> go.Figure:
    figure = go.Figure()
    figure.add_scatter(x=curve.sizes, y=curve.speed_up, mode="lines", name="S(n)")
    figure.add_scatter(x=curve.sizes, y=curve.utilisation, mode="lines", name="U(n)", yaxis="y2")
    return figure.update_layout(
        xaxis={"title": "sequences n"},
        yaxis={"title": "S(n)", "rangemode": "tozero"},
        yaxis2={
            "title": "U(n)",
            "overlaying": "y",
            "side": "right",
            "tickformat": ".0%",
            "range": [0, 1.03],
            "dtick": 0.2,
            "showgrid": False,
        },
    )


def _pareto(curve: EngineCurve, report: Report) -> go.Figure:
    figure = go.Figure()
    label = [f"n = {size}" for size in curve.sizes]
    figure.add_scatter(
        x=curve.throughput, y=curve.token_time, text=label, mode="lines", line={"color": GREY}, name="engine"
    )
    for number, (name, result) in enumerate(report.policies.items()):
        colour = COLOURS[number % len(COLOURS)]
        at = min(max(round(result.mean_batch), 1), curve.sizes[-1]) - 1
        x, y = [curve.throughput[at]], [curve.token_time[at]]
        figure.add_scatter(x=x, y=y, text=[label[at]], mode="markers", marker={"size": 11, "color": colour}, name=name)
    for tier in report.workload.tiers.values():
        if tier.tpot <= 2 * curve.token_time[-1]:
            figure.add_hline(y=tier.tpot, line={"dash": "dash", "color": GREY}, annotation_text=f"TPOT of {tier.name}")
    return figure.update_layout(
        xaxis={"title": "tokens per second"}, yaxis={"title": "seconds per token", "rangemode": "tozero"}
    )
