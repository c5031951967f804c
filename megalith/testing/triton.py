"""Device for tests of Triton kernels: a GPU, or a CPU with Triton's interpreter in a separate
process."""

import os

import torch

from megalith.kernels.triton import launch

INTERPRET = "TRITON_INTERPRET"
"""Variable that Triton reads when a kernel is defined: it must be 1 before the first import, for
the whole process."""


def triton_device() -> torch.device | None:
    """Return the device on which this process can run Triton kernels, or None."""
    if not launch.has_triton():
        return None
    if os.environ.get(INTERPRET) == "1":
        return torch.device("cpu")
    has_gpu = torch.cuda.is_available()
    cuda = torch.device("cuda")  # lint: allow cuda-literal: Triton programs run nowhere else
    return cuda if has_gpu else None
