"""`harness up` was killed and is started again at once, while what it had started has not ended yet."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness_web import leftovers
from scheduler.engine_processes import identify
from tests.faults.patient import installed, wait_for

pytestmark = pytest.mark.journey


def test_up_that_was_killed_starts_again_as_soon_as_its_children_have_ended() -> None:
    """It neither gives up because of a port in use, nor kills what ends in time. One child takes as long as we like."""
    with (
        installed() as patient,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0) as late,
    ):
        patient.start()
        patient.be_whole()
        record = patient.data_dir / "run" / leftovers.FILE
        children = json.loads(record.read_text())
        assert {"scheduler", "web-1", "web-2", "tasks", "beat"} == children.keys()
        record.write_text(json.dumps({**children, "late": identify(late.pid)}))
        patient.kill("up")
        wait_for(lambda: "of the last run to end" in patient.output)
        assert "late of the last run to end" in patient.output and late.poll() is None
        late.communicate(b"\n")
        assert late.returncode == 0
        patient.be_whole()
        assert patient.starts == 2
        assert patient.stop() == 0
