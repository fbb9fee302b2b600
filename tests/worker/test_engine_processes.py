"""No engine process outlives its scheduler."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil
import pytest

from scheduler import engine_processes


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_process_that_was_written_down_is_ended_and_forgotten(tmp_path, sleeper):
    engine_processes.record(tmp_path, "scheduler", [sleeper.pid])
    assert engine_processes.kill_stale(tmp_path, "scheduler") == [sleeper.pid]
    assert not psutil.pid_exists(sleeper.pid) or sleeper.wait(5) is not None
    assert engine_processes.kill_stale(tmp_path) == []


def test_a_process_that_got_the_pid_of_an_old_one_is_left_alone(tmp_path, sleeper):
    engine_processes.record(tmp_path, "scheduler", [sleeper.pid])
    path = tmp_path / engine_processes.FILE
    records = json.loads(path.read_text())
    records["scheduler"][0]["started"] -= 60
    path.write_text(json.dumps(records))
    assert engine_processes.kill_stale(tmp_path) == []
    assert sleeper.poll() is None


def test_each_scheduler_ends_its_own_only(tmp_path, sleeper):
    engine_processes.record(tmp_path, "a", [sleeper.pid])
    assert engine_processes.kill_stale(tmp_path, "b") == []
    assert sleeper.poll() is None
    assert engine_processes.kill_stale(tmp_path) == [sleeper.pid]


def test_pids_that_are_gone_are_not_written_down(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    engine_processes.record(tmp_path, "scheduler", [gone.pid])
    assert engine_processes.kill_stale(tmp_path) == []


def test_a_record_that_cannot_be_read_names_nobody(tmp_path):
    (tmp_path / engine_processes.FILE).write_text("{")
    assert engine_processes.kill_stale(tmp_path) == []


def test_children_are_found_however_deep(sleeper):
    assert sleeper.pid in engine_processes.children()
    assert psutil.Process().pid not in engine_processes.children()
