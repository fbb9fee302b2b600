"""Prometheus metrics of one scheduler process, in a registry of their own.

Labels are bounded: tiers and models that are configured, reasons and statuses of fixed lists. No tenant, no key.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from scheduler.worker.snapshots import Snapshot

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
DECISION_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01)
STATES = ("starting", "ready", "failed", "draining", "stopped")


class Metrics:
    """Counters are fed as things happen; gauges are set from a telemetry snapshot when the metrics are read."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"harness_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"harness_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"harness_{name}_seconds", text, labels, buckets=buckets, registry=registry)

        self.requests = counter(
            "requests", "Requests that reached an engine, by how they ended", "tier", "model", "status"
        )
        self.refused = counter("refusals", "Requests that never ran, by reason", "tier", "model", "reason")
        self.tokens = counter("tokens", "Tokens read and written", "tier", "model", "kind")
        self.engine_time = counter(
            "engine_charged_seconds", "Engine time that requests were charged, counted at their end", "tier", "model"
        )
        self.judged = counter("contracts", "Requests judged against their contract", "tier", "attained")
        self.ttft = histogram("ttft", "Arrival to first token", SECONDS, "tier")
        self.e2e = histogram("e2e", "Arrival to end", SECONDS, "tier")
        self.queue_wait = histogram("queue_wait", "Arrival to dispatch", SECONDS, "tier")
        self.step = histogram("engine_step", "Duration of an engine step", STEP_SECONDS, "model")
        self.decision = histogram("decision", "Duration of a scheduling decision", DECISION_SECONDS, "model")
        self.holds = counter("holds", "Rounds in which the head of a queue was not dispatched", "tier", "reason")
        self.preemptions = counter("preemptions", "Requests taken out of an engine for a better rank", "tier")
        self.events = counter(
            "scheduling_events", "Changes of policy, degradation level and batch cap", "model", "kind"
        )
        self.budget_alerts = counter("budget_alerts", "Shares of budgets that were spent, told once a period", "scope")
        self.engine_deaths = counter("engine_deaths", "Engines that died or made no steps", "model")
        self.engine_queue_alarms = counter(
            "engine_queue_alarms",
            "Episodes in which an engine's own queue did not empty, so that nothing was dispatched",
            "model",
        )
        self.shaper_failures = counter("step_shaper_failures", "Step shapers that failed and are off", "model")
        self._waiting = gauge("waiting_requests", "Requests in the queue", "tier")
        self._oldest = gauge("oldest_wait_seconds", "Age of the oldest request in the queue", "tier")
        self._running = gauge("running_requests", "Requests in an engine", "tier")
        self._kv = gauge("kv_usage_ratio", "Part of an engine's KV pool that is in use", "model")
        self._busy = gauge("engine_busy_ratio", "Part of the last 10 seconds in which the engine computed", "model")
        self._engine_waiting = gauge("engine_waiting", "Requests in the engine's own queue", "model")
        self._state = gauge("engine_state", "1 for the state that an engine is in", "model", "state")
        self._policy = gauge("policy_version", "Version of the scheduling configuration in force")
        self._level = gauge("degradation_level", "Level of the degradation ladder")
        self._backlog = gauge("spool_backlog_rows", "Ended requests that have not reached the database yet")

    def render(self, snapshot: Snapshot, backlog: int) -> str:
        """The text format, with gauges as of `snapshot`."""
        gauges = (self._waiting, self._oldest, self._running, self._kv, self._busy, self._engine_waiting, self._state)
        for one in gauges:
            one.clear()  # what is gone must not stay as a frozen number
        for name, tier in snapshot.tiers.items():
            self._waiting.labels(name).set(tier.waiting)
            self._oldest.labels(name).set(tier.oldest_wait)
            self._running.labels(name).set(tier.running)
        for engine in snapshot.engines:
            self._kv.labels(engine.model).set(engine.kv_usage)
            self._busy.labels(engine.model).set(engine.busy)
            self._engine_waiting.labels(engine.model).set(engine.waiting)
            for state in STATES:
                self._state.labels(engine.model, state).set(1 if engine.state == state else 0)
        self._policy.set(snapshot.policy_version)
        self._level.set(snapshot.degradation_level)
        self._backlog.set(backlog)
        return generate_latest(self.registry).decode()
