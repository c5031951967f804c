"""Where Triton programs are tested: on a GPU, or on a CPU by Triton's interpreter, in a process
begun for that."""

import os

import torch

from megalith.kernels import gpu

INTERPRET = "TRITON_INTERPRET"
"""Triton reads it when a program is defined: it must be 1 before the first import, and then holds
for the process."""


def triton_device() -> torch.device | None:
    """The device on which this process can run Triton programs; None: none."""
    if not gpu.has_triton():
        return None
    if os.environ.get(INTERPRET) == "1":
        return torch.device("cpu")
    there = torch.cuda.is_available()
    cuda = torch.device("cuda")  # lint: allow cuda-literal: Triton programs run nowhere else
    return cuda if there else None
