"""Kernel backends: the backend of every operation of a model, selected when the model is built, and
the choice among numba loops, Triton kernels and torch operations in one call.

The table of backends with their conditions is `BACKENDS` in plan/kernels.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from megalith.config.kernels import (
    BackendName,
    KernelsConfig,
    KernelSetting,
    Op,
    expand_kernel_setting,
)
from megalith.errors import ConfigError
from megalith.kernels import cpu_threads
from megalith.kernels.linear import select_bf16_matmul
from megalith.kernels.triton import launch
from megalith.plan.kernels import find_backend_spec

FusedBackend = Literal["numba", "triton", "torch"]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Backend:
    """Backend of one operation of a model."""

    op: Op

    name: BackendName = "auto"
    """auto: each call uses the fastest backend that supports its dtypes, sizes and options."""

    def bind(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """Return the operation, a function with a keyword `kernel`, bound to this backend."""
        return function if self.name == "auto" else partial(function, kernel=self.name)


@dataclass(frozen=True, slots=True)
class Backends:
    """Backend of every operation of a model, an argument of its constructor."""

    config: KernelsConfig = field(default_factory=KernelsConfig)

    def select(self, op: Op) -> Backend:
        """Return the backend of an operation."""
        return Backend(op, self.config.backend_name(op))

    def bind(self, op: Op, function: Callable[..., Result]) -> Callable[..., Result]:
        """Return an operation bound to its backend: see `Backend.bind`."""
        return self.select(op).bind(function)


AUTO = Backends()
"""The fastest backend of every operation."""


def select_backends(kernels: KernelSetting) -> Backends:
    """Return the backends of a model, and select that of bf16 matmuls on CPUs for the process."""
    backends = Backends(expand_kernel_setting(kernels))
    select_bf16_matmul(backends.select("matmul").name)
    return backends


def select_backend(
    kernel: BackendName, *tensors: Tensor, op: Op, loops: bool = True, triton: bool = True
) -> FusedBackend:
    """Return the fastest backend that supports these tensors, or the one that `kernel` names.

    `loops`, `triton`: whether the operation has a numba loop, and a Triton kernel.

    Raises:
        ConfigError: the named backend does not support these tensors or is not available.
    """
    if kernel == "auto":
        if loops and cpu_threads.should_use(*tensors):
            return "numba"
        if triton and launch.can_use(*tensors):
            return "triton"
    elif kernel == "numba":
        return (
            kernel
            if loops and cpu_threads.can_use(*tensors)
            else raise_unsupported(op, kernel, *tensors)
        )
    elif kernel == "triton":
        return (
            kernel
            if triton and launch.can_use(*tensors)
            else raise_unsupported(op, kernel, *tensors)
        )
    return "torch"


def raise_unsupported(
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
        form,
        f"supported inputs: {find_backend_spec(op, form).describe_inputs()}; this input: {given}",
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
        else dict.fromkeys(
            ("numba", "paged"), "torch's OpenMP library on this machine cannot be called"
        )
    )
    if not launch.has_triton():
        reasons |= {
            "triton": "Triton is not installed",
            "flex": "Triton, which flex_attention is compiled to, is not installed",
        }
    from megalith.kernels.attention.sdpa import has_varlen
    from megalith.kernels.grouped_linear import HAS_GROUPED_MM

    reasons |= {} if HAS_GROUPED_MM else {"grouped": "this version of torch has no grouped_mm"}
    # it is for GPUs only, and its module imports torch._dynamo, which takes a second
    if torch.accelerator.is_available() and not has_varlen():
        reasons |= {"varlen": "this version of torch has no varlen_attn with windows"}
    return reasons
