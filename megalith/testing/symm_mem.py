"""Fused collective matmul without a GPU: torch's fallback of its operators, run on gloo ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from unittest.mock import patch

import torch

from megalith.parallel import symm_mem


@contextmanager
def fused_on_cpus() -> Iterator[None]:
    """Make parallel.collective_matmul=fused available on CPUs in this process.

    The operators are called as on GPUs, by name and with the same arguments; their implementation
    is an all-gather and a matmul, or a matmul and a reduce-scatter, in sequence. So it tests our
    calls, not the kernels.
    """
    defined = import_module("torch.distributed._symmetric_memory")
    with (
        torch.library._scoped_library("symm_mem", "FRAGMENT") as library,
        patch.object(symm_mem, "why_not_fused", lambda places: None),
    ):
        library.impl("fused_all_gather_matmul", defined._fused_all_gather_matmul_fallback, "CPU")
        library.impl(
            "fused_matmul_reduce_scatter", defined._fused_matmul_reduce_scatter_fallback, "CPU"
        )
        yield
