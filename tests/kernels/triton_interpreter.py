"""Triton's interpreter without its largest cost."""

import importlib
from typing import Any

import numpy
import pytest

from megalith.kernels.triton import launch


def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select Triton kernels on CPUs, too. Only 16 and 32 bits, as on GPUs."""
    import torch

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    monkeypatch.setattr(
        launch, "can_use", lambda *tensors: all(each.dtype in dtypes for each in tensors)
    )


def patch_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter replace the functions of triton.language once per module instead of at
    every call of a kernel's function, which takes most of its time."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patched: set[str] = set()

    def call(function: Any, *arguments: Any, **options: Any) -> Any:  # any function of a kernel
        if function.fn.__module__ not in patched:
            patched.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*arguments, **options)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setattr(interpreter, "np", _NumpyWithOrderedMatmul())


class _NumpyWithOrderedMatmul:
    """NumPy whose matmul adds the products of each element in the same order, as `tl.dot` does on a
    GPU. On some CPUs that of OpenBLAS depends on the row and on the layout in memory."""

    def __getattr__(self, name: str) -> Any:  # any function of NumPy
        return getattr(numpy, name)

    def matmul(self, a: Any, b: Any, dtype: Any) -> Any:
        """Multiply two matrices, or two batches of them."""
        a, b = a.astype(dtype), b.astype(dtype)
        total = numpy.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        for index in range(a.shape[-1]):
            total += a[..., :, index, None] * b[..., index, None, :]
        return total
