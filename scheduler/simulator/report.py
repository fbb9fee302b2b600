"""What a replay says: a JSON document for programs, lines and a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scheduler.bound import Bound
from scheduler.simulator.engine_curve import EngineCurve
from scheduler.simulator.profiles import Profile
from scheduler.simulator.results import Percentiles, PolicyResult, TierResult
from scheduler.simulator.workload import Workload

FEW_HORIZONS = 10  # a trace that is shorter says little: what is due after its end has the engine for itself

COLUMNS = (
    "tier", "requests", "attained", "rejected", "TTFT p50/p95/p99 (s)", "E2E p50/p95/p99 (s)", "share", "expected",
)  # fmt: skip
WIDTHS = (10, 8, 9, 9, 23, 23, 8, 9)  # of the columns as text; the first is of names, the others of figures
POLICY_WIDTH = 16


@dataclass(frozen=True, slots=True)
class Report:
    """One trace under several policies. `bound` None: not computed, `no_bound` says why."""

    trace: str
    seed: int
    profile: Profile
    workload: Workload
    policies: Mapping[str, PolicyResult]
    bound: Bound | None
    no_bound: str = ""

    def as_json(self) -> dict[str, Any]:
        bound = asdict(self.bound) if self.bound else {"value": None, "reason": self.no_bound}
        return {
            "trace": self.trace,
            "rho": self.workload.rho,
            "seed": self.seed,
            "requests": len(self.workload.requests),
            "profile": self.profile.name,
            "profile_derived": self.profile.derived,
            "profile_step_error": self.profile.step_error,
            "span": self.workload.span,
            "shortened": self.workload.shortened,
            "engine": self._engine_json(),
            "bound": bound,
            "policies": {name: self._policy_json(result) for name, result in self.policies.items()},
        }

    def curve(self) -> EngineCurve:
        """What batching is worth on this engine with these lengths."""
        return EngineCurve.of(self.workload, self.profile)

    def of_bound(self, result: PolicyResult) -> float | None:
        """The policy's value as a share of what no policy could exceed."""
        return result.value / self.bound.value if self.bound and self.bound.value else None

    def as_text(self) -> str:
        return "\n".join([*self.facts(), "", *self._table()])

    def facts(self) -> Iterator[str]:
        """What was replayed, how far its figures can be trusted, and what no policy could exceed: a line each."""
        workload, profile = self.workload, self.profile
        yield (
            f"{self.trace}: {len(workload.requests)} requests over {workload.span:.0f} s, rho {workload.rho:.2f}, "
            f"seed {self.seed}"
        )
        yield f"engine {profile.name}: {profile.basis}"
        yield f"all figures are predictions of {profile.name}, {profile.accuracy}"
        if workload.shortened:
            yield f"{workload.shortened} requests were too long for the engine and cut to {profile.longest} tokens"
        yield self._bound_line()

    def rows(self, result: PolicyResult) -> Iterator[tuple[str, ...]]:
        """Under `COLUMNS`, a row for each tier."""
        for tier, figures in result.tiers.items():
            yield (tier, *_cells(figures))

    def summary(self, result: PolicyResult) -> str:
        """The policy in one line."""
        of_bound = self.of_bound(result)
        return (
            f"value {result.value:.4f}"
            + (f" ({_percent(of_bound)} of the bound)" if of_bound is not None else "")
            + f", goodput {result.goodput_rps:.2f}/s, throughput {result.throughput_rps:.2f}/s "
            f"{result.throughput_tps:.0f} tokens/s, busy {_percent(result.busy)}, batch {result.mean_batch:.1f}, "
            f"preemptions {result.preemptions}, decision p50 {result.decision_us['p50'] or 0:.0f} us "
            f"p99 {result.decision_us['p99'] or 0:.0f} us"
        )

    def _engine_json(self) -> dict[str, Any]:
        """At the largest batch that keeps every tier's pace: S(n) and U(n)."""
        curve = self.curve()
        chosen = curve.chosen(self.workload.tiers.values())
        return {
            "full_batch": curve.sizes[-1],
            "chosen_batch": chosen,
            "speed_up": curve.speed_up[chosen - 1],
            "utilisation": curve.utilisation[chosen - 1],
        }

    def _policy_json(self, result: PolicyResult) -> dict[str, Any]:
        document = asdict(result)
        document["value_of_bound"] = self.of_bound(result)
        for name, tier in result.tiers.items():
            document["tiers"][name]["attainment"] = tier.attainment
        return document

    def _bound_line(self) -> str:
        if self.bound is None:
            return f"bound: {self.no_bound}"
        bound = self.bound
        reached = "" if bound.converged else " (not tight: stopped before all intervals were met)"
        short = "" if bound.horizons >= FEW_HORIZONS else ", so few that the ends of the trace count"
        return (
            f"bound: no policy exceeds value {bound.value:.4f}{reached}; a clairvoyant greedy reaches "
            f"{bound.greedy_value:.4f}; {bound.horizons:.1f} horizons of {bound.horizon:.0f} s{short}"
        )

    def _table(self) -> Iterator[str]:
        yield f"{'policy':{POLICY_WIDTH}}{_aligned(COLUMNS)}"
        for name, result in self.policies.items():
            for number, row in enumerate(self.rows(result)):
                yield f"{'' if number else name:{POLICY_WIDTH}}{_aligned(row)}"
            yield f"{'':{POLICY_WIDTH}}{self.summary(result)}"


def _cells(figures: TierResult) -> tuple[str, ...]:
    return (
        str(figures.requests),
        _percent(figures.attainment),
        str(figures.rejected),
        _seconds(figures.ttft),
        _seconds(figures.e2e),
        _percent(figures.share_received),
        _percent(figures.share_expected),
    )


def _aligned(row: tuple[str, ...]) -> str:
    name, *figures = row
    columns = (f"{cell:>{width}}" for cell, width in zip(figures, WIDTHS[1:], strict=True))
    return " ".join((f"{name:{WIDTHS[0]}}", *columns))  # a cell wider than its column does not touch the next


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _seconds(percentiles: Percentiles) -> str:
    return " / ".join("-" if value is None else f"{value:.3g}" for value in percentiles.values())
