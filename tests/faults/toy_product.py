"""A product of small processes under the real supervisor: `python -m tests.faults.toy_product FOLDER`.

Each child writes `FOLDER/<name>.pids` (one pid a line, a line per start) and behaves as its name says. The product is
ready while `FOLDER/ready` exists. Run by test_supervisor.py, in a process of its own because the supervisor takes
over signals and becomes a subreaper.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

from harness_web import leftovers
from harness_web.supervisor import Readiness, Spec, Stage, Supervisor

NOTE = (
    "import os, sys, time, signal, subprocess\n"
    "with open(sys.argv[1], 'a') as file: file.write(f'{os.getpid()}\\n')\n"
    "def stop(*_):\n"
    "    with open(os.path.join(os.path.dirname(sys.argv[1]), 'stops'), 'a') as file:\n"
    "        file.write(os.path.basename(sys.argv[1]) + '\\n')\n"
    "    sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, stop)\n"
)
WAIT = "time.sleep(600)\n"
# An engine process: in a session of its own, deaf to SIGTERM, known only by its parent.
ENGINE = (
    "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'], start_new_session=True)\n"
    "with open(sys.argv[1] + '.engine', 'a') as file: file.write(f'{child.pid}\\n')\n"
)
CHATTER = "print('one line\\nno end', end='', flush=True)\n"
# Told to (SIGUSR1), it says more than any pipe holds, and notes that it got through.
SHOUT = (
    "def shout(*_):\n"
    "    for number in range(40_000):\n"
    "        print('x' * 99)\n"
    "    open(sys.argv[1] + '.shouted', 'w').close()\n"
    "signal.signal(signal.SIGUSR1, shout)\n"
)
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def spec(folder: Path, name: str, program: str, stage: Stage, grace: float = 5.0) -> Spec:
    return Spec(name, [sys.executable, "-c", NOTE + program, str(folder / f"{name}.pids")], stage, grace)


def main(folder: Path) -> None:
    async def probe() -> Readiness:
        return Readiness((folder / "ready").exists(), "the test")

    supervisor = Supervisor(
        [
            spec(folder, "engine", ENGINE + WAIT, Stage.ENGINE),
            spec(folder, "edge", SHOUT + CHATTER + WAIT, Stage.EDGE),
            spec(folder, "broken", "sys.exit(3)\n", Stage.EDGE),
            spec(folder, "deaf", DEAF + WAIT, Stage.BACKGROUND, grace=0.3),
        ],
        probe=probe,
        ready_line="ready toy",
        stop_listening=(folder / "closed").touch,
        end_orphans=(folder / "swept").touch,
        note_children=partial(leftovers.note, folder),
    )
    asyncio.run(supervisor.run())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
