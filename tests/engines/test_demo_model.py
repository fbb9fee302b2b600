"""The demo model: prepared once, from a verified source, never half; and it speaks English."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from scheduler import demo_model
from scheduler.clock import RealClock
from scheduler.demo_model import DemoModelError, is_prepared, prepare
from scheduler.engines import create_engine
from scheduler.engines.base import ChatPrompt, Delta, EngineDeadError, EngineRequest, Finished, FinishReason, Sampling
from tests.engines.contract import StepLog
from tests.engines.third_party import VLLM_WARNINGS

Convert = Callable[[Path, Path, Callable[[str], None]], None]


def converts(source: Path, scratch: Path, progress: Callable[[str], None]) -> None:
    """Stands in for the conversion: quick, and of the same shape."""
    (scratch / "config.json").write_text("{}")
    (scratch / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was reported, with the conversion replaced."""
    monkeypatch.setattr(demo_model, "_convert_in_child", converts)
    return []


@pytest.mark.model
class TestPreparation:
    def test_the_folder_is_complete_and_described(self, tmp_path: Path, said: list[str]) -> None:
        folder = prepare(tmp_path, said.append)
        assert folder == tmp_path / "smollm2-135m-instruct"
        files = {path.name for path in folder.iterdir()}
        assert files == {"config.json", "model.safetensors", "LICENSE", "NOTICE", "manifest.json"}
        assert "Apache License" in (folder / "LICENSE").read_text()
        assert set(json.loads((folder / "manifest.json").read_text())["files"]) == files - {"manifest.json"}
        assert said[-1] == "The demo model is ready."

    def test_the_second_call_does_nothing(self, tmp_path: Path, said: list[str]) -> None:
        prepare(tmp_path, said.append)
        said.clear()
        prepare(tmp_path, said.append)
        assert said == []

    def test_an_interrupted_preparation_leaves_nothing(
        self, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(source: Path, scratch: Path, progress: Callable[[str], None]) -> None:
            (scratch / "config.json").write_text("{}")
            raise KeyboardInterrupt

        monkeypatch.setattr(demo_model, "_convert_in_child", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, said.append)
        assert not [path for path in tmp_path.iterdir() if path.is_dir()]

    def test_what_a_killed_preparation_left_is_cleared(self, tmp_path: Path, said: list[str]) -> None:
        leftover = tmp_path / ".smollm2-135m-instruct.abc.partial"
        leftover.mkdir()
        (leftover / "model.safetensors").write_bytes(b"half")
        prepare(tmp_path, said.append)
        assert not leftover.exists()

    @pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "no manifest", "older recipe"])
    def test_a_folder_that_is_not_whole_is_made_again(self, tmp_path: Path, said: list[str], damage: str) -> None:
        folder = prepare(tmp_path, said.append)
        weights, manifest = folder / "model.safetensors", folder / "manifest.json"
        if damage == "truncated":
            weights.write_bytes(b"wei")
        elif damage == "changed":
            weights.write_bytes(b"WEIGHTS")
            os.utime(weights, ns=(1, 1))
        elif damage == "missing":
            weights.unlink()
        elif damage == "no manifest":
            manifest.unlink()
        else:
            manifest.write_text(manifest.read_text().replace('"recipe": 1', '"recipe": 0'))
        assert not is_prepared(folder)
        assert is_prepared(prepare(tmp_path, said.append))
        assert weights.read_bytes() == b"weights"

    def test_a_copied_folder_is_believed_after_a_look_at_its_bytes(self, tmp_path: Path, said: list[str]) -> None:
        folder = prepare(tmp_path, said.append)
        os.utime(folder / "model.safetensors", ns=(1, 1))
        assert is_prepared(folder)

    def test_two_at_once_make_it_once(self, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        """The second waits for the first one's lock, and then finds the folder."""
        prepare(tmp_path / "made", said.append)

        def flock(file: object, operation: int) -> None:
            if operation & fcntl.LOCK_NB:
                raise BlockingIOError
            shutil.copytree(tmp_path / "made" / demo_model.NAME, tmp_path / "shared" / demo_model.NAME)

        monkeypatch.setattr(demo_model.fcntl, "flock", flock)
        said.clear()
        prepare(tmp_path / "shared", said.append)
        assert said == ["Waiting for another process that is preparing the demo model."]

    def test_a_full_disk_is_said_so(self, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        def full(source: Path, scratch: Path, progress: Callable[[str], None]) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(demo_model, "_convert_in_child", full)
        with pytest.raises(DemoModelError, match=r"disk of .* is full: the demo model needs 400 MB"):
            prepare(tmp_path, said.append)

    def test_a_damaged_source_is_refused(
        self, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(demo_model, "GGUF_SHA256", "0" * 64)
        with pytest.raises(DemoModelError, match="is damaged or of another version"):
            prepare(tmp_path, said.append)


def test_a_missing_package_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "no-such-package-at-all")
    with pytest.raises(DemoModelError, match="make setup"):
        prepare(tmp_path, print)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file stands in the way")
    with pytest.raises(DemoModelError, match="cannot be written"):
        prepare(tmp_path / "models", print)


@pytest.mark.parametrize(
    ("returncode", "stderr", "sentence"),
    [
        (1, "Traceback …\nModuleNotFoundError: No module named 'torch'\n", "package that is missing"),
        (-9, "", "ended by signal 9"),
        (1, "Traceback …\nValueError: strange\n", "failed: ValueError: strange"),
    ],
)
def test_a_failed_conversion_is_explained(returncode: int, stderr: str, sentence: str) -> None:
    assert sentence in str(demo_model._conversion_error(returncode, stderr))


def test_preparing_does_not_need_torch() -> None:
    assert not [name for name in vars(demo_model) if name in ("torch", "transformers")]


@pytest.mark.model
@pytest.mark.vllm
@VLLM_WARNINGS
async def test_the_demo_model_answers_in_english_and_dies_cleanly(demo_model: Path, tmp_path: Path) -> None:
    """A real answer, streamed; then its engine is killed under a stream, which says so."""
    steps = StepLog()
    engine = await asyncio.to_thread(
        create_engine,
        "vllm",
        "demo",
        {"path": str(demo_model), "kv_space_gib": 0.5, "max_seqs": 4},
        clock=RealClock(),
        on_step=steps,
        data_dir=tmp_path,
    )
    try:
        limits = await engine.start()
        rendered = await engine.render(
            ChatPrompt(({"role": "user", "content": "What is the capital of France?"},)), Sampling()
        )
        sampling = Sampling(max_tokens=40, temperature=0.0)
        events = [event async for event in engine.generate(EngineRequest("paris", rendered, sampling, 0, arrival=0.0))]
        assert "The capital of France is Paris" in "".join(event.text for event in events)
        assert sum(isinstance(event, Delta) for event in events) > 3
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is FinishReason.STOP

        endless = Sampling(max_tokens=2000, temperature=0.0, ignore_eos=True)
        async with asyncio.timeout(60):
            with pytest.raises(EngineDeadError):
                async for event in engine.generate(EngineRequest("killed", rendered, endless, 0, arrival=0.0)):
                    if isinstance(event, Delta) and event.tokens == 3:
                        psutil.Process(limits.pids[0]).kill()
        with pytest.raises(EngineDeadError):
            await engine.render(ChatPrompt(({"role": "user", "content": "Anyone?"},)), Sampling())
    finally:
        await engine.aclose()
        del engine
        gc.collect()  # see third_party.py
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not [pid for pid in limits.pids if psutil.Process(pid).is_running()]
