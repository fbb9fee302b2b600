"""Waiting for what the product does."""

from __future__ import annotations

from tests.faults.conftest import eventually

__all__ = ["eventually"]
