"""Backend selection of fused operations: numba loops on CPUs, Triton kernels on GPUs, or torch
operations."""

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from megalith.config.kernels import BackendName, Op
from megalith.errors import ConfigError
from megalith.kernels import cpu_threads
from megalith.kernels.triton import launch
from megalith.plan.kernels import find_backend_spec

FusedBackend = Literal["numba", "triton", "torch"]


def select_backend(
    kernel: BackendName, *tensors: Tensor, op: Op, loops: bool = True, triton: bool = True
) -> FusedBackend:
    """Return the fastest backend that supports these tensors, or the one that `kernel` names.

    `loops`, `triton`: whether the operation has a numba loop, and a Triton kernel.

    Raises:
        ConfigError: the named backend does not support these tensors or is not available.
    """
    if kernel == "auto":
        if loops and cpu_threads.takes(*tensors):
            return "numba"
        if triton and launch.takes(*tensors):
            return "triton"
    elif kernel == "numba":
        return (
            kernel if loops and cpu_threads.could_take(*tensors) else refuse(op, kernel, *tensors)
        )
    elif kernel == "triton":
        return kernel if triton and launch.takes(*tensors) else refuse(op, kernel, *tensors)
    return "torch"


def refuse(
    op: Op, form: BackendName, *tensors: Tensor, works: BackendName = "torch"
) -> FusedBackend:
    """Raise the error for an explicitly set backend that cannot be used, with one that can.

    Raises:
        ConfigError: always.
    """
    tensor, unavailable = tensors[0], unavailable_backends()
    given = (
        f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device.type}"
    )
    reason = unavailable.get(
        form, f"supported inputs: {find_backend_spec(op, form).takes()}; this input: {given}"
    )
    raise ConfigError(
        f"kernels.{op}={form}: {reason}. Set kernels.{op} to {works}, which supports this input, "
        "or to auto."
    )


def unavailable_backends() -> Mapping[str, str]:
    """Return the backends that this machine cannot use, and the reason for each."""
    reasons = (
        {}
        if cpu_threads.openmp() is not None
        else {"numba": "torch's OpenMP library on this machine cannot be called"}
    )
    if not launch.has_triton():
        reasons |= {
            "triton": "Triton is not installed",
            "flex": "Triton, which flex_attention is compiled to, is not installed",
        }
    from megalith.kernels.attention.varlen import has_varlen
    from megalith.kernels.grouped_linear import HAS_GROUPED_MM

    reasons |= {} if HAS_GROUPED_MM else {"grouped": "this version of torch has no grouped_mm"}
    return reasons | (
        {} if has_varlen() else {"varlen": "this version of torch has no varlen_attn with windows"}
    )
