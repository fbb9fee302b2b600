"""Fixtures of the engine tests. The contract's assertions are rewritten like those of test files."""

import pytest

pytest.register_assert_rewrite("tests.engines.contract")
