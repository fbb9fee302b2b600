"""From an empty data directory to answers, through faults, to nothing left behind: the product from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.journey.product import Product, alive, free_port, refusal

pytestmark = pytest.mark.journey

Eventually = Callable[..., Any]
READY_TIMEOUT = 60.0  # how long a test waits for the ready line; how long it takes is `benchmarks/`'s to say
BACK_WITHIN = 30.0  # seconds after the scheduler was killed


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    product = Product(["--engine", "simulated"])
    try:
        product.wait_for("ready ", READY_TIMEOUT)
        yield product
    finally:
        product.close()


def ask(product: Product, text: str = "say three words", **options: Any) -> str:
    answer = product.client().chat.completions.create(
        model="demo", messages=[{"role": "user", "content": text}], max_tokens=3, **options
    )
    return answer.choices[0].message.content or ""


def test_it_says_when_and_where_it_is_ready(product: Product) -> None:
    ready = [line for line in product.output.splitlines() if line.startswith("ready ")]
    assert ready == [f"ready {product.url}"]


def test_the_first_request_succeeds(product: Product) -> None:
    assert ask(product).split() == ["w0", "w1", "w2"]


def test_an_answer_streams(product: Product) -> None:
    stream = product.client("initech").chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "go"}],
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.split() == ["w0", "w1", "w2", "w3"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


def test_secrets_are_for_their_owner_only(product: Product) -> None:
    assert (product.data_dir / "seed-secrets.json").stat().st_mode & 0o777 == 0o600
    assert product.key("acme") in product.output


def test_the_first_operator_is_invited_by_a_link_that_works(product: Product) -> None:
    link = next(word for word in product.output.split() if "/setup/" in word)
    assert httpx.get(link, trust_env=False).status_code == 200


def test_no_process_has_torch_loaded(product: Product) -> None:
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in product.note_processes()]
    assert maps
    assert [text for text in maps if "libtorch" in text] == []


def test_background_tasks_run(product: Product, eventually: Eventually) -> None:
    """From beat through the broker to the worker to the database."""

    def beaten() -> bool:
        with contextlib.closing(sqlite3.connect(product.data_dir / "harness.sqlite3", timeout=10)) as database:
            query = "SELECT count(*) FROM tenants_processheartbeat WHERE kind = 'tasks'"
            return bool(database.execute(query).fetchone()[0])

    eventually(beaten, patience=60)


def test_a_client_that_leaves_frees_its_slot_within_a_step(product: Product, eventually: Eventually) -> None:
    """Asserted from the engine's own record."""
    stream = product.client().chat.completions.with_raw_response.create(
        model="demo",
        messages=[{"role": "user", "content": "go"}],
        max_tokens=4000,
        stream=True,
        extra_body={"simulate": {"tokens": 4000, "pace": 0.05}},
    )
    request_id = stream.headers["x-request-id"]
    answer = stream.parse()
    next(iter(answer))
    left_at = time.monotonic()
    answer.close()
    stream.http_response.close()
    admin = {"Authorization": f"Bearer {product.key('acme', 'ops')}"}

    def record() -> dict[str, Any] | None:
        url = f"{product.url}/api/v1/simulated/requests/{request_id}"
        body: dict[str, Any] = httpx.get(url, headers=admin, trust_env=False).raise_for_status().json()
        return body if body["ended"] is not None else None

    ended = eventually(record)
    assert ended["ended_step"] - ended["aborted_step"] <= 1
    assert time.monotonic() - left_at < 5.0


def test_a_second_start_on_the_same_data_is_refused(product: Product) -> None:
    said = refusal(product.data_dir, "--port", str(free_port()), "--engine", "simulated")
    assert said.splitlines() == [
        f"harness: Harness already runs on {product.data_dir} (process {product.process.pid}): "
        "stop it first, or choose another --data-dir."
    ]


def test_a_killed_scheduler_comes_back_by_itself(product: Product, eventually: Eventually) -> None:
    killed = product.pid_of("scheduler")
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: product.pid_of("scheduler") not in (None, killed))

    def answers() -> bool:
        try:
            return ask(product).split() == ["w0", "w1", "w2"]
        except openai.APIStatusError as error:
            assert error.status_code == 503
            return False

    eventually(answers, patience=BACK_WITHIN)


def test_a_killed_web_process_comes_back_by_itself(product: Product, eventually: Eventually) -> None:
    """The listening socket is the supervisor's: connections wait instead of being refused."""
    killed = product.pid_of("web-1")
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    assert ask(product).split() == ["w0", "w1", "w2"]


def test_ctrl_c_leaves_nothing_behind(product: Product) -> None:
    """Last in this file: the module's product is gone after it."""
    assert product.stop() == 0
    assert [pid for pid in product.seen if alive(pid)] == []
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", product.port))


# --- where it cannot start ------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(tmp_path, "--port", str(port), "--engine", "simulated")
    assert said == f"harness: Port {port} on 127.0.0.1 is in use by another program: choose another with --port.\n"


def test_a_data_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    said = refusal(file / "data", "--engine", "simulated")
    assert said.splitlines() == [
        f"harness: The data directory {file / 'data'} cannot be used (Not a directory). "
        "Choose a writable one with --data-dir or HARNESS_DATA_DIR."
    ]


def test_an_unknown_engine_is_one_sentence(tmp_path: Path) -> None:
    said = refusal(tmp_path, "--port", str(free_port()), "--engine", "steam")
    assert said == "harness: There is no engine 'steam'; choose one of: simulated, vllm.\n"


def test_an_unknown_policy_is_named(tmp_path: Path) -> None:
    said = refusal(tmp_path, "--port", str(free_port()), "--engine", "simulated", "--policy", "guesswork")
    assert "guesswork" in said
    assert len(said.splitlines()) == 1


# --- the real engine ------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.model
def test_the_real_model_answers_and_its_engine_dies_with_its_scheduler(eventually: Eventually) -> None:
    product = Product(["--engine", "vllm"])
    try:
        product.wait_for("ready ", 300)
        question = "What is the capital of France? Answer in one short sentence."
        answer = product.client().chat.completions.create(
            model="demo", messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0
        )
        assert "Paris" in (answer.choices[0].message.content or "")

        scheduler = product.pid_of("scheduler")
        engine = [pid for pid in product.note_processes() if alive(pid) and is_engine(pid)]
        assert scheduler is not None
        assert engine
        os.kill(scheduler, signal.SIGKILL)
        eventually(lambda: not any(alive(pid) for pid in engine))

        def is_ready() -> bool:
            return httpx.get(f"{product.url}/readyz", trust_env=False, timeout=10).status_code == 200

        eventually(is_ready, patience=150)
        stream = product.client("globex").chat.completions.create(
            model="demo", messages=[{"role": "user", "content": question}], max_tokens=24, temperature=0, stream=True
        )
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert product.stop() == 0
        assert [pid for pid in product.seen if alive(pid)] == []
    finally:
        product.close()


def is_engine(pid: int) -> bool:
    """vLLM's processes name themselves."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/comm").read_bytes()
    return b"EngineCore" in command or b"VLLM::" in command
