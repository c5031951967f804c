"""Triton's interpreter without its largest cost."""

import importlib
from typing import Any

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
