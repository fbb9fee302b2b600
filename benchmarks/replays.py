"""What the default policy achieves in virtual time: beside the others, without parts of itself, in odd situations.

    policies    every policy on three engines and traces, as a share of what no policy could exceed; seeds pooled
    headline    the highest load at which the best rank meets its objective and no floor is violated, and its cost
    kv-tight    memory so small that first come, first served makes the engine recompute
    ablations   the default policy without one of its parts, and what others would build
    scenarios   bursts, floods, cancels and mixes
    speed       100,000 requests on one core

One process, one core. Tables are Markdown; figures and tables are kept in `benchmarks/results/replays.json`, and
`--docs` puts the tables into `docs/scheduling.md` between its markers.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from benchmarks.arms import ABLATIONS, ARMS, BASELINES, MEMORY, OURS, Arm
from benchmarks.report import RESULTS, keep
from scheduler.bound import compute_bound
from scheduler.core.service import FLOOR_CLAMP
from scheduler.simulator.profiles import PROFILES, Profile
from scheduler.simulator.replay import Replay
from scheduler.simulator.results import attained, judge, tokens_of
from scheduler.simulator.trace import TraceRow, read_trace
from scheduler.simulator.workload import DEFAULT_TIERS, Demand, Workload, build_workload, full_batch

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "scheduling.md"
CHAT = "azure2023_conv_first38min.csv.gz"
LONG = "mooncake_conversation.csv.gz"
REASONING = "servegen_r1_first18h.csv.gz"
DAY = "servegen_msmall_day.csv.gz"
SEEDS = (1, 2, 3)
BEST = min(DEFAULT_TIERS, key=lambda name: DEFAULT_TIERS[name].rank)
GUARD_SLACK = 0.25  # engine-seconds; with twice the clamp and what is in flight, how far a floor may be behind
PART = (6000, 12000)  # of the chat trace: the ramp and the peak, for sections with many runs
LOADS = 0.05  # of capacity: the grid on which the highest load is searched
SPEED_ROWS = 100_000

Rows = tuple[TraceRow, ...]


@dataclass(frozen=True)
class Setting:
    """What is offered to which engine. `part`: of the trace's rows. `shape`: what is done to them (`SHAPES`)."""

    trace: str
    profile: str
    rho: float
    seed: int = 1
    part: tuple[int, int] | None = None
    shape: str = "as recorded"
    mix: tuple[float, ...] = ()
    max_tokens: int | None = None
    cancel_share: float = 0.0
    kv_tokens: int | None = None

    @property
    def title(self) -> str:
        trace = {CHAT: "chat", LONG: "long context", REASONING: "reasoning", DAY: "day"}[self.trace]
        return f"{self.profile}, {trace}, rho {self.rho:g}"


@dataclass(frozen=True)
class Figures:
    """One run. `share_gap`: the largest |received - expected| share of a tier. `floor_debt`: engine-seconds.

    `utilisation`: busy share x mean batch over a full one. `cost`: seconds of the whole run per 1,000 output tokens of
    attained requests.
    """

    requests: Mapping[str, int]
    attained: Mapping[str, int]
    value: float
    goodput: float
    throughput: float
    recomputes: int
    share_gap: float
    floor_debt: float
    floor_allowed: float
    utilisation: float
    cost: float
    others_value: float  # of the requests that the flooding tenant did not send
    cpu: float

    @property
    def attainment(self) -> dict[str, float]:
        return {name: self.attained[name] / count if count else 1.0 for name, count in self.requests.items()}


@dataclass(frozen=True)
class Table:
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [f"| {' | '.join(cells)} |" for cells in (self.headings, ["---"] * len(self.headings), *self.rows)]
        return "\n".join([self.caption, "", *lines])


# --- what is offered ------------------------------------------------------------------------------------------------


class Traces:
    """The folder of the traces, set once by the command."""

    folder: Path

    @staticmethod
    @cache
    def rows(name: str) -> Rows:
        return tuple(read_trace(Traces.folder / name, SPEED_ROWS))


FLOOD = "flood"
CYCLE, BURST, BURST_RATE = 200.0, 20.0, 3.0  # seconds, seconds, times the rate outside


def _bursts(rows: Rows, scale: float) -> Rows:
    """Every 200 s, 20 s with three times the arrivals of the rest. `scale`: of time, from the trace's to the run's."""
    calm = CYCLE / (CYCLE - BURST + BURST_RATE * BURST)  # rate outside of bursts, over the mean
    calm_end = calm * (CYCLE - BURST)

    def warp(at: float) -> float:
        cycle, inside = divmod(at, CYCLE)
        late = CYCLE - BURST + (inside - calm_end) / (calm * BURST_RATE)
        return cycle * CYCLE + (inside / calm if inside < calm_end else late)

    return tuple(replace(row, arrival=warp(row.arrival * scale)) for row in rows)


def _flood(rows: Rows, scale: float) -> Rows:
    """One tenant sends three of five requests."""
    return tuple(replace(row, tenant=FLOOD) if n % 5 < 3 else row for n, row in enumerate(rows))


def _long_prompts(rows: Rows, scale: float) -> Rows:
    """Every twentieth prompt has 30,000 tokens."""
    return tuple(replace(row, prompt_tokens=30_000) if n % 20 == 0 else row for n, row in enumerate(rows))


SHAPES: dict[str, Callable[[Rows, float], Rows]] = {
    "as recorded": lambda rows, scale: rows,
    "bursts": _bursts,
    "flood": _flood,
    "long prompts": _long_prompts,
}


def profile_of(setting: Setting) -> Profile:
    profile = PROFILES[setting.profile]
    if setting.kv_tokens is None:
        return profile
    longest = min(profile.capacity.max_model_len, setting.kv_tokens)
    return replace(profile, capacity=replace(profile.capacity, kv_tokens=setting.kv_tokens, max_model_len=longest))


@lru_cache(maxsize=8)
def workload_of(setting: Setting) -> Workload:
    profile = profile_of(setting)
    rows = Traces.rows(setting.trace)[slice(*setting.part) if setting.part else slice(None)]
    demand = Demand(
        rho=setting.rho,
        seed=setting.seed,
        mix=setting.mix,
        max_tokens=setting.max_tokens,
        cancel_share=setting.cancel_share,
    )
    plain = build_workload(rows, profile, DEFAULT_TIERS, demand)
    if setting.shape == "as recorded":
        return plain
    start = rows[0].arrival
    scale = plain.span / (rows[-1].arrival - start)
    moved = tuple(replace(row, arrival=row.arrival - start) for row in rows)
    return build_workload(SHAPES[setting.shape](moved, scale), profile, DEFAULT_TIERS, demand)


@cache
def bound_of(setting: Setting) -> float:
    say(f"bound of {setting.title}")
    return compute_bound(workload_of(setting), profile_of(setting)).value


@cache
def run(setting: Setting, arm: Arm) -> Figures:
    """One replay. Raises ReplayError."""
    say(f"{setting.title}, seed {setting.seed}, {arm.name}")
    begun = time.process_time()
    gc.collect()
    gc.freeze()
    try:
        done = arm.replay(workload_of(setting), profile_of(setting))
    finally:
        gc.unfreeze()
    return figures(done, time.process_time() - begun)


def figures(done: Replay, cpu: float) -> Figures:
    tiers, workload = DEFAULT_TIERS, done.workload
    result = judge(done)
    gaps = [abs((tier.share_received or 0) - (tier.share_expected or 0)) for tier in result.tiers.values()]
    kept = [record for record in done.records if attained(record, tiers[record.request.tier])]
    tokens = sum(tokens_of(record) for record in kept)
    most = [max((r.cost for r in done.records if r.request.tier == name), default=0.0) for name in tiers]
    mean_tokens = sum(r.prompt_tokens + n for r, n in zip(workload.requests, workload.outputs, strict=True))
    fill = result.mean_batch / full_batch(done.profile, mean_tokens / len(workload.requests))
    others = [record for record in done.records if record.request.tenant != FLOOD]
    weight = sum(tiers[record.request.tier].weight for record in others)
    kept_weight = sum(tiers[record.request.tier].weight for record in kept if record.request.tenant != FLOOD)
    return Figures(
        requests={name: tier.requests for name, tier in result.tiers.items()},
        attained={name: tier.attained for name, tier in result.tiers.items()},
        value=result.value,
        goodput=result.goodput_rps,
        throughput=result.throughput_rps,
        recomputes=result.preemptions,
        share_gap=max(gaps),
        floor_debt=max(done.floor_debt.values(), default=0.0),
        floor_allowed=2 * FLOOR_CLAMP + GUARD_SLACK + sum(most),
        utilisation=result.busy * fill,
        cost=1000 * done.ended_at / tokens if tokens else float("inf"),
        others_value=kept_weight / weight,
        cpu=cpu,
    )


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# --- sections -------------------------------------------------------------------------------------------------------


CHAT_SETTINGS = [Setting(CHAT, "h100-8b", rho) for rho in (0.7, 1.0, 1.3)]
SLOW_SETTINGS = [Setting(CHAT, "a10g-7b", rho) for rho in (1.0, 1.3)]
TIGHT = [  # pools in KV tokens
    *(Setting(CHAT, "h100-8b", 1.3, part=PART, kv_tokens=tokens) for tokens in (100_000, 48_000, 24_000)),
    Setting(REASONING, "h100-8b", 1.3, part=(0, 3000), kv_tokens=100_000),
]
LONG_SETTINGS = [Setting(LONG, "h100-8b", 1.0)]
FEW = ("continuous", "priority", "article", OURS)
MANY = ("continuous", "priority", "edf", "wfq", "article", OURS)
UNBATCHED = ("single", "static", "dynamic")


def policies() -> Iterator[Table]:
    rows = []
    for setting in [*CHAT_SETTINGS, *SLOW_SETTINGS, *LONG_SETTINGS]:
        names = MANY if setting in CHAT_SETTINGS else FEW
        for name in [*(UNBATCHED if setting.rho == 1.0 and setting in CHAT_SETTINGS else ()), *names]:
            found = run(setting, ARMS[name])
            rows.append(
                [
                    setting.title,
                    f"`{name}`",
                    _attainments(found),
                    f"{found.value / bound_of(setting):.3f}",
                    f"{found.goodput:.2f}",
                    f"{found.throughput:.2f}",
                    f"{100 * found.share_gap:.1f}",
                ]
            )
    yield Table(
        "Whole traces, seed 1. Attainment of vip/paid/free in per cent; shares: the largest difference between the "
        "share of engine time that a tier received and what weights and demand entitle it to, in points.",
        ["engine, trace, load", "policy", "attained", "value of bound", "goodput/s", "throughput/s", "shares off by"],
        rows,
    )
    yield Table(
        f"`{OURS}` over seeds {', '.join(map(str, SEEDS))}: the best rank pooled, the rest at its worst; a floor is "
        "kept while its tier is not further behind than allowed, in engine-seconds.",
        ["engine, trace, load", BEST, "least value", "shares off by", "floor behind by", "allowed"],
        [_pooled_row(setting) for setting in [*CHAT_SETTINGS, *SLOW_SETTINGS, *LONG_SETTINGS]],
    )
    yield Table(
        "Goodput over that of others, seeds pooled.",
        ["engine, trace, load", "over `priority`", "over `continuous`", f"{BEST} over `priority`, points"],
        [_ratio_row(setting) for setting in CHAT_SETTINGS[1:]],
    )


def _attainments(found: Figures) -> str:
    return "/".join(f"{100 * share:.1f}" for share in found.attainment.values())


def _seeds(setting: Setting, name: str) -> list[Figures]:
    return [run(replace(setting, seed=seed), ARMS[name]) for seed in SEEDS]


def _pooled(found: Iterable[Figures], tier: str = BEST) -> float:
    runs = list(found)
    return sum(one.attained[tier] for one in runs) / max(sum(one.requests[tier] for one in runs), 1)


def _pooled_row(setting: Setting) -> list[str]:
    found = _seeds(setting, OURS)
    return [
        setting.title,
        f"{100 * _pooled(found):.2f}",
        f"{min(one.value for one in found):.3f}",
        f"{100 * max(one.share_gap for one in found):.1f}",
        f"{max(one.floor_debt for one in found):.2f}",
        f"{min(one.floor_allowed for one in found):.2f}",
    ]


def _ratio_row(setting: Setting) -> list[str]:
    ours, strict, fcfs = (_seeds(setting, name) for name in (OURS, "priority", "continuous"))
    goodput = [sum(one.goodput for one in found) for found in (ours, strict, fcfs)]
    points = 100 * (_pooled(ours) - _pooled(strict))
    return [setting.title, f"{goodput[0] / goodput[1]:.2f}", f"{goodput[0] / goodput[2]:.2f}", f"{points:+.1f}"]


HEADLINE = ("continuous", "priority", "article", OURS)
CLAIMS = ["claimed by the founding articles", "-", "85 to 99.9", "38 to 78; 20 to 70", "0.40 x"]


def headline() -> Iterator[Table]:
    base = Setting(CHAT, "h100-8b", 1.0)
    single = run(base, ARMS["single"])
    highest = {name: _highest_load(base, name) for name in HEADLINE}
    reference = run(replace(base, rho=highest["continuous"]), ARMS["continuous"]) if highest["continuous"] else None
    rows = []
    for name in HEADLINE:
        rho = highest[name]
        if not rho:
            rows.append([f"`{name}`", f"under {LOADS:g}", "-", "-", "-"])
            continue
        found = _seeds(replace(base, rho=rho), name)
        rows.append(
            [
                f"`{name}`" + (f", {rho / highest['continuous']:.2f} x" if highest["continuous"] else ""),
                f"{rho:.2f}",
                f"{100 * _pooled(found):.2f}",
                _percent(found[0].utilisation),
                _against(found[0], reference),
            ]
        )
    yield Table(
        f"The highest load (in steps of {LOADS:g}) at which {100 * DEFAULT_TIERS[BEST].objective:g} % of the best "
        f"rank's requests are attained, over seeds {', '.join(map(str, SEEDS))}, with no floor violated. Utilisation: "
        "busy share x batch over a full batch. Cost: time of the engine per output token of attained requests, against "
        "`continuous`.",
        ["policy", "highest rho", f"{BEST}, %", "utilisation, %", "cost"],
        [*rows, CLAIMS],
    )
    fcfs = run(base, ARMS["continuous"])
    yield Table(
        "All at rho 1.0, seed 1.",
        ["policy", "throughput over `single`", f"{BEST}, %", "utilisation, %", "cost"],
        [
            [
                f"`{name}`",
                f"{found.throughput / single.throughput:.1f}",
                f"{100 * found.attainment[BEST]:.1f}",
                _percent(found.utilisation),
                _against(found, fcfs),
            ]
            for name in ("single", *HEADLINE)
            for found in [run(base, ARMS[name])]
        ],
    )


def _against(found: Figures, reference: Figures | None) -> str:
    return f"{found.cost / reference.cost:.2f} x" if reference else "-"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"


def _highest_load(base: Setting, name: str) -> float:
    """The largest multiple of LOADS that is held, by doubling and halving; 0 if not even one is."""
    held, failed = 0, 8
    while _holds(replace(base, rho=round(failed * LOADS, 2)), name):
        held, failed = failed, failed * 2
    while failed - held > 1:
        middle = (held + failed) // 2
        if _holds(replace(base, rho=round(middle * LOADS, 2)), name):
            held = middle
        else:
            failed = middle
    return round(held * LOADS, 2)


def _holds(setting: Setting, name: str) -> bool:
    """The best rank's objective over all seeds, and every floor. Stops at the first seed that decides it."""
    total = sum(request.tier == BEST for seed in SEEDS for request in workload_of(replace(setting, seed=seed)).requests)
    may_miss = (1 - DEFAULT_TIERS[BEST].objective) * total
    missed = 0
    for seed in SEEDS:
        found = run(replace(setting, seed=seed), ARMS[name])
        missed += found.requests[BEST] - found.attained[BEST]
        if missed > may_miss or found.floor_debt > found.floor_allowed:
            return False
    return True


def kv_tight() -> Iterator[Table]:
    rows = []
    for setting in TIGHT:
        reference = run(setting, ARMS["continuous"])
        for arm in [*(ARMS[name] for name in FEW), *MEMORY]:
            found = run(setting, arm)
            rows.append(
                [
                    f"{setting.title}, {setting.kv_tokens:,}",
                    _name(arm),
                    f"{_per_thousand(found):.1f}",
                    f"{100 * found.recomputes / reference.recomputes:.1f} %",
                    _attainments(found),
                    f"{found.value:.3f}",
                ]
            )
    yield Table(
        "Smaller pools, loads of the smaller engine: the engine's recomputes and our evictions. Rows "
        f"{PART[0]:,} to {PART[1]:,} of the chat trace, the first 3,000 of the reasoning "
        "trace, whose outputs are longer than its prompts.",
        ["engine, trace, load, KV tokens", "policy", "per 1,000 arrivals", "of `continuous`", "attained", "value"],
        rows,
    )


def _per_thousand(found: Figures) -> float:
    return 1000 * found.recomputes / sum(found.requests.values())


def _name(arm: Arm) -> str:
    return f"`{arm.name}`" if arm.name in ARMS else arm.name


def ablations() -> Iterator[Table]:
    settings = [*CHAT_SETTINGS[1:], *(replace(setting, part=PART) for setting in SLOW_SETTINGS)]
    rows = []
    for arm in [ARMS[OURS], *ABLATIONS, *BASELINES]:
        cells = []
        for setting in settings:
            found = run(setting, arm)
            cells.append(f"{_attainments(found)}, {found.value:.3f}")
        rows.append([_name(arm), *cells])
    yield Table(
        f"The chat trace (on `a10g-7b` rows {PART[0]:,} to {PART[1]:,}), seed 1: attainment of vip/paid/free in per "
        "cent, value. Rows up to the controller are the default policy without one part.",
        ["arm", *(f"{setting.profile}, rho {setting.rho:g}" for setting in settings)],
        rows,
    )


def scenarios() -> Iterator[Table]:
    base = Setting(CHAT, "h100-8b", 1.0, part=PART)
    offered = {
        "bursts: 3 x for 20 s of 200": replace(base, shape="bursts"),
        "vip surge: 85/10/5": replace(base, rho=1.3, mix=(85, 10, 5)),
        "one tenant sends 60 %": replace(base, rho=1.3, shape="flood"),
        "5 % of prompts have 30,000 tokens": replace(base, shape="long prompts"),
        "max_tokens 4,096 for all": replace(base, max_tokens=4096),
        "10 % cancel within 10 s": replace(base, cancel_share=0.1),
        "all vip, rho 1.3": replace(base, rho=1.3, mix=(1, 0, 0)),
        "all free, rho 1.3": replace(base, rho=1.3, mix=(0, 0, 1)),
    }
    rows = []
    for title, setting in offered.items():
        found = {name: run(setting, ARMS[name]) for name in FEW}
        flooded = setting.shape == "flood"
        values = [one.others_value if flooded else one.value for one in found.values()]
        rows.append([title, *(f"{value:.3f}" for value in values), _attainments(found[OURS])])
    yield Table(
        f"`h100-8b`, chat trace, rows {PART[0]:,} to {PART[1]:,}, rho 1.0 (the surge and the flood 1.3): value; "
        "in the flood, that of the other tenants' requests.",
        ["scenario", *(f"`{name}`" for name in FEW), f"attained by `{OURS}`"],
        rows,
    )


def speed() -> Iterator[Table]:
    setting = Setting(DAY, "h100-8b", 1.0)
    found = run(setting, ARMS[OURS])
    count = sum(found.requests.values())
    yield Table(
        "CPU time of one replay.",
        ["requests", "engine, trace, load", "seconds"],
        [[f"{count:,}", setting.title, f"{found.cpu:.0f}"]],
    )


SECTIONS: dict[str, Callable[[], Iterable[Table]]] = {
    "policies": policies,
    "headline": headline,
    "kv-tight": kv_tight,
    "ablations": ablations,
    "scenarios": scenarios,
    "speed": speed,
}


# --- the command ----------------------------------------------------------------------------------------------------


def kept() -> dict[str, Any]:
    """The sections of earlier runs."""
    path = RESULTS / "replays.json"
    return dict(json.loads(path.read_text())["results"]) if path.exists() else {}


def write_guide(sections: Mapping[str, Sequence[str]]) -> None:
    """Put each section's tables between `<!-- replays: NAME -->` and `<!-- end -->`. Raises ValueError without them."""
    text = GUIDE.read_text(encoding="utf-8")
    for name, tables in sections.items():
        marked = re.compile(rf"(<!-- replays: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        body = "\n\n".join(tables)
        text, count = marked.subn(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)  # type: ignore[misc]
        if not count:
            raise ValueError(f"{GUIDE.name} has no place for the section {name}")
    GUIDE.write_text(text, encoding="utf-8")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--traces", type=Path, required=True, metavar="DIR", help=f"with {CHAT}, {LONG} and {DAY}")
    add("--only", default=",".join(SECTIONS), metavar="A,B,…", help="sections (%(default)s)")
    add("--docs", action="store_true", help="put the tables of all sections that were ever run into the guide")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    if unknown := set(options.only) - set(SECTIONS):
        parser.error(f"there is no section {unknown.pop()!r}: choose of {', '.join(SECTIONS)}")
    return options


def main() -> None:
    options = parse()
    Traces.folder = options.traces
    results = kept()
    for name in options.only:
        begun = time.monotonic()
        tables = [table.markdown() for table in SECTIONS[name]()]
        results[name] = {"seconds": round(time.monotonic() - begun), "tables": tables}
        print("\n\n".join(["", *tables]), flush=True)
        keep("replays", results)
    if options.docs:
        write_guide({name: section["tables"] for name, section in results.items()})


if __name__ == "__main__":
    main()
