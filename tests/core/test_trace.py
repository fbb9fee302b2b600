"""The recorder of decisions: bounded, whatever happens and however long it takes."""

from __future__ import annotations

from scheduler.core.trace import TraceRecorder


def opened(recorder: TraceRecorder, id: str = "a") -> None:
    recorder.opened(id, "t1", "gold", "demo", 0.0, 1_800_000_000.0)


def events(recorder: TraceRecorder, id: str = "a") -> list[tuple[str, str]]:
    trace = recorder.find(id)
    assert trace is not None
    return [(entry.event, entry.reason) for entry in trace.entries]


def test_a_trace_tells_the_life_of_a_request_in_order() -> None:
    recorder = TraceRecorder()
    opened(recorder)
    recorder.queued("a", "gold", "short", 0.1)
    recorder.held("a", "slots_full", 0.2)
    recorder.dispatched("a", "urgent", "demo-1", 2, 0.3)
    recorder.first_token("a", 0.4)
    recorder.preempted("a", "b", 5, 0.5)
    recorder.returned("a", "preempted", 6, 0.6)
    recorder.dispatched("a", "fair_turn", "demo-2", 0, 0.7)
    recorder.ended("a", "finished", "", 9, 0.8)
    assert events(recorder) == [
        ("opened", ""),
        ("queued", "short"),
        ("held", "slots_full"),
        ("dispatched", "urgent"),
        ("first_token", ""),
        ("preempted", ""),
        ("returned", "preempted"),
        ("dispatched", "fair_turn"),
        ("ended", "finished"),
    ]


def test_equal_reasons_for_waiting_are_one_entry_with_its_rounds() -> None:
    recorder = TraceRecorder()
    opened(recorder)
    for round in range(1000):
        recorder.held("a", "slots_full" if round % 2 else "kv_full", round / 10)
    trace = recorder.find("a")
    assert trace is not None
    held = [entry for entry in trace.entries if entry.event == "held"]
    assert [(entry.reason, entry.at, entry.until, entry.rounds) for entry in held] == [
        ("kv_full", 0.0, 99.8, 500),
        ("slots_full", 0.1, 99.9, 500),
    ]


def test_a_request_that_waits_again_has_reasons_of_its_own() -> None:
    recorder = TraceRecorder()
    opened(recorder)
    recorder.held("a", "slots_full", 0.1)
    recorder.dispatched("a", "urgent", "demo-1", 0, 0.2)
    recorder.returned("a", "preempted", 3, 0.3)
    recorder.held("a", "slots_full", 0.4)
    assert events(recorder).count(("held", "slots_full")) == 2


def test_only_so_many_that_have_ended_are_kept_and_all_that_live() -> None:
    recorder = TraceRecorder(kept=3)
    opened(recorder, "lives")
    for number in range(10):
        opened(recorder, f"r{number}")
        recorder.ended(f"r{number}", "refused", "queue_full", 0, 1.0)
    assert len(recorder) == 4
    assert recorder.find("r6") is None
    assert recorder.find("r7") is not None
    assert recorder.find("lives") is not None


def test_an_id_that_comes_again_begins_anew_once_it_has_ended() -> None:
    recorder = TraceRecorder(kept=2)
    opened(recorder)
    recorder.queued("a", "gold", "short", 0.1)
    opened(recorder)  # a second one while the first lives is not its trace
    assert len(events(recorder)) == 2
    recorder.ended("a", "finished", "", 1, 0.2)
    opened(recorder)
    assert events(recorder) == [("opened", "")]


def test_what_is_said_about_a_stranger_or_after_the_end_is_left_out() -> None:
    recorder = TraceRecorder()
    recorder.held("nobody", "slots_full", 0.0)
    assert recorder.find("nobody") is None
    opened(recorder)
    recorder.ended("a", "finished", "", 1, 0.1)
    recorder.first_token("a", 0.2)
    recorder.ended("a", "failed", "engine_failed", 1, 0.3)
    assert events(recorder) == [("opened", ""), ("ended", "finished")]
