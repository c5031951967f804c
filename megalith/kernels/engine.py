"""Which of an operation's forms computes it: compiled loops on CPUs, Triton programs on GPUs, or torch's operations."""

from typing import Literal

import torch
from torch import Tensor

from megalith.config.kernels import Kernel
from megalith.kernels import cpu, gpu

Engine = Literal["loops", "triton", "torch"]


def engine_for(kernel: Kernel, *tensors: Tensor, loops: bool = True, triton: bool = True) -> Engine:
    """The fastest form that works on these tensors; torch's where the caller asks for that.

    `loops`, `triton`: whether there is a loop, and a program, for what is asked.
    """
    if kernel == "auto":
        if loops and cpu.takes(*tensors):
            return "loops"
        if triton and gpu.takes(*tensors):
            return "triton"
    return "torch"


def kernels_in_use(kernel: Kernel, device: torch.device, *, compiled: bool = False) -> str:
    """What a run computes with, in words."""
    if kernel == "reference":
        return "reference (plain definitions, slower and with more memory)"
    if kernel == "torch":
        return "torch (torch operations, no loops or programs of our own)"
    if compiled:
        return "auto (layers compiled by torch)"
    fast = {
        "cpu": "compiled loops" if cpu.openmp() is not None else None,
        "cuda": "Triton programs" if gpu.has_triton() else None,  # lint: allow cuda-literal: its name, no device
    }.get(device.type)
    return f"auto ({fast} and torch operations)" if fast else "auto (torch operations)"
