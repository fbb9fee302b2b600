"""A whole scheduler process in memory: real core, wire, gateway and simulated engine, manual clock, real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from scheduler.clock import ManualClock
from scheduler.gateway import BudgetSpec, Caller, Event, Gateway, LimitSpec, Sampling, Submit
from scheduler.models import Deployment
from scheduler.wire.memory import MemoryTransport
from scheduler.worker.runtime import Options, Runtime
from tenants.models import Tier

ADDRESS = "scheduler"
WALL = 1_800_000_000.0  # Unix time at the manual clock's zero
STEP = {"step": {"base": 0.01}, "max_seqs": 4, "step_tokens": 64, "kv_tokens": 4096, "max_model_len": 512}
PATIENCE = 60.0  # seconds of real time that a condition may take, on a busy machine


@dataclass
class Product:
    """One scheduler process and one web process's gateway to it."""

    clock: ManualClock
    transport: MemoryTransport
    runtime: Runtime
    gateway: Gateway
    options: Options
    _ids: int = 0
    _stopping: asyncio.Task[None] | None = None
    _readers: list[asyncio.Task[Any]] = field(default_factory=list)

    def submit(self, *, words: int = 3, max_tokens: int | None = 4, tier: str = "vip", **changes: Any) -> Answer:
        """Send a request and collect its events in the background."""
        self._ids += 1
        limits, budgets = changes.pop("limits", ()), changes.pop("budgets", ())
        gateway = changes.pop("gateway", None)
        key, version = changes.pop("key", "7"), changes.pop("version", 1)
        fields: dict[str, Any] = {
            "id": f"req-{self._ids}",
            "attempt": 1,
            "age": 0.0,
            "caller": Caller("1", "acme", key, tier, tuple(limits), version, "prod", tuple(budgets)),
            "model": "demo",
            "messages": ({"role": "user", "content": " ".join(["word"] * words)},),
            "sampling": Sampling(max_tokens=max_tokens),
            "stream": True,
        }
        answer = Answer(Submit(**(fields | changes)))
        answer.task = asyncio.create_task(answer.read(gateway or self.gateway))
        self._readers.append(answer.task)
        return answer

    @asynccontextmanager
    async def second_web(self) -> AsyncIterator[Gateway]:
        """Another web process; at the end it is gone, with all its connections."""
        gateway = Gateway(lambda: [ADDRESS], "web-2", self.transport, clock=self.clock)
        await gateway.start()
        try:
            await self.until(lambda: "ready" in gateway.models().values())
            yield gateway
        finally:
            await gateway.aclose()

    async def until(self, condition: Callable[[], bool | Awaitable[bool]], *, step: float = 0.01) -> None:
        """Let time pass until `condition` holds."""
        async with asyncio.timeout(PATIENCE):
            while True:
                held = condition()
                if held if isinstance(held, bool) else await held:
                    return
                await self.clock.advance(step)
                await asyncio.sleep(0.0005)  # threads: rendering, database

    async def ready(self, model: str = "demo") -> None:
        await self.state(model, "ready")

    async def state(self, model: str, state: str | None) -> None:
        """Until the web knows the model in that state (None: not at all)."""
        await self.until(lambda: self.gateway.models().get(model) == state)

    async def settled(self) -> None:
        """Everything that has ended is in the database."""
        settlement = self.runtime.services.settlement
        await self.until(lambda: settlement.open_intents() == 0 and not settlement._ended)
        assert await settlement.drain()

    def assert_nothing_is_held(self) -> None:
        """Conservation: when nothing is alive, nothing is reserved, open, waiting or running."""
        services = self.runtime.services
        assert services.admission.reserved() == 0
        assert services.settlement.open_intents() == 0
        for pool in self.runtime.pools.values():
            assert pool.flights == {}
            if pool.planner is not None:
                snapshot = pool.planner.snapshot(self.clock.now())
                assert snapshot.in_flight == 0
                assert all(tier.waiting == tier.running == 0 for tier in snapshot.tiers.values())

    def stop(self) -> asyncio.Task[None]:
        """Begin to stop the scheduler process, once."""
        self._stopping = self._stopping or asyncio.create_task(self.runtime.stop())
        return self._stopping

    async def close(self) -> None:
        stopping = self.stop()
        await self.until(stopping.done)
        stopping.result()
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await self.gateway.aclose()


@dataclass
class Answer:
    """What came back for one request."""

    request: Submit
    events: list[Event] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    async def read(self, gateway: Gateway) -> None:
        stream = gateway.submit(self.request)
        try:
            async for event in stream:
                self.events.append(event)
        finally:
            await stream.aclose()

    @property
    def last(self) -> Any:
        return self.events[-1] if self.events else None

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def text(self) -> str:
        return "".join(getattr(event, "text", "") for event in self.events)

    def done(self) -> bool:
        return self.task is not None and self.task.done()

    async def hang_up(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def limit(kind: str, value: int, *, scope: str = "key", owner: str = "7") -> LimitSpec:
    return LimitSpec(scope, owner, "", kind, value)


def budget(value: int, **changes: Any) -> BudgetSpec:
    """A hard budget of tokens of the whole tenant, for a day in UTC."""
    fields: dict[str, Any] = {
        "scope": "tenant",
        "owner": "1",
        "model": "",
        "unit": "tokens",
        "period": "day",
        "zone": "UTC",
        "value": value,
        "hard": True,
    }
    return BudgetSpec(**(fields | changes))


@pytest.fixture
def tiers(transactional_db: None) -> None:
    Tier.objects.create(name="vip", rank=1, weight=60, slo_ttft=0.5, slo_e2e=0.5, slo_tpot=0.1)
    Tier.objects.create(name="free", rank=3, weight=10, max_tokens=64, queue_max_wait=30.0)


@pytest.fixture
def demo(tiers: None) -> Deployment:
    return Deployment.objects.create(model="demo", engine="simulated", options=STEP)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Any]:
    """`async with start() as product`: a scheduler process over `tmp_path`, stopped in order at the end."""

    @asynccontextmanager
    async def started(**changes: Any) -> AsyncIterator[Product]:
        clock = changes.pop("clock", None) or ManualClock()
        transport = MemoryTransport()
        fields: dict[str, Any] = {
            "name": "scheduler",
            "address": ADDRESS,
            "data_dir": tmp_path,
            "run_dir": tmp_path / "run",
            "spool_dir": tmp_path / "spool",
            "salt_secret": b"salt",
        }
        factory = {name: changes.pop(name) for name in ("engine_factory",) if name in changes}
        wall = changes.pop("wall", lambda: WALL + clock.now())
        options = Options(**(fields | changes))
        runtime = Runtime(options, clock=clock, wall=wall, transport=transport, **factory)
        gateway = Gateway(lambda: [ADDRESS], "web-1", transport, clock=clock)
        product = Product(clock, transport, runtime, gateway, options)
        await runtime.start()
        await gateway.start()
        try:
            yield product
        finally:
            await product.close()

    return started
