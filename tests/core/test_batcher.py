from __future__ import annotations

import math

from scheduler.core.batcher import Batcher
from scheduler.core.types import PoolCapacity, Request, TierSpec

CAPACITY = PoolCapacity(max_seqs=8, step_tokens=64, kv_tokens=1024, block_size=16, max_model_len=512)
TIERS = {"gold": TierSpec("gold", 1, tpot=0.1), "bronze": TierSpec("bronze", 2, tpot=0.5)}


def request(id: str, tier: str) -> Request:
    return Request(id, "acme", tier, 0.0, 10, 100, True, deadline=5.0, queue_deadline=60.0)


def test_the_next_stream_to_fall_behind_is_known_after_every_change() -> None:
    batcher = Batcher(CAPACITY, None)
    batcher.enter(request("a", "gold"), 0.0)
    assert batcher.next_behind(TIERS) == math.inf  # it has not begun
    batcher.progress("a", 1, 1.0)
    assert batcher.next_behind(TIERS) == 1.0 + 0.1
    batcher.progress("a", 9, 1.2)
    assert batcher.next_behind(TIERS) == 1.0 + 9 * 0.1
    batcher.enter(request("b", "bronze"), 1.2)
    batcher.progress("b", 1, 1.3)
    assert batcher.next_behind(TIERS) == 1.3 + 0.5
    batcher.resize(CAPACITY, None)
    slower = TIERS | {"bronze": TierSpec("bronze", 2, tpot=0.7)}
    assert batcher.next_behind(slower) == 1.0 + 9 * 0.1
    batcher.leave("a")
    assert batcher.next_behind(slower) == 1.3 + 0.7


def test_what_entered_since_the_last_forecast_counts_in_the_next() -> None:
    batcher = Batcher(CAPACITY, None)

    def lengths(request: Request, produced: int) -> int:
        return request.max_tokens

    def share(blocks: int) -> float:
        return blocks / CAPACITY.total_blocks

    batcher.enter(request("a", "gold"), 0.0)
    assert batcher.peak_share(lengths) == share(1 + 7)
    batcher.enter(request("b", "gold"), 0.0)
    assert batcher.peak_share(lengths) == share(2 * (1 + 7))
    batcher.progress("b", 90, 1.0)
    assert batcher.peak_share(lengths) == share(1 + 7 + 2)  # when b ends, both have grown by its last ten tokens
    batcher.leave("a")
    assert batcher.peak_share(lengths) == share(7 + 1)
