"""Engine time: every second that the engine computed is charged to a request, whatever becomes of the request."""

from __future__ import annotations

import random

import pytest
from asgiref.sync import sync_to_async
from django.db.models import Count, Sum
from prometheus_client import Counter

from scheduler.clock import ManualClock
from scheduler.core.types import Preempt
from scheduler.engines import create_engine
from scheduler.gateway import Caller
from scheduler.models import Deployment
from scheduler.worker import journal
from scheduler.worker.flight import Phase
from tenants import reports
from tenants.models import Tier, UsageRecord

from .conftest import WALL

REQUESTS = 80
CALLERS = [Caller("1", "acme", "7", "vip", (), 0, "prod"), Caller("2", "globex", "8", "free", (), 0, "prod")]
COSTS = {
    "step": {"base": 0.01, "prefill_token": 0.0002, "decode_seq": 0.001, "kv_token": 0.00001},
    "max_seqs": 4,
    "step_tokens": 32,
    "kv_tokens": 256,
    "max_model_len": 128,
}


class Stopwatch:
    """Builds engines and sums up how long their steps took."""

    def __init__(self) -> None:
        self.busy = 0.0

    def __call__(self, name, model, options, *, on_step, **rest):
        def timed(report):
            self.busy += report.elapsed
            on_step(report)

        return create_engine(name, model, options, on_step=timed, **rest)


@pytest.fixture
def stopwatch() -> Stopwatch:
    return Stopwatch()


def total(counter: Counter) -> float:
    """Over all labels."""
    return sum(one.value for one in counter.collect()[0].samples if one.name.endswith("_total"))


def give_way(product) -> None:
    """What the policy does as a last resort: the first that runs and can go on later leaves the engine."""
    work = product.runtime.pools["demo"]._work
    running = [flight for flight in work.flights.values() if flight.phase is Phase.RUNNING and flight.resumable]
    if running and not running[0].preempting:
        request = work.planner.books.batcher.get(running[0].id).request
        work._act([Preempt(request, request)], product.clock.now())


async def leave_early(product, answers) -> None:
    """One hangs up in the middle of its answer."""
    begun = [one for one in answers if not one.done() and "Delta" in one.kinds()]
    if begun:
        await begun[0].hang_up()


async def busy_day(product, dice: random.Random) -> None:
    """Requests of two tenants; some leave, some fail, some give way, and one engine dies under what it runs."""
    answers = []
    for number in range(REQUESTS):
        simulate = {"fail_at": dice.randint(0, 8)} if number % 7 == 3 else None
        if number == REQUESTS - 20:
            simulate = {"crash_at": 3}
        answer = product.submit(
            caller=dice.choice(CALLERS),
            words=dice.randint(1, 40),
            max_tokens=dice.randint(1, 40),
            simulate=simulate,
        )
        answers.append(answer)
        await product.until(lambda: sum(not one.done() for one in answers) < 12, step=0.03)
        if number % 5 == 1:
            await dice.choice(answers[-10:]).hang_up()
        if number % 10 == 9:
            await leave_early(product, answers)
        if number % 5 == 2:
            give_way(product)
    await product.until(lambda: all(answer.done() for answer in answers), step=0.03)
    await product.settled()


async def test_the_sum_over_all_rows_is_the_time_that_the_engine_was_busy(start, tiers, stopwatch):
    await Tier.objects.filter(name="free").aupdate(preemptible=True, max_tokens=400)
    await sync_to_async(Deployment.objects.create)(model="demo", engine="simulated", options=COSTS)
    clock = ManualClock()
    async with start(clock=clock, engine_factory=stopwatch) as product:
        await product.ready()
        await busy_day(product, random.Random(11))
        metrics = product.runtime.services.statistics.metrics
        assert total(metrics.preemptions) > 3
        told = total(metrics.engine_time)
        unattributed = product.runtime.pools["demo"].planner.books.service.unattributed
    rows = UsageRecord.objects.all()
    statuses = {row["status"]: row["n"] async for row in rows.order_by().values("status").annotate(n=Count("pk"))}
    assert {"finished", "failed", "aborted"} <= statuses.keys()
    charged = (await rows.aaggregate(sum=Sum("engine_seconds")))["sum"]
    assert charged == pytest.approx(stopwatch.busy, rel=0.01)
    # What is left is told, not hidden.
    assert charged + unattributed == pytest.approx(stopwatch.busy, abs=1e-6)
    assert told == pytest.approx(charged)

    span = reports.Span(int(WALL) - 86_400, int(WALL + clock.now()) + 86_400, "1d", "Asia/Shanghai", ("tenant",))
    by_day = await sync_to_async(lambda: list(reports.buckets(rows, span)))()
    assert {group[0] for bucket in by_day for group in bucket.groups} == {"acme", "globex"}
    assert sum(one.engine_seconds for bucket in by_day for one in bucket.groups.values()) == pytest.approx(charged)


async def test_what_a_request_has_been_charged_outlives_its_scheduler(start, tiers, stopwatch, tmp_path):
    """The journal has the engine time up to the last token, also of a run that gave way: a death loses the rest."""
    await sync_to_async(Deployment.objects.create)(model="demo", engine="simulated", options=COSTS)
    path = tmp_path / "spool" / "journal-scheduler-1.bin"

    def known() -> float:
        return sum(progress.engine_seconds for progress in journal.read(path).values())

    async with start(engine_factory=stopwatch) as product:
        await product.ready()
        answers = [product.submit(words=words, max_tokens=60) for words in (4, 20)]
        for tokens in (5, 30):
            await product.until(lambda least=tokens: all(one.kinds().count("Delta") >= least for one in answers))
            assert known() == pytest.approx(stopwatch.busy, abs=0.03)  # two steps
            give_way(product)
        await product.until(lambda: all(one.done() for one in answers))
        await product.settled()
    charged = (await UsageRecord.objects.aaggregate(sum=Sum("engine_seconds")))["sum"]
    assert charged == pytest.approx(stopwatch.busy, rel=0.01)
