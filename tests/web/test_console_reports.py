"""One view over all schedulers, and the sentence that is read first."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from django.utils import translation

from harness_web.console.live import POINTS, Board
from harness_web.console.reports import TierMeta, merge, parse
from harness_web.console.sentence import sentence

GOLD, SILVER = TierMeta(rank=1, objective=0.99, ttft=0.5), TierMeta(rank=2, objective=0.95, ttft=2.0)
META = {"gold": GOLD, "silver": SILVER}


def report(name: str = "a", **changes: Any) -> dict[str, Any]:
    engine = {"model": "demo", "replica": 0, "state": "ready", "kv_usage": 0.5, "busy": 0.8}
    return {"scheduler": name, "policy": "priority", "policy_version": 1, "tiers": {}, "engines": [engine], **changes}


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def board(time: Time) -> Board:
    made = Board(clock=time, wall=time)
    made.meta = META
    return made


def test_tiers_come_in_the_order_of_their_rank_whatever_their_names() -> None:
    tiers = {"silver": {}, "unknown": {}, "gold": {}}
    view = merge([parse(report(tiers=tiers))], META)
    assert [(tier.name, tier.index) for tier in view.tiers] == [("gold", 0), ("silver", 1), ("unknown", 2)]


def test_counts_of_several_schedulers_add_up_and_the_worst_wait_is_kept() -> None:
    one = parse(report("a", tiers={"gold": {"waiting": 2, "oldest_wait": 0.5, "attained": 9, "judged": 10}}))
    two = parse(report("b", tiers={"gold": {"waiting": 3, "oldest_wait": 1.5, "attained": 1, "judged": 10}}))
    gold = merge([one, two], META).tiers[0]
    assert (gold.waiting, gold.oldest_wait, gold.attained, gold.judged) == (5, 1.5, 10, 20)
    assert gold.attainment == pytest.approx(0.5)


def test_attainment_without_judged_requests_is_unknown_and_not_a_number() -> None:
    view = merge([parse(report(tiers={"gold": {}}))], META)
    assert view.tiers[0].attainment is None
    assert view.totals.attainment is None


def test_kv_is_the_fullest_engine_and_busy_the_mean_of_ready_ones() -> None:
    engines = [
        {"model": "x", "state": "ready", "kv_usage": 0.2, "busy": 0.4},
        {"model": "y", "state": "ready", "kv_usage": 0.9, "busy": 0.8},
        {"model": "z", "state": "starting"},
    ]
    totals = merge([parse(report(engines=engines))], META).totals
    assert (totals.kv, totals.kv_model, totals.engines_ready, totals.engines) == (0.9, "y", 2, 3)
    assert totals.busy == pytest.approx(0.6)


def test_gpu_utilisation_is_unknown_without_a_gpu() -> None:
    assert merge([parse(report())], META).totals.gpu is None


def test_a_report_of_a_newer_scheduler_is_understood() -> None:
    assert parse(report(something_new={"a": 1})).scheduler == "a"


def test_nonsense_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        parse(report(tiers={"gold": {"waiting": "many"}}))


def test_before_any_scheduler_the_page_says_so(board: Board) -> None:
    view = board.view()
    assert (view.connected, view.age) == (False, None)
    assert sentence(view).text == "No scheduler is connected."


def test_a_silent_scheduler_leaves_the_sums_and_is_named(board: Board, time: Time) -> None:
    board.receive(report("a", tiers={"gold": {"waiting": 2}}))
    time.now += 10
    board.receive(report("b", tiers={"gold": {"waiting": 5}}))
    view = board.view()
    assert (view.totals.waiting, view.reporting, view.schedulers, view.silent) == (5, 1, 2, ["a"])
    assert sentence(view).text == "1 of 2 schedulers report; silent: a."


def test_when_all_are_silent_the_last_numbers_are_shown_as_the_past(board: Board, time: Time) -> None:
    board.receive(report("a", tiers={"gold": {"waiting": 2}}))
    time.now += 12
    view = board.view()
    assert (view.connected, view.age, view.totals.waiting) == (False, 12.0, 2)
    said = sentence(view)
    assert (said.level, said.text) == ("error", "The scheduler is not connected. Last numbers are 12 s old.")


def test_a_silent_second_is_a_gap_and_not_a_zero(board: Board, time: Time) -> None:
    board.receive(report("a", tiers={"gold": {"waiting": 2}}))
    assert board.tick()["point"]["tiers"]["gold"]["waiting"] == 2
    time.now += 10
    point = board.tick()["point"]
    assert (point["tiers"], point["totals"]) == ({}, {})


def test_frames_are_numbered_without_a_gap(board: Board) -> None:
    assert [board.tick()["seq"] for _ in range(3)] == [1, 2, 3]
    assert board.snapshot()["seq"] == 3


def test_a_client_that_followed_gets_only_what_it_missed(board: Board) -> None:
    for _ in range(5):
        board.tick()
    answer = board.snapshot(board.stream, after=3)
    assert answer["resumed"]
    assert [point["seq"] for point in answer["points"]] == [4, 5]


@pytest.mark.parametrize(("stream", "after"), [("another", 3), (None, None), ("own", 99)])
def test_a_client_of_another_stream_gets_everything(board: Board, stream: str | None, after: int | None) -> None:
    for _ in range(5):
        board.tick()
    answer = board.snapshot(board.stream if stream == "own" else stream, after)
    assert not answer["resumed"]
    assert len(answer["points"]) == 5


def test_history_is_bounded(board: Board) -> None:
    for _ in range(POINTS + 7):
        board.tick()
    assert len(board.points()) == POINTS
    assert board.points()[0]["seq"] == 8


def test_schedulers_that_left_long_ago_are_forgotten_but_never_the_last(board: Board, time: Time) -> None:
    board.receive(report("a"))
    time.now += 1
    board.receive(report("b"))
    time.now += 1000
    board.forget_silent(older_than=600)
    assert board.view().silent == ["b"]


TIER = {"judged": 100, "attained": 100}


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    [
        ({"tiers": {"gold": TIER, "silver": TIER}}, "ok", "2 tiers had requests in the last minute and all meet"),
        (
            {"tiers": {"gold": TIER | {"attained": 98}, "silver": TIER}},
            "error",
            "1 of 2 tiers is missing its target: gold",
        ),
        ({"tiers": {"gold": {}}}, "ok", "Ready, and no requests in the last minute."),
        ({"tiers": {"gold": {"running": 1}}}, "ok", "Requests are running"),
        ({"engines": []}, "warning", "No model is deployed."),
        ({"engines": [{"model": "m", "state": "starting"}]}, "warning", "No engine is ready yet: m (starting)."),
        ({"engines": [{"model": "m", "state": "failed", "hint": "Free memory."}]}, "error", "1 of 1 engine failed: m."),
        ({"degradation_level": 2}, "warning", "Degradation level 2 is active."),
    ],
)
def test_the_worst_true_thing_is_said(board: Board, changes: dict[str, Any], level: str, text: str) -> None:
    board.receive(report(**changes))
    said = sentence(board.view())
    assert said.level == level
    assert said.text.startswith(text)


def test_the_sentence_is_in_the_readers_language(board: Board) -> None:
    with translation.override("zh-hans"):
        assert sentence(board.view()).text == "没有已连接的调度器。"
