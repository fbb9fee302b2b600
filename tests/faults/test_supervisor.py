"""The supervisor under faults, with toy children: what dies comes back, what is left behind is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness_web import leftovers
from harness_web.supervisor import CALM, MAX_BACKOFF, Child, Spec, Stage, restart_delay
from tests.faults.conftest import alive

Eventually = Callable[[Callable[[], Any]], Any]


class Toy:
    """A running toy product and what it wrote down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.toy_product", str(folder)], stdout=subprocess.PIPE, text=True
        )

    def pids(self, name: str) -> list[int]:
        file = self.folder / name
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def everything(self) -> list[int]:
        return [pid for file in self.folder.glob("*.pids*") for pid in self.pids(file.name)]

    def be_ready(self) -> None:
        (self.folder / "ready").touch()

    def output_until(self, words: str) -> str:
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if words in line:
                return seen
        raise AssertionError(f"never said {words!r}:\n{seen}")

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        output, _ = self.process.communicate(timeout=20)
        return output


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Toy]:
    toy = Toy(tmp_path)
    yield toy
    if toy.process.poll() is None:
        toy.stop()
    assert toy.process.stdout is not None
    toy.process.stdout.close()


@pytest.fixture
def ready_toy(toy: Toy, eventually: Eventually) -> Toy:
    toy.be_ready()
    toy.output_until("ready toy")
    eventually(lambda: toy.pids("deaf.pids") and toy.pids("engine.pids.engine") and toy.pids("edge.pids"))
    return toy


def test_a_killed_child_is_back_and_its_engine_process_is_gone(ready_toy: Toy, eventually: Eventually) -> None:
    first, engine = ready_toy.pids("engine.pids")[0], ready_toy.pids("engine.pids.engine")[0]
    os.kill(first, signal.SIGKILL)
    eventually(lambda: len(ready_toy.pids("engine.pids")) == 2)
    eventually(lambda: not alive(engine))
    assert alive(ready_toy.pids("engine.pids")[1])


def test_stopping_goes_in_order_and_leaves_nothing_behind(ready_toy: Toy) -> None:
    output = ready_toy.stop()
    assert ready_toy.process.returncode == 0
    assert [pid for pid in ready_toy.everything() if alive(pid)] == []
    assert (ready_toy.folder / "stops").read_text().split() == ["edge.pids", "engine.pids"]
    assert "deaf did not stop in 0 s; killing it" in output
    assert (ready_toy.folder / "closed").exists()
    assert (ready_toy.folder / "swept").exists()


def test_a_second_signal_stops_at_once(ready_toy: Toy, eventually: Eventually) -> None:
    os.kill(ready_toy.pids("edge.pids")[0], signal.SIGSTOP)  # it cannot even hear SIGTERM
    ready_toy.process.send_signal(signal.SIGINT)
    ready_toy.output_until("stopping edge")
    ready_toy.process.send_signal(signal.SIGINT)
    ready_toy.process.communicate(timeout=4)  # less than the grace of a child
    assert [pid for pid in ready_toy.everything() if alive(pid)] == []


def test_children_end_when_the_supervisor_is_killed_and_the_next_one_sees_to_it(ready_toy: Toy) -> None:
    """Those that were told to end and do so are waited for; the deaf one is killed."""
    said: list[str] = []
    ready_toy.process.kill()
    ready_toy.process.wait()
    leftovers.wait_for_end(ready_toy.folder, said.append, patience=1.0)
    children = [pid for name in ("edge", "engine", "deaf") for pid in ready_toy.pids(f"{name}.pids")]
    assert [pid for pid in children if alive(pid)] == []
    assert set((ready_toy.folder / "stops").read_text().split()) == {"edge.pids", "engine.pids"}
    assert said[-1] == "killing deaf: not ended within 1 s"
    for pid in ready_toy.pids("engine.pids.engine"):  # deaf by design, and no child of the supervisor
        os.kill(pid, signal.SIGKILL)


def test_after_an_orderly_stop_nobody_is_waited_for(ready_toy: Toy) -> None:
    ready_toy.stop()
    said: list[str] = []
    leftovers.wait_for_end(ready_toy.folder, said.append)
    assert said == []


def test_a_process_that_got_the_pid_of_a_child_is_neither_waited_for_nor_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0) as stranger:
        leftovers.note(tmp_path, {"edge": stranger.pid})
        path = tmp_path / leftovers.FILE
        noted = json.loads(path.read_text())
        noted["edge"]["started"] -= 60
        path.write_text(json.dumps(noted))
        leftovers.wait_for_end(tmp_path, lambda _: None, patience=0.0)
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_record_of_nobody_is_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / leftovers.FILE).write_text(content)
    said: list[str] = []
    leftovers.wait_for_end(tmp_path, said.append)
    assert said == []


def test_logs_are_whole_lines_with_the_name_in_front(toy: Toy) -> None:
    assert "edge       | one line\n" in toy.output_until("one line")
    assert "edge       | no end\n" in toy.stop()


def test_a_stopped_supervisor_stops_no_child(ready_toy: Toy, eventually: Eventually) -> None:
    ready_toy.process.send_signal(signal.SIGSTOP)  # as Ctrl-Z does
    try:
        os.kill(ready_toy.pids("edge.pids")[0], signal.SIGUSR1)
        eventually((ready_toy.folder / "edge.pids.shouted").exists)
    finally:
        ready_toy.process.send_signal(signal.SIGCONT)
    assert f"edge       | {'x' * 99}\n" in ready_toy.stop()


def test_background_children_wait_for_the_first_answer(toy: Toy, eventually: Eventually) -> None:
    eventually(lambda: toy.pids("edge.pids"))
    assert toy.pids("deaf.pids") == []
    toy.be_ready()
    eventually(lambda: toy.pids("deaf.pids"))


def a_child() -> Child:
    return Child(Spec("child", ["true"], Stage.EDGE))


def test_what_had_been_ready_restarts_at_once_and_then_after_a_second() -> None:
    child = a_child()
    child.was_ready = True
    assert restart_delay(child, now=100.0) == 0.0
    assert restart_delay(child, now=101.0) == 1.0
    assert restart_delay(child, now=102.0) == 1.0
    assert restart_delay(child, now=102.0 + CALM) == 0.0


def test_what_never_was_ready_backs_off_up_to_a_bound() -> None:
    child = a_child()
    delays = [restart_delay(child, now=float(second)) for second in range(8)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_BACKOFF, MAX_BACKOFF, MAX_BACKOFF]
