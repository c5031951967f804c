"""Which of an operation's forms computes it: compiled loops on CPUs, Triton programs on GPUs, or
torch's operations."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from megalith.config.kernels import BackendName, Op
from megalith.errors import ConfigError
from megalith.kernels import cpu, gpu
from megalith.plan.kernels import find_backend_spec

FusedBackend = Literal["numba", "triton", "torch"]


def select_backend(
    kernel: BackendName, *tensors: Tensor, op: Op, loops: bool = True, triton: bool = True
) -> FusedBackend:
    """The fastest form that works on these tensors; torch's, or one by name, where the caller asks
    for that.

    `loops`, `triton`: whether there is a loop, and a program, for what is asked.

    Raises:
        ConfigError: the form that is asked for by name does not take these tensors, or is not here.
    """
    if kernel == "auto":
        if loops and cpu.takes(*tensors):
            return "numba"
        if triton and gpu.takes(*tensors):
            return "triton"
    elif kernel == "numba":
        return kernel if loops and cpu.could_take(*tensors) else refuse(op, kernel, *tensors)
    elif kernel == "triton":
        return kernel if triton and gpu.takes(*tensors) else refuse(op, kernel, *tensors)
    return "torch"


def refuse(
    op: Op, form: BackendName, *tensors: Tensor, works: BackendName = "torch"
) -> FusedBackend:
    """Say that a way that was asked for cannot be taken, and which can.

    Raises:
        ConfigError: always.
    """
    first, lacking = tensors[0], unavailable_backends()
    given = f"{str(first.dtype).removeprefix('torch.')} {list(first.shape)} on {first.device.type}"
    reason = lacking.get(
        form, f"it takes {find_backend_spec(op, form).takes()}; it was given {given}"
    )
    raise ConfigError(
        f"kernels.{op}={form}: {reason}. Set kernels.{op} to {works}, which takes this, or to auto."
    )


def unavailable_backends() -> Mapping[str, str]:
    """Ways that this machine cannot compute anything by, and why."""
    found = (
        {}
        if cpu.openmp() is not None
        else {"numba": "torch has no OpenMP library here that loops could run on"}
    )
    if not gpu.has_triton():
        found |= {
            "triton": "Triton is not installed",
            "flex": "Triton, which it is compiled to, is not installed",
        }
    from megalith.kernels.grouped_linear import HAS_GROUPED_MM
    from megalith.kernels.varlen_attention import (
        has_varlen,
    )  # looks for a part of torch, and loads it if it is there

    found |= {} if HAS_GROUPED_MM else {"grouped": "this torch has no grouped_mm"}
    return found | (
        {} if has_varlen() else {"varlen": "this torch has no varlen_attn with windows"}
    )
