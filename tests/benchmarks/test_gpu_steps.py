"""The measurement of steps on a GPU, with a tiny model on the CPU: what it computes, not how long it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks.gpu_model import SHAPES, TEMPERATURE, TOP_P, Case, Model, prefill_attention
from benchmarks.gpu_steps import NAMES, cases, check_attention, fit, measure, work
from scheduler.simulator.profiles import PROFILES

AGAINST_PLAIN_ATTENTION = """
import torch
from benchmarks.gpu_attention import decode_attention
from benchmarks.gpu_model import prefill_attention
torch.manual_seed(1)
for sequences, context, programs in ((3, 1000, 64), (2, 256, 1), (1, 700, 100)):
    q = torch.randn(sequences, 8, 32)
    k, v = torch.randn(2, sequences, context + 5, 2, 32)[:, :, :context]
    torch.testing.assert_close(decode_attention(q, k, v, programs), prefill_attention(q.unsqueeze(1), k, v).squeeze(1))
"""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(1)
    return Model(SHAPES["tiny"], "cpu", 3000)


def test_a_run_gives_every_step_its_samples_and_every_coefficient_a_value() -> None:
    results = measure("tiny", "cpu", repeats=2, rounds=2)
    assert [len(step["samples"]) for step in results["steps"]] == [4] * len(cases("tiny"))
    assert all(step["seconds"] > 0 for step in results["steps"])
    assert list(results["coefficients"]) == list(NAMES)
    assert min(results["coefficients"].values()) >= 0


def test_a_step_answers_a_token_for_each_decode_and_each_prompt(model: Model) -> None:
    for case in cases("tiny"):
        tokens = model.step(case)()
        assert len(tokens) == case.decodes + case.prompts
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < model.shape.vocabulary


def test_a_prompt_in_two_chunks_attends_as_in_one() -> None:
    q, k, v = torch.randn(2, 24, 4, 16), torch.randn(2, 24, 2, 16), torch.randn(2, 24, 2, 16)
    whole = prefill_attention(q, k, v)
    torch.testing.assert_close(prefill_attention(q[:, :10], k[:, :10], v[:, :10]), whole[:, :10])
    torch.testing.assert_close(prefill_attention(q[:, 10:], k, v), whole[:, 10:])


def test_attention_in_bfloat16_is_that_in_float32(model: Model) -> None:
    assert max(check_attention(model).values()) < 0.01


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_the_decode_kernel_computes_plain_attention_in_parts() -> None:
    # In a process of its own: Triton decides at its import whether it interprets.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", AGAINST_PLAIN_ATTENTION], env=environment, check=True)


def test_only_the_likeliest_tokens_with_the_wanted_mass_are_drawn(model: Model) -> None:
    share = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    assert share[:2].sum() < TOP_P < share[:3].sum()
    logits = TEMPERATURE * share.log().expand(500, -1)
    assert set(model.sample(logits).tolist()) == {0, 1, 2}


def test_the_fit_finds_the_coefficients_again_and_keeps_them_above_zero() -> None:
    steps = [case.features for case in cases("8b")]
    true = [5e-3, 2.5e-5, 1e-9, 1e-5, 3e-8]
    times = [sum(b * x for b, x in zip(true, features, strict=True)) for features in steps]
    found, errors = fit(steps, times)
    assert found == pytest.approx(true, rel=1e-6)
    assert max(map(abs, errors)) < 1e-9
    falling = [time - 1e-6 * features[3] - 1e-5 * features[3] for time, features in zip(times, steps, strict=True)]
    assert fit(steps, falling)[0][3] == 0.0


def test_the_work_of_a_step_is_that_of_the_datasheet_arithmetic() -> None:
    shape = SHAPES["8b"]
    moved, flops = work(shape, Case(decodes=1, context=1000))
    assert moved == pytest.approx(15.0e9 + 1000 * 131_072, rel=0.01)
    assert flops == pytest.approx(15.0e9, rel=0.05)
    assert shape.kv_bytes == 131_072
    _, prompt = work(shape, Case(prompts=1, chunk=8192))
    assert prompt / 8192 == pytest.approx(14.0e9 + 4 * 32 * 4096 * 4096, rel=0.01)


def test_the_arithmetic_of_derived_profiles_is_near_what_was_measured_where_it_claims_to_be() -> None:
    """Weights read once a step, and prefill at the H100's arithmetic; decoding and reading KV are told in the docs."""
    measured = PROFILES["h200-8b"]
    assert not measured.derived
    assert measured.cost.base == pytest.approx(16e9 / 4.8e12 + 2e-3, rel=0.15)
    assert measured.cost.prefill_token == pytest.approx(PROFILES["h100-8b"].cost.prefill_token, rel=0.15)
