"""Fixtures of model tests: the tiny models of tests/hf."""

from tests.hf.conftest import tiny

__all__ = ["tiny"]
