"""`harness replay TRACE`: what policies would make of a trace, in virtual time, beside what no policy could exceed."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from scheduler.bound import Bound, BoundUnavailable, compute_bound
from scheduler.core.policies import POLICIES
from scheduler.core.types import PolicyConfig, TierSpec
from scheduler.simulator.charts import write_charts
from scheduler.simulator.configuration import ConfigurationError, default_policy, read_configuration
from scheduler.simulator.profiles import DEFAULT_PROFILE, PROFILES, Profile, ProfileError, load_profile
from scheduler.simulator.replay import Replay, ReplayError, replay
from scheduler.simulator.report import Report
from scheduler.simulator.results import judge
from scheduler.simulator.trace import TraceError, read_trace
from scheduler.simulator.workload import DEFAULT_TIERS, Demand, Workload, WorkloadError, build_workload

BOUND_ROWS = 20_000  # above it, the bound takes minutes and is computed only when asked for
PROGRESS_SECONDS = 2.0


class Command(BaseCommand):
    help = "Replay a trace in virtual time under one or several policies and compare what each achieves."
    requires_system_checks = ()  # pages and URLs have no part in it

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add(
            "trace",
            type=Path,
            metavar="TRACE",
            help="CSV, also gzipped: arrival_s,prompt_tokens,output_tokens[,tenant]",
        )
        add("--policy", action="append", choices=list(POLICIES), dest="policies", help="repeatable; default: every one")
        add(
            "--rho",
            type=_positive,
            help="scale time to this load (1 = the engine's capacity); default: as in the trace",
        )
        add(
            "--profile",
            default=DEFAULT_PROFILE,
            metavar="NAME|FILE",
            help=f"{', '.join(PROFILES)} or a file (%(default)s)",
        )
        add(
            "--config",
            type=Path,
            metavar="FILE",
            help="tiers and policy as in `harness apply`; caps outputs at max_tokens",
        )
        add(
            "--mix",
            type=_numbers,
            default=(),
            metavar="A,B,…",
            help="shares of the tiers by rank, best first (20,30,50)",
        )
        add("--seed", type=int, default=1, help="deals tiers, tenants and streaming (%(default)s)")
        add("--limit", type=_count, help="only the first N rows")
        add("--stream-share", type=_share, default=1.0, help="share of requests that are streamed (%(default)s)")
        add(
            "--length-scale",
            type=_scales,
            default=(1.0, 1.0),
            metavar="F|P,O",
            help="factor for lengths, or two: prompt, output",
        )
        add(
            "--bound", action=argparse.BooleanOptionalAction,
            help=f"compute what no policy could exceed (default: up to {BOUND_ROWS} rows)",
        )  # fmt: skip
        add("--html", type=Path, metavar="FILE", help="write a page of charts")
        add("--json", action="store_true", help="print the results as JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        page: Path | None = options["html"]
        new = page is not None and not page.exists()
        try:
            if page is not None:
                page.touch()  # better refused now than after minutes
            report, replays = self._run(argparse.Namespace(**options))
            if page is not None:
                write_charts(page, report, replays)
                new = False
        except (TraceError, ProfileError, ConfigurationError, WorkloadError, ReplayError, BoundUnavailable) as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(f"{options['html']} cannot be written: {error}") from error
        finally:
            if new and page is not None:
                page.unlink(missing_ok=True)  # nothing was written into it
        self.stdout.write(json.dumps(report.as_json()) if options["json"] else report.as_text())

    def _run(self, options: argparse.Namespace) -> tuple[Report, list[Replay]]:
        profile = load_profile(options.profile)
        tiers: Mapping[str, TierSpec] = DEFAULT_TIERS
        policy = default_policy()
        if options.config:
            configured, policy = read_configuration(options.config)
            tiers = configured or DEFAULT_TIERS
        demand = Demand(
            rho=options.rho,
            seed=options.seed,
            stream_share=options.stream_share,
            length_scale=options.length_scale,
            mix=options.mix,
            cap_outputs=options.config is not None,
        )
        workload = build_workload(read_trace(options.trace, options.limit), profile, tiers, demand)
        # What lives now lives to the end: the collector need not look at a hundred thousand requests again and again.
        gc.freeze()
        try:
            replays = [
                self._replay(workload, profile, PolicyConfig(**{**policy, "name": name}))
                for name in dict.fromkeys(options.policies or POLICIES)
            ]
        finally:
            gc.unfreeze()
        bound, reason = self._bound(workload, profile, options.bound)
        results = {run.policy: judge(run) for run in replays}
        return Report(str(options.trace), options.seed, profile, workload, results, bound, reason), replays

    def _replay(self, workload: Workload, profile: Profile, policy: PolicyConfig) -> Replay:
        return replay(workload, profile, policy, _Progress(policy.name))

    def _bound(self, workload: Workload, profile: Profile, wanted: bool | None) -> tuple[Bound | None, str]:
        """The bound, or None and why not. Raises BoundUnavailable if it was asked for and cannot be computed."""
        rows = len(workload.requests)
        if wanted is False:
            return None, "not wanted (--no-bound)"
        if wanted is None and rows > BOUND_ROWS:
            return None, f"not computed for {rows} requests; --bound does it all the same, in minutes"
        try:
            return compute_bound(workload, profile, _Progress("bound")), ""
        except BoundUnavailable as error:
            if wanted:
                raise
            return None, str(error)


class _Progress:
    """One line on standard error that says how far a long run is."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._begun = self._said = time.monotonic()
        self._spoke = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        over = done >= total
        if not self._spoke if over else now - self._said < PROGRESS_SECONDS:
            return
        self._said, self._spoke = now, True
        end = "\n" if over else ""
        sys.stderr.write(f"\r{self._what}: {done} of {total}, {now - self._begun:.0f} s{end}")
        sys.stderr.flush()


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1,000,000")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be from 0 to 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _numbers(text: str) -> tuple[float, ...]:
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value <= 1e6 for value in values):
        raise argparse.ArgumentTypeError("must be numbers of at least 0, separated by commas")
    return values


def _scales(text: str) -> tuple[float, float]:
    values = _numbers(text)
    if len(values) > 2 or min(values) <= 0:
        raise argparse.ArgumentTypeError("must be one factor above 0, or two separated by a comma")
    return values[0], values[-1]
