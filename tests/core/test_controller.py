from __future__ import annotations

from scheduler.core.controller import Completion, Controller, Load, wilson_upper
from scheduler.core.degradation import Ladder, LevelChange, Pressure
from tests.core.plant import TIERS

CALM = Load(step_mean=0.02, recomputes=0.0, busy=0.9, backlog=True)


def serving(most: int, tier: str = "gold") -> Controller:
    """A controller that has seen one request of the tier well served."""
    controller = Controller(most)
    controller.completed(Completion(0.0, tier, attained=True))
    return controller


def ticked(controller: Controller, load: Load, seconds: int, start: float = 0.0) -> list[str]:
    changes = [controller.tick(start + n, TIERS, load) for n in range(seconds)]
    return [change.cause for change in changes if change is not None]


def test_steps_that_take_the_whole_pace_shrink_the_batch_once_per_dwell() -> None:
    controller = serving(64)
    ticked(controller, Load(0.2, 0.0, 0.9, True), 10)
    assert controller.cap == int(int(64 * 0.85) * 0.85)


def test_misses_by_pace_shrink_the_batch_and_misses_in_the_queue_do_not() -> None:
    queued, paced = Controller(64), Controller(64)
    for n in range(30):
        queued.completed(Completion(n * 0.1, "gold", attained=n % 2 == 0))
        paced.completed(Completion(n * 0.1, "gold", attained=n % 2 == 0, missed_pace=n % 2 == 1))
    assert ticked(queued, CALM, 4, start=3.0) == []
    assert ticked(paced, CALM, 4, start=3.0) == ["tier gold misses its objective by its pace"]


def test_misses_in_the_queue_do_not_keep_a_small_batch_small() -> None:
    controller = serving(64)
    ticked(controller, Load(0.2, 0.0, 0.9, True), 1)
    small = controller.cap
    for n in range(30):
        controller.completed(Completion(n * 0.1, "gold", attained=False))
    ticked(controller, CALM, 12, start=6.0)
    assert controller.cap > small


def test_the_pace_of_tiers_that_nobody_uses_shrinks_nothing() -> None:
    assert ticked(serving(64, "bronze"), Load(0.2, 0.0, 0.9, True), 3) == []


def test_one_or_two_misses_are_no_evidence_however_strict_the_objective() -> None:
    controller = Controller(4)
    for n in range(30):
        controller.completed(Completion(n * 0.1, "gold", attained=n > 1, missed_pace=n <= 1))
    assert ticked(controller, CALM, 4, start=3.0) == []


def test_after_a_pause_the_batch_is_whole_again() -> None:
    controller = serving(64)
    ticked(controller, Load(0.2, 0.0, 0.9, True), 1)
    assert controller.cap < 64
    controller.tick(60.0, TIERS, CALM)
    assert controller.cap == 64


def test_a_few_misses_of_few_requests_are_no_evidence() -> None:
    controller = Controller(64)
    for n in range(10):
        controller.completed(Completion(n * 0.1, "gold", attained=False, missed_pace=True))
    assert ticked(controller, CALM, 3, start=1.0) == []


def test_the_batch_grows_by_one_when_all_are_served_and_some_wait() -> None:
    controller = serving(64)
    ticked(controller, Load(0.2, 0.0, 0.9, True), 1)
    small = controller.cap
    ticked(controller, CALM, 20, start=6.0)
    assert small < controller.cap <= small + 4
    assert ticked(controller, Load(0.02, 0.0, 0.9, backlog=False), 20, start=40.0) == []


def test_recomputes_of_the_engine_shrink_the_batch_until_they_end() -> None:
    controller = Controller(64)
    assert ticked(controller, Load(0.02, 1.0, 0.9, True), 1) == ["the engine takes memory back from running requests"]


def test_the_cap_never_leaves_one_to_most() -> None:
    controller = serving(3)
    ticked(controller, Load(0.2, 5.0, 0.9, True), 200)
    assert controller.cap == 1
    controller.resize(2)
    assert controller.cap <= 2


def test_a_cap_that_nothing_shrank_follows_the_engine_and_a_smaller_one_does_not() -> None:
    controller = Controller(8)
    controller.resize(4)
    controller.resize(16)
    assert controller.cap == 16
    shrunk = serving(64)
    ticked(shrunk, Load(0.2, 0.0, 0.9, True), 1)
    small = shrunk.cap
    shrunk.resize(128)
    assert shrunk.cap == small


def test_wilsons_interval_is_wide_for_few_and_narrow_for_many() -> None:
    assert wilson_upper(0, 0) == 1.0
    assert wilson_upper(5, 10) > 0.7
    assert wilson_upper(5000, 10_000) < 0.52


def climb(ladder: Ladder, pressure: Pressure, start: float, seconds: float) -> list[LevelChange]:
    changes = (ladder.update(start + n * 0.5, pressure) for n in range(int(seconds * 2)))
    return [change for change in changes if change is not None]


def test_a_level_is_entered_after_its_time_and_left_after_a_longer_one() -> None:
    ladder = Ladder()
    up = climb(ladder, Pressure(0.92, 0.0), 0.0, 5.0)
    assert [(change.before, change.after) for change in up] == [(0, 1)]
    assert up[0].at >= 2.0
    down = climb(ladder, Pressure(0.1, 0.1), 5.0, 30.0)
    assert [(change.before, change.after) for change in down] == [(1, 0)]
    assert down[0].at >= 15.0


def test_between_the_thresholds_the_level_stays() -> None:
    ladder = Ladder()
    climb(ladder, Pressure(0.92, 0.0), 0.0, 5.0)
    assert climb(ladder, Pressure(0.85, 0.0), 5.0, 60.0) == []


def test_what_was_high_before_a_pause_does_not_count_after_it() -> None:
    ladder = Ladder()
    assert ladder.update(0.0, Pressure(0.92, 0.0)) is None
    assert climb(ladder, Pressure(0.97, 0.0), 60.0, 0.9) == []
    assert [change.at for change in climb(ladder, Pressure(0.97, 0.0), 61.0, 1.0)] == [61.0]


def test_what_was_low_before_a_pause_does_not_count_after_it() -> None:
    ladder = Ladder()
    climb(ladder, Pressure(0.92, 0.0), 0.0, 5.0)
    climb(ladder, Pressure(0.1, 0.0), 5.0, 5.0)
    assert [change.at for change in climb(ladder, Pressure(0.1, 0.0), 100.0, 15.0)] == [110.0]


def test_memory_beyond_the_pool_jumps_to_level_three() -> None:
    ladder = Ladder()
    change = ladder.update(0.0, Pressure(1.2, 0.0))
    assert change is not None
    assert (change.before, change.after) == (0, 3)


def test_a_failed_engine_is_level_four_until_it_has_been_well_for_a_minute() -> None:
    ladder = Ladder()
    assert ladder.engine_failed(0.0, "out of memory") is not None
    assert climb(ladder, Pressure(0.0, 0.0), 0.0, 30.0) == []
    ladder.engine_recovered(30.0)
    assert ladder.update(80.0, Pressure(0.0, 0.0)) is None
    change = ladder.update(91.0, Pressure(0.0, 0.0))
    assert change is not None
    assert (change.before, change.after) == (4, 0)
