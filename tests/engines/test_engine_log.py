"""The log of an engine's own processes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from scheduler.engines.engine_log import EngineLog, EngineLogHandler

CHILD = """
import json, logging.config, sys
logging.config.dictConfig(json.load(open(sys.argv[1])))
logging.getLogger("engine").info("too small to keep")
logging.getLogger("engine").warning("a warning")
print("from the child's stdout", flush=True)
raise SystemExit("the reason it failed")
"""


def test_what_a_child_says_and_dies_of_is_in_the_log_and_not_on_the_terminal(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "run", "org/model one")
    log.open("engine")
    child = subprocess.run([sys.executable, "-c", CHILD, str(log.configuration)], capture_output=True, text=True)
    assert (child.stdout, child.stderr) == ("", "")
    text = log.text()
    assert "a warning" in text
    assert "from the child's stdout" in text
    assert "the reason it failed" in text
    assert "too small to keep" not in text


def test_this_process_keeps_its_own_output(tmp_path: Path) -> None:
    log = EngineLog(tmp_path, "m")
    log.open("engine-log-test")
    configuration = json.loads(log.configuration.read_text())
    owner = configuration["handlers"]["file"]["owner"]
    handler = EngineLogHandler(str(log.path), owner)
    try:
        handler.emit(logging.LogRecord("x", logging.WARNING, "", 0, "kept in the file", (), None))
    finally:
        handler.close()
    assert "kept in the file" in log.text()


def test_each_start_has_a_log_of_its_own(tmp_path: Path) -> None:
    log = EngineLog(tmp_path, "../../etc/passwd")
    assert log.path.parent == tmp_path
    log.open("engine")
    log.path.write_text("an old failure")
    log.open("engine")
    assert log.text() == ""
