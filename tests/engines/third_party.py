"""Warnings of code that vLLM brings along. Ours stays strict: each line names the modules, or the one message."""

import pytest

VLLM_WARNINGS = pytest.mark.filterwarnings(
    r"ignore:.*:FutureWarning:(vllm|torch)\.",
    r"ignore:.*:DeprecationWarning:(vllm|torch|transformers|<frozen importlib)",
    # vLLM leaves the context of its sockets to the garbage collector, which then warns: the tests sweep behind it.
    "ignore:Unclosed context:ResourceWarning",
)
