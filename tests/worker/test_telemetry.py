"""What the console, the metrics and `GET /v1/queue/status` are told."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from asgiref.sync import sync_to_async

from scheduler import config
from scheduler.gateway import AskError, Caller, Done
from scheduler.worker.statistics import Rolling

from .conftest import WALL, limit

pytestmark = pytest.mark.usefixtures("demo")


def test_a_rolling_sum_forgets_what_is_older_than_its_span():
    rolling = Rolling(10.0)
    rolling.add(0.0, 4)
    rolling.add(5.0, 2)
    assert rolling.total(9.4) == 6
    assert rolling.total(10.1) == 2
    assert rolling.rate(10.1) == 0.2
    assert rolling.total(100.0) == 0


async def test_a_snapshot_each_second_shows_tiers_and_engines_as_they_are(start):
    await sync_to_async(config.update)({"policy": {"name": "continuous"}})
    async with start() as product:
        await product.ready()
        snapshots = product.gateway.snapshots()
        running = [product.submit(max_tokens=400) for _ in range(4)]
        waiting = product.submit(tier="free")
        await product.until(lambda: all(answer.events for answer in [*running, waiting]))
        seen = []
        while len(seen) < 3:
            task = asyncio.ensure_future(anext(snapshots))
            await product.until(task.done)
            seen.append(task.result())
        await snapshots.aclose()
        last = seen[-1]
        assert [one["seq"] for one in seen] == list(range(seen[0]["seq"], seen[0]["seq"] + 3))
        assert seen[2]["at"] - seen[1]["at"] == pytest.approx(1.0, abs=0.05)
        assert last["at"] == pytest.approx(WALL, abs=60)
        assert (last["scheduler"], last["epoch"], last["policy"]) == ("scheduler", 1, "continuous")
        assert (last["tiers"]["vip"]["running"], last["tiers"]["vip"]["waiting"]) == (4, 0)
        assert (last["tiers"]["free"]["running"], last["tiers"]["free"]["waiting"]) == (0, 1)
        assert last["tiers"]["free"]["oldest_wait"] > 1.0
        assert last["tiers"]["vip"]["tokens_per_s"] > 100
        (engine,) = last["engines"]
        assert (engine["model"], engine["state"], engine["running"]) == ("demo", "ready", 4)
        assert 0 < engine["kv_usage"] < 1
        assert 0.1 < engine["busy"] <= 1.0
        assert engine["batch_mean"] == pytest.approx(4.0, abs=0.3)
        for answer in [*running, waiting]:
            await answer.hang_up()


async def test_attainment_counts_what_is_ours_and_leaves_out_what_is_the_callers(start):
    async with start() as product:
        await product.ready()
        kept = product.submit()
        missed = product.submit(max_tokens=20, simulate={"pace": 0.2})
        own_limit = product.submit(limits=[limit("tpm", 1)])
        gone = product.submit(max_tokens=400, simulate={"hang_at": 1})
        failed = product.submit(simulate={"fail_at": 1})
        await product.clock.advance(0.05)
        await gone.hang_up()
        await product.until(lambda: all(one.done() for one in (kept, missed, own_limit, failed)))
        tier = product.runtime._telemetry.snapshot().tiers["vip"]
        assert own_limit.last.reason == "limit_too_large"
        assert (tier.attained, tier.judged) == (2, 4)  # gone had its first token in time
        assert tier.attainment == 0.5
        await product.clock.advance(70.0)
        assert product.runtime._telemetry.snapshot().tiers["vip"].attainment is None


async def test_an_idle_engine_shows_no_frozen_numbers(start):
    async with start() as product:
        await product.ready()
        answer = product.submit()
        await product.until(answer.done)
        await product.clock.advance(20.0)
        engine = product.runtime._telemetry.snapshot().engines[0]
        assert (engine.running, engine.kv_usage, engine.busy, engine.batch_mean) == (0, 0.0, 0.0, 0.0)


async def test_queue_status_has_the_published_shape(start):
    async with start() as product:
        await product.ready()
        status = await product.gateway.ask("queue_status")
    assert status == {
        "policy": "batching_aware",
        "policy_version": status["policy_version"],
        "degradation_level": 0,
        "tiers": {
            "vip": {"waiting": 0, "oldest_wait": 0.0, "running": 0},
            "free": {"waiting": 0, "oldest_wait": 0.0, "running": 0},
        },
        "engines": [{"model": "demo", "replica": 0, "state": "ready", "running": 0, "kv_usage": 0.0, "busy": 0.0}],
    }


async def test_metrics_count_by_tier_and_model_and_name_no_tenant(start):
    async with start() as product:
        await product.ready()
        answer = product.submit(words=3, max_tokens=4)
        refused = product.submit(tier="free", max_tokens=100)
        await product.until(lambda: answer.done() and refused.done())
        text = await product.gateway.ask("metrics")
    assert 'harness_requests_total{model="demo",status="finished",tier="vip"} 1.0' in text
    assert 'harness_refusals_total{model="demo",reason="limit_too_large",tier="free"} 1.0' in text
    assert 'harness_tokens_total{kind="completion",model="demo",tier="vip"} 4.0' in text
    assert 'harness_tokens_total{kind="prompt",model="demo",tier="vip"} 3.0' in text
    assert 'harness_engine_state{model="demo",state="ready"} 1.0' in text
    assert "harness_ttft_seconds_bucket" in text
    assert "acme" not in text


async def test_the_simulated_engines_record_of_a_request_can_be_asked_for(start):
    async with start() as product:
        await product.ready()
        answer = product.submit()
        await product.until(answer.done)
        record = await product.gateway.ask("simulated_request", id=answer.request.id)
        assert (record["tokens"], record["aborted"]) == (4, None)
        assert await product.gateway.ask("simulated_request", id="nobody") is None


async def test_an_unknown_question_is_answered_with_an_error(start):
    async with start() as product:
        await product.ready()
        with pytest.raises(AskError, match="unknown question"):
            await product.gateway.ask("meaning")


async def test_no_log_line_holds_prompt_text_or_a_key(start, capsys, caplog):
    async with start() as product:
        await product.ready()
        answer = product.submit(messages=({"role": "user", "content": "xyzzy plugh"},), simulate={"fail_at": 1})
        await product.until(answer.done)
    everything = caplog.text + capsys.readouterr().err
    assert "req-1" in everything
    assert "xyzzy" not in everything


async def test_a_policy_that_fails_is_replaced_and_operators_are_told(start, monkeypatch):
    async with start() as product:
        await product.ready()
        planner = product.runtime.pools["demo"].planner

        def broken(now):
            raise ZeroDivisionError("an average of nothing")

        monkeypatch.setattr(planner._policy._policy, "candidates", broken)
        answer = product.submit()
        await product.until(answer.done)
        assert isinstance(answer.last, Done)
        (event,) = product.runtime._telemetry.snapshot().as_dict()["events"]
        assert (event["model"], event["kind"]) == ("demo", "policy")
        assert event["at"] == pytest.approx(WALL, abs=60)
        assert "batching_aware failed and priority works in its place" in event["text"]
        assert "an average of nothing" in event["text"]
        metrics = await product.gateway.ask("metrics")
        assert 'harness_scheduling_events_total{kind="policy",model="demo"} 1.0' in metrics


async def test_what_held_requests_back_is_counted_by_reason(start):
    async with start() as product:
        await product.ready()
        running = [product.submit(max_tokens=60) for _ in range(4)]
        await product.until(lambda: all(answer.events for answer in running))
        waiting = product.submit(tier="free")
        await product.until(waiting.done)
        metrics = await product.gateway.ask("metrics")
        assert 'harness_holds_total{reason="slots_full",tier="free"}' in metrics


async def test_fr_081_a_snapshot_names_no_tenant_and_repeats_no_prompt(start):
    """FR-081: also when an engine dies of a request."""
    async with start() as product:
        await product.ready()
        caller = Caller("2", "globex", "8", "vip", (), 1, "spare")
        fine = product.submit()
        fatal = product.submit(
            caller=caller, messages=({"role": "user", "content": "my secret plan"},), simulate={"crash_at": 1}
        )
        await product.until(lambda: fine.done() and fatal.done())
        shown = msgspec.json.encode(product.runtime._telemetry.snapshot()).decode()
        assert "The engine crashed" in shown
        for word in ("acme", "globex", "spare", "secret", fine.request.id, fatal.request.id):
            assert word not in shown, word
