"""What a replay says: a JSON document for programs, a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scheduler.bound import Bound
from scheduler.simulator.profiles import Profile
from scheduler.simulator.results import Percentiles, PolicyResult
from scheduler.simulator.workload import Workload

FEW_HORIZONS = 10  # a trace that is shorter says little: what is due after its end has the engine for itself


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
            "span": self.workload.span,
            "shortened": self.workload.shortened,
            "bound": bound,
            "policies": {name: self._policy_json(result) for name, result in self.policies.items()},
        }

    def _policy_json(self, result: PolicyResult) -> dict[str, Any]:
        document = asdict(result)
        document["value_of_bound"] = self.of_bound(result)
        for name, tier in result.tiers.items():
            document["tiers"][name]["attainment"] = tier.attainment
        return document

    def of_bound(self, result: PolicyResult) -> float | None:
        """The policy's value as a share of what no policy could exceed."""
        return result.value / self.bound.value if self.bound and self.bound.value else None

    def as_text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        kind = "derived from datasheets, not measured" if self.profile.derived else "given"
        workload = self.workload
        yield (
            f"{self.trace}: {len(workload.requests)} requests over {workload.span:.0f} s, rho {workload.rho:.2f}, "
            f"seed {self.seed}"
        )
        yield f"engine {self.profile.name} ({kind}): {self.profile.basis}"
        if workload.shortened:
            yield f"{workload.shortened} requests were too long for the engine and cut to {self.profile.longest} tokens"
        yield self._bound_line()
        yield ""
        yield (
            f"{'policy':16}{'tier':10}{'requests':>9}{'attained':>10}{'rejected':>10}{'TTFT p50/p95/p99 (s)':>24}"
            f"{'E2E p50/p95/p99 (s)':>24}{'share':>8}{'expected':>10}"
        )
        for name, result in self.policies.items():
            yield from self._policy_lines(name, result)

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

    def _policy_lines(self, name: str, result: PolicyResult) -> Iterator[str]:
        for number, (tier, figures) in enumerate(result.tiers.items()):
            yield (
                f"{name if number == 0 else '':16}{tier:10}{figures.requests:>9}{_percent(figures.attainment):>10}"
                f"{figures.rejected:>10}{_seconds(figures.ttft):>24}{_seconds(figures.e2e):>24}"
                f"{_percent(figures.share_received):>8}{_percent(figures.share_expected):>10}"
            )
        of_bound = self.of_bound(result)
        yield (
            f"{'':16}value {result.value:.4f}"
            + (f" ({_percent(of_bound)} of the bound)" if of_bound is not None else "")
            + f", goodput {result.goodput_rps:.2f}/s, throughput {result.throughput_rps:.2f}/s "
            f"{result.throughput_tps:.0f} tokens/s, busy {_percent(result.busy)}, batch {result.mean_batch:.1f}, "
            f"preemptions {result.preemptions}, decision p50 {result.decision_us['p50'] or 0:.0f} us "
            f"p99 {result.decision_us['p99'] or 0:.0f} us"
        )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _seconds(percentiles: Percentiles) -> str:
    return " / ".join("-" if value is None else f"{value:.3g}" for value in percentiles.values())
