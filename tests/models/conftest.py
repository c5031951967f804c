"""Fixtures of tests of models: the tiny models of `tests/hf`."""

from tests.hf.conftest import tiny

__all__ = ["tiny"]
