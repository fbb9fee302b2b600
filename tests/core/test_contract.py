"""What a tier promises, and what a request may ask of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.core.types import Contract, TierSpec

TIER = TierSpec("paid", 2, ttft=2.0, e2e=3.0, tpot=0.15)
TOTAL = replace(TIER, contract=Contract.E2E_TOTAL)


@pytest.mark.parametrize(
    ("tier", "stream", "asked", "counts"),
    [
        (TIER, True, 1.0, 2.0),  # no tighter than the tier's own deadline,
        (TIER, False, 1.0, 3.0),
        (TOTAL, True, 1.0, 3.0),
        (TIER, True, 9.0, 9.0),  # and as loose as it likes
        (replace(TIER, min_slo_threshold=0.5), True, 1.0, 1.0),
        (replace(TIER, min_slo_threshold=0.5), False, 0.1, 0.5),
        (replace(TIER, min_slo_threshold=60.0), True, 5.0, 5.0),  # what is looser than the tier's is never tightened
        (replace(TIER, min_slo_threshold=60.0), True, 1.0, 2.0),
    ],
)
def test_a_looser_deadline_always_counts_and_a_tighter_one_to_the_tiers_limit(
    tier: TierSpec, stream: bool, asked: float, counts: float
) -> None:
    assert tier.slo_threshold(stream, asked) == counts
