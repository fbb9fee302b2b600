"""What happened lately and since the start: rolling windows for the console, counters for Prometheus.

Everything is fed on the loop by `endings.py`, the runs and the pools; reading is `telemetry.py`'s and `metrics.py`'s.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import structlog
from prometheus_client import Counter

from scheduler.core.budgets import show
from scheduler.core.types import Reason, StepReport
from scheduler.worker.flight import Flight, sequences_in
from scheduler.worker.metrics import Metrics
from tenants.budgets import Alert

log = structlog.get_logger(__name__)

RATE_SECONDS = 5.0  # window of rates
ATTAINMENT_SECONDS = 60.0
BUSY_SECONDS = 10.0
EVENTS_KEPT = 20  # of policies, levels, caps and engines
TTFT_SAMPLES = 2048  # bound of the TTFT window of a tier


class Rolling:
    """A sum over the last `span` seconds, in 20 slots: memory does not grow with traffic."""

    def __init__(self, span: float) -> None:
        self.span = span
        self._width = span / 20
        self._slots: deque[tuple[int, float]] = deque()
        self._total = 0.0

    def add(self, now: float, amount: float) -> None:
        slot = int(now // self._width)
        if self._slots and self._slots[-1][0] == slot:
            self._slots[-1] = (slot, self._slots[-1][1] + amount)
        else:
            self._slots.append((slot, amount))
        self._total += amount

    def total(self, now: float) -> float:
        oldest = int(now // self._width) - 19
        while self._slots and self._slots[0][0] < oldest:
            self._total -= self._slots.popleft()[1]
        if not self._slots:
            self._total = 0.0  # rounding does not accumulate
        return self._total

    def rate(self, now: float) -> float:
        """Per second."""
        return self.total(now) / self.span


@dataclass(slots=True)
class TierStatistics:
    """One tier of this process."""

    tokens: Rolling = field(default_factory=lambda: Rolling(RATE_SECONDS))
    requests: Rolling = field(default_factory=lambda: Rolling(RATE_SECONDS))
    judged: Rolling = field(default_factory=lambda: Rolling(ATTAINMENT_SECONDS))
    attained: Rolling = field(default_factory=lambda: Rolling(ATTAINMENT_SECONDS))
    ttft: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=TTFT_SAMPLES))

    def ttft_p95(self, now: float) -> float | None:
        """Of the last minute, in seconds; None without a first token in it."""
        recent = sorted(ttft for at, ttft in self.ttft if now - at <= ATTAINMENT_SECONDS)
        return recent[min(int(len(recent) * 0.95), len(recent) - 1)] if recent else None


@dataclass(slots=True)
class EngineStatistics:
    """One engine: its last step report, and how busy it has been."""

    last: StepReport | None = None
    busy: Rolling = field(default_factory=lambda: Rolling(BUSY_SECONDS))
    steps: Rolling = field(default_factory=lambda: Rolling(BUSY_SECONDS))
    sequences: Rolling = field(default_factory=lambda: Rolling(BUSY_SECONDS))
    tokens: Rolling = field(default_factory=lambda: Rolling(RATE_SECONDS))

    def step(self, report: StepReport, now: float) -> None:
        self.last = report
        self.busy.add(now, report.elapsed)
        self.steps.add(now, 1)
        self.sequences.add(now, sequences_in(report))

    def batch_mean(self, now: float) -> float:
        """Mean sequences per step lately; 0 when there was no step."""
        steps = self.steps.total(now)
        return self.sequences.total(now) / steps if steps else 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something about a whole pool that operators should see.

    `at` is monotonic; `kind`: policy, level, cap or engine.
    """

    at: float
    model: str
    kind: str
    text: str


class Statistics:
    """Of one scheduler process. Tiers and models appear when something happens to them; both are few."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.tiers: defaultdict[str, TierStatistics] = defaultdict(TierStatistics)
        self.engines: defaultdict[str, EngineStatistics] = defaultdict(EngineStatistics)
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._written: dict[tuple[str, str], Counter] = {}  # looked up once per token: finding a label costs more
        self._holds: dict[tuple[str, Reason], Counter] = {}  # once per head and round

    def forget(self, tiers: set[str], models: set[str]) -> None:
        """Drop what is neither configured nor served any more."""
        for name in self.tiers.keys() - tiers:
            del self.tiers[name]
        for model in self.engines.keys() - models:
            del self.engines[model]

    # --- fed by the life of requests --------------------------------------------------------------------------------

    def refused(self, flight: Flight, reason: Reason, attained: bool | None, now: float) -> None:
        """It never ran. `attained` None: not our doing."""
        model = flight.submit.model if flight.pool is not None else ""  # an unknown model is no label
        self.metrics.refused.labels(flight.tier_name, model, str(reason)).inc()
        self._judged(flight, attained, now)

    def dispatched(self, flight: Flight) -> None:
        self.metrics.queue_wait.labels(flight.tier_name).observe(flight.dispatched - flight.arrival)

    def delivered(self, flight: Flight, tokens: int, now: float) -> None:
        """`tokens` more have arrived from the engine; the first ones also fix the TTFT."""
        name, model = flight.tier_name, flight.submit.model
        tier = self.tiers[name]
        if flight.tokens == 0:
            ttft = now - flight.arrival
            tier.ttft.append((now, ttft))
            self.metrics.ttft.labels(name).observe(ttft)
        tier.tokens.add(now, tokens)
        self.engines[model].tokens.add(now, tokens)
        self._counter(name, model).inc(tokens)

    def ended(self, flight: Flight, status: str, attained: bool | None, now: float) -> None:
        """It was dispatched and is over."""
        tier, model = flight.tier_name, flight.submit.model
        self.tiers[tier].requests.add(now, 1)
        self.metrics.requests.labels(tier, model, status).inc()
        self.metrics.tokens.labels(tier, model, "prompt").inc(flight.prompt_tokens)
        self.metrics.engine_time.labels(tier, model).inc(flight.engine_seconds)
        self.metrics.e2e.labels(tier).observe(now - flight.arrival)
        self._judged(flight, attained, now)

    def held(self, tier: str, reason: Reason) -> None:
        """A head of the tier was not dispatched in a round."""
        counter = self._holds.get((tier, reason))
        if counter is None:
            counter = self._holds[(tier, reason)] = self.metrics.holds.labels(tier, str(reason))
        counter.inc()

    def event(self, now: float, model: str, kind: str, text: str) -> None:
        """Policy, level or cap of a pool have changed, or its engine needs somebody to look at it."""
        self.events.append(Event(now, model, kind, text))
        self.metrics.events.labels(model, kind).inc()
        log.warning("scheduling", model=model, kind=kind, what=text)

    def budget_alert(self, alert: Alert) -> None:
        """A level of a budget has been passed: once in a period, also over restarts."""
        self.metrics.budget_alerts.labels(alert.scope).inc()
        spent, limit = show(alert.spent, alert.unit), show(alert.limit, alert.unit)
        log.warning("budget", level=alert.level, spent=spent, limit=limit, account=alert.account)

    def step(self, model: str, report: StepReport, now: float) -> None:
        self.engines[model].step(report, now)
        self.metrics.step.labels(model).observe(report.elapsed)

    def _counter(self, tier: str, model: str) -> Counter:
        counter = self._written.get((tier, model))
        if counter is None:
            counter = self._written[(tier, model)] = self.metrics.tokens.labels(tier, model, "completion")
        return counter

    def _judged(self, flight: Flight, attained: bool | None, now: float) -> None:
        if attained is None:
            return
        tier = self.tiers[flight.tier_name]
        tier.judged.add(now, 1)
        tier.attained.add(now, 1 if attained else 0)
        self.metrics.judged.labels(flight.tier_name, "yes" if attained else "no").inc()
