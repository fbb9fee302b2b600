"""Options of a deployment as arguments of vLLM; vLLM itself is not needed for this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scheduler.engines.base import EngineStartError
from scheduler.engines.vllm_options import engine_arguments, tool_parser, wants_shaper

KNOWN = (
    *("model", "dtype", "enforce_eager", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
    *("kv_cache_memory_bytes", "scheduling_policy", "enable_prefix_caching", "use_tqdm_on_load"),
    *("tensor_parallel_size", "gpu_memory_utilization", "logging_config", "_api_process_rank"),
    *("disable_log_stats", "enable_logging_iteration_details", "enable_log_requests"),
)


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`var` in a folder of its own, with the working directory elsewhere."""
    (tmp_path / "var" / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "var"


def arguments(data_dir: Path, *, cpu: bool = True, **options: Any) -> dict[str, Any]:
    return engine_arguments({"model": "org/model", **options}, KNOWN, data_dir, cpu=cpu)


def refusal(data_dir: Path, options: dict[str, Any]) -> EngineStartError:
    with pytest.raises(EngineStartError) as refused:
        engine_arguments(options, KNOWN, data_dir, cpu=True)
    return refused.value


def test_a_cpu_gets_defaults_of_its_size(data_dir: Path) -> None:
    assert arguments(data_dir) == {
        "model": "org/model",
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 2 * 1024**3,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "enable_logging_iteration_details": True,
        "enable_log_requests": False,
    }


def test_a_gpu_keeps_what_vllm_chooses(data_dir: Path) -> None:
    assert not {"dtype", "enforce_eager", "block_size", "max_num_seqs", "kv_cache_memory_bytes"} & set(
        arguments(data_dir, cpu=False)
    )


def test_our_names_are_vllm_s_by_another_word(data_dir: Path) -> None:
    given = arguments(data_dir, max_seqs=4, step_tokens=64, kv_space_gib=0.5)
    assert (given["max_num_seqs"], given["max_num_batched_tokens"]) == (4, 64)
    assert given["kv_cache_memory_bytes"] == 512 * 1024**2


def test_any_argument_of_vllm_passes_by_its_own_name(data_dir: Path) -> None:
    given = arguments(data_dir, tensor_parallel_size=2, gpu_memory_utilization=0.8, scheduling_policy="fcfs")
    assert (given["tensor_parallel_size"], given["gpu_memory_utilization"]) == (2, 0.8)
    assert given["scheduling_policy"] == "fcfs"


@pytest.mark.parametrize(
    ("option", "meant"), [("max_seq", "max_seqs"), ("tensor_paralel_size", "tensor_parallel_size"), ("pth", "path")]
)
def test_an_unknown_option_is_refused_with_what_was_meant(data_dir: Path, option: str, meant: str) -> None:
    error = refusal(data_dir, {"model": "m", option: 1})
    assert str(error) == f"Unknown option {option!r} of the engine vllm."
    assert error.hint == f"Did you mean {meant!r}?"


def test_vllm_s_private_arguments_are_unknown(data_dir: Path) -> None:
    assert "Unknown option '_api_process_rank'" in str(refusal(data_dir, {"model": "m", "_api_process_rank": 1}))


def test_what_harness_decides_cannot_be_set(data_dir: Path) -> None:
    for option in ("disable_log_stats", "enable_log_requests", "logging_config"):
        assert "set by Harness itself" in str(refusal(data_dir, {"model": "m", option: False}))


def test_one_thing_under_two_names_is_refused(data_dir: Path) -> None:
    assert "given twice" in str(refusal(data_dir, {"model": "m", "max_seqs": 1, "max_num_seqs": 2}))


def test_a_step_shaper_is_wanted_or_not_and_is_no_argument_of_vllm(data_dir: Path) -> None:
    assert [wants_shaper(options) for options in ({}, {"step_shaper": False}, {"step_shaper": True})] == [
        False,
        False,
        True,
    ]
    assert arguments(data_dir, step_shaper=True) == arguments(data_dir)
    assert refusal(data_dir, {"model": "m", "step_shape": True}).hint == "Did you mean 'step_shaper'?"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_shaper": "yes"}, "'yes' is neither true nor false"),
        ({"step_shaper": True, "scheduler_cls": "a.b"}, "scheduler_cls of its own"),
    ],
)
def test_a_step_shaper_that_cannot_be_had_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineStartError, match=message):
        wants_shaper(options)


@pytest.mark.parametrize("value", [0, -1, "2", True, float("nan"), float("inf")])
def test_kv_space_must_be_a_size(data_dir: Path, value: Any) -> None:
    assert "kv_space_gib" in str(refusal(data_dir, {"model": "m", "kv_space_gib": value}))


@pytest.mark.parametrize("path", ["models/tiny", "var/models/tiny"])
def test_a_relative_folder_is_found_in_or_beside_the_data_directory(data_dir: Path, path: str) -> None:
    given = engine_arguments({"path": path}, KNOWN, data_dir, cpu=True)
    assert given["model"] == str(data_dir / "models" / "tiny")


def test_the_working_directory_comes_first(data_dir: Path) -> None:
    here = Path.cwd() / "models" / "tiny"
    here.mkdir(parents=True)
    assert engine_arguments({"path": "models/tiny"}, KNOWN, data_dir, cpu=True)["model"] == str(here)


def test_a_missing_folder_says_where_it_was_looked_for(data_dir: Path) -> None:
    error = refusal(data_dir, {"path": "models/nothing"})
    assert str(error) == "There is no model folder 'models/nothing'."
    assert str(data_dir / "models" / "nothing") in error.hint


def test_a_deployment_needs_a_model(data_dir: Path) -> None:
    assert "`path`" in refusal(data_dir, {}).hint
    assert "must be a folder or a name" in str(refusal(data_dir, {"path": 5}))


def test_a_tool_parser_is_one_that_vllm_has(data_dir: Path) -> None:
    known = ("hermes", "llama3_json", "mistral")
    assert tool_parser({}, known) is None
    assert tool_parser({"tool_parser": "hermes"}, known) == "hermes"
    assert "tool_parser" not in arguments(data_dir, tool_parser="hermes")
    for name, hint in (("herms", "'hermes'"), (5, "hermes, llama3_json, mistral")):
        with pytest.raises(EngineStartError, match="there is no parser") as refused:
            tool_parser({"tool_parser": name}, known)
        assert hint in refused.value.hint
