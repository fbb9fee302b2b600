"""Whether a contract was kept."""

from __future__ import annotations

import pytest

from scheduler.core.types import Contract, Reason, TierSpec
from scheduler.worker.attainment import judge_cancelled, miss

from .test_books import flight

TIER = TierSpec("vip", 1, ttft=0.5, e2e=1.0, tpot=0.1)


def ran(first: float | None, last: float | None, tokens: int, *, stream: bool = True, tier: TierSpec = TIER, slo=None):
    one = flight()
    one.submit.stream = stream
    one.tier, one.slo, one.deadline = tier, slo, 0.5
    one.tokens, one.made, one.first_token, one.last_token = tokens, {0: tokens}, first, last
    return one


@pytest.mark.parametrize(
    ("one", "missed"),
    [
        (ran(0.5, 0.5, 1), ""),
        (ran(0.51, 0.51, 1), "ttft"),
        (ran(0.5, 1.5, 11), ""),  # mean of 0.1 s a token
        (ran(0.5, 1.6, 11), "tpot"),
        (ran(0.9, 1.0, 2, slo=1.0), ""),
        (ran(0.1, 1.9, 10, stream=False), ""),  # 1.0 + 9 x 0.1
        (ran(0.1, 1.91, 10, stream=False), "e2e"),
        (ran(0.1, 1.5, 10, stream=False, slo=1.4), "e2e"),
    ],
)
def test_streams_are_held_to_first_token_and_pace_others_to_the_last_token(one, missed):
    assert miss(one, 2.0) == missed


def test_a_total_contract_looks_at_the_last_token_only():
    tier = TierSpec("batch", 1, ttft=0.1, e2e=2.0, contract=Contract.E2E_TOTAL)
    assert miss(ran(1.9, 2.0, 50, tier=tier), 2.0) == ""
    assert miss(ran(0.1, 2.1, 50, tier=tier), 2.1) == "e2e"


def test_a_caller_who_leaves_before_the_deadline_leaves_the_denominator():
    assert judge_cancelled(ran(None, None, 0), 0.5) == (None, "")
    assert judge_cancelled(ran(None, None, 0), 0.51) == (False, Reason.CLIENT_GONE)


def test_a_stream_that_had_begun_is_judged_by_what_it_delivered():
    assert judge_cancelled(ran(0.4, 0.45, 2), 10.0) == (True, "")
    assert judge_cancelled(ran(0.6, 0.65, 2), 10.0) == (False, "ttft")
