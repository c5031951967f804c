"""Which of an operation's forms computes it: compiled loops on CPUs, Triton programs on GPUs, or torch's operations."""

from typing import Literal

from torch import Tensor

from megalith.kernels import cpu, gpu
from megalith.kernels.cpu import Kernel

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
