"""Once a second: everything the console shows of this process, as one snapshot to every telemetry subscriber."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from scheduler.core.types import TierSnapshot
from scheduler.worker.gpus import Gpus
from scheduler.worker.pool import Pool
from scheduler.worker.services import Services
from scheduler.worker.snapshots import EngineRow, EventRow, GpuRow, Snapshot, TierRow
from scheduler.worker.statistics import TierStatistics

PERIOD = 1.0  # seconds


class Telemetry:
    """Puts snapshots together. `publish` hands one to the subscribers."""

    def __init__(
        self, scheduler: str, services: Services, pools: Mapping[str, Pool], publish: Callable[[Snapshot], None]
    ) -> None:
        self._scheduler = scheduler
        self._services = services
        self._pools = pools
        self._publish = publish
        self._gpus: list[GpuRow] = []
        self._seq = 0

    async def run(self) -> None:
        """Until cancelled."""
        gpus = await asyncio.to_thread(Gpus)
        while True:
            self._gpus = await asyncio.to_thread(gpus.read)
            self._seq += 1
            self._publish(self.snapshot())
            await self._services.clock.sleep(PERIOD)

    def snapshot(self) -> Snapshot:
        """As of now. `seq` is that of the last published one."""
        services, now = self._services, self._services.clock.now()
        policy = services.configuration.policy
        counts = {name: TierSnapshot() for name in services.configuration.tiers}
        level = 0  # the worst of all pools
        for pool in self._pools.values():
            if pool.planner is not None:
                one = pool.planner.snapshot(now)
                level = max(level, one.level)
                for name, tier in one.tiers.items():
                    _add(counts.setdefault(name, TierSnapshot()), tier)
        return Snapshot(
            at=services.wall(),
            scheduler=self._scheduler,
            epoch=services.epoch,
            seq=self._seq,
            policy=policy.name,
            policy_version=policy.version,
            degradation_level=level,
            tiers={name: _tier_row(one, services.statistics.tiers[name], now) for name, one in counts.items()},
            engines=[self._engine(pool, now) for pool in self._pools.values()],
            gpus=self._gpus,
            events=[
                EventRow(services.wall() - (now - event.at), event.model, event.kind, event.text)
                for event in services.statistics.events
            ],
        )

    def _engine(self, pool: Pool, now: float) -> EngineRow:
        statistics = self._services.statistics.engines[pool.model]
        last = statistics.last if pool.flights else None  # an idle engine reports nothing: its last report is history
        return EngineRow(
            model=pool.model,
            replica=0,
            state=str(pool.state),
            message=f"{pool.message} {pool.hint}".strip(),
            running=last.running if last is not None else 0,
            waiting=last.waiting if last is not None else 0,
            kv_usage=last.kv_usage if last is not None else 0.0,
            busy=min(statistics.busy.rate(now), 1.0),
            batch_mean=statistics.batch_mean(now),
            tokens_per_s=statistics.tokens.rate(now),
        )


def _add(total: TierSnapshot, one: TierSnapshot) -> None:
    total.waiting += one.waiting
    total.running += one.running
    total.oldest_wait = max(total.oldest_wait, one.oldest_wait)


def _tier_row(counts: TierSnapshot, statistics: TierStatistics, now: float) -> TierRow:
    judged, attained = round(statistics.judged.total(now)), round(statistics.attained.total(now))
    return TierRow(
        waiting=counts.waiting,
        oldest_wait=counts.oldest_wait,
        running=counts.running,
        tokens_per_s=statistics.tokens.rate(now),
        requests_per_s=statistics.requests.rate(now),
        attainment=attained / judged if judged else None,
        attained=attained,
        judged=judged,
        ttft_p95=statistics.ttft_p95(now),
    )
