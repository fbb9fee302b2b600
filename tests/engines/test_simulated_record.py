"""The record file: what it remembers across kills, restarts, full disks and its own size limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scheduler.engines.simulated.record import Record, read_record, record_path


def record(data_dir: Path, model: str = "sim", **more: int) -> Record:
    return Record(record_path(data_dir, model), model, at=0.0, **more)


def test_tokens_of_a_killed_engine_are_those_of_its_last_whole_step(tmp_path: Path) -> None:
    log = record(tmp_path)
    log.received("cut", 1.0, 0)
    log.started("cut", 1.0, 1)
    for step in (1, 2, 3):
        log.made(["cut"], 1.0 + step, step)
        log.flush()
    with record_path(tmp_path, "sim").open("ab") as file:
        file.write(b'{"step":4,"at":5.0,"ma')
    found = read_record(tmp_path, "cut")
    assert found is not None
    assert (found["tokens"], found["ended"]) == (3, None)


def test_a_new_engine_does_not_add_to_requests_of_the_old_one(tmp_path: Path) -> None:
    old = record(tmp_path)
    old.received("old", 1.0, 0)
    old.made(["old"], 2.0, 1)
    old.flush()
    new = record(tmp_path)
    new.received("new", 3.0, 0)
    new.made(["new"], 4.0, 1)
    new.flush()
    for name in ("old", "new"):
        found = read_record(tmp_path, name)
        assert found is not None and found["tokens"] == 1


def test_a_request_that_came_twice_is_shown_as_it_last_was(tmp_path: Path) -> None:
    log = record(tmp_path)
    for tokens in (3, 1):
        log.received("again", 1.0, 0)
        for step in range(tokens):
            log.made(["again"], 1.0, step)
        log.ended("again", 2.0, tokens, "aborted")
        log.flush()
    found = read_record(tmp_path, "again")
    assert found is not None and found["tokens"] == 1


def test_a_request_is_found_whatever_its_model_is_called(tmp_path: Path) -> None:
    log = record(tmp_path, "../org/model 1")
    log.received('quo"ted', 1.0, 0)
    found = read_record(tmp_path, 'quo"ted')
    assert found is not None and found["model"] == "../org/model 1"
    assert [path.parent for path in tmp_path.rglob("*.jsonl")] == [tmp_path / "simulated"]


def test_an_unknown_request_has_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path, "nobody") is None
    record(tmp_path).received("somebody", 1.0, 0)
    assert read_record(tmp_path, "some") is None


def test_a_full_file_is_turned_over_and_open_requests_go_on(tmp_path: Path) -> None:
    log = record(tmp_path, max_bytes=2000)
    log.received("long", 1.0, 0)
    for step in range(200):
        log.made(["long"], 1.0, step)
        log.flush()
    found = read_record(tmp_path, "long")
    assert found is not None and found["tokens"] == 200
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.jsonl")]
    assert len(sizes) == 2
    assert max(sizes) < 2200


def test_a_disk_that_refuses_a_write_ends_the_record_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = record(tmp_path)

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        log.received("unlucky", 1.0, 0)
    log.made(["unlucky"], 2.0, 1)
    log.ended("unlucky", 2.0, 1, "length")
    log.flush()
    log.close()
    assert "No space left" in caplog.text
    assert read_record(tmp_path, "unlucky") is None
