"""A failed start in one sentence; the texts are vLLM's own, shortened."""

from __future__ import annotations

import pytest

from scheduler.engines.vllm_errors import explain

IN_ITS_PROCESS = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")

NO_MEMORY = (
    "RuntimeError: Worker failed with error 'Available memory on node 0 (15.17/16.96 GiB) on kv cache allocation is "
    "less than requested memory for kv (1024.0 GiB). Decrease --kv-cache-memory-bytes.', please check the trace"
)
TOO_SMALL = (
    "ValueError: To serve at least one request with the model's max seq len (2048), (0.0 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (0.0 GiB). Based on the available memory, the estimated maximum "
    "model length is 256. Try increasing `gpu_memory_utilization`"
)
TOO_SMALL_FOR_ALL = "ValueError: To serve at least one request with the model's max seq len (2048), 4 GiB is needed"


@pytest.mark.parametrize(
    ("error", "log", "message", "hint"),
    [
        (IN_ITS_PROCESS, NO_MEMORY, "1024.0 GiB are asked for, 15.17 GiB are free", "Lower kv_space_gib"),
        (IN_ITS_PROCESS, TOO_SMALL, "full length of 2048 tokens", "set max_model_len to at most 256"),
        (IN_ITS_PROCESS, TOO_SMALL_FOR_ALL, "full length of 2048 tokens", "lower max_model_len"),
        (IN_ITS_PROCESS, "torch.OutOfMemoryError: CUDA out of memory. Tried", "not enough memory", "Lower"),
        (IN_ITS_PROCESS, "RuntimeError: [enforce fail] can't allocate memory: 8 bytes", "not enough memory", "Lower"),
        (IN_ITS_PROCESS, "safetensors_rust.SafetensorError: Error while", "missing or damaged", "Copy"),
        (RuntimeError("Failed to infer device type"), "", "no device", "GPU driver"),
        (OSError("couldn't find them in the cached files"), "", "not on this machine", "`path`"),
        (IN_ITS_PROCESS, "x\nValueError: The odd thing. And more.\nmore", "could not start: The odd thing.", "log"),
        (IN_ITS_PROCESS, "", "Engine core initialization failed.", "log"),
        (RuntimeError("Failed core proc(s): {'EngineCore': -9}"), "", "ended by signal 9", "memory"),
    ],
)
def test_a_cause_becomes_a_sentence_and_a_hint(error: Exception, log: str, message: str, hint: str) -> None:
    explained = explain(error, log, {})
    assert message in str(explained)
    assert hint in explained.hint
    assert "\n" not in str(explained)
