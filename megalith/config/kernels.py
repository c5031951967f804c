"""Backend selection of each operation: the fastest available, torch operations, the reference,
or a backend by name."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

Kernel = Literal["auto", "torch", "reference"]
"""auto: the fastest backend on this machine; torch: torch operations with our own backward;
reference: the plain definition with autograd's backward."""

BackendName = Literal[
    "auto",
    "torch",
    "reference",
    "numba",
    "triton",
    "cpu_tiled",
    "sdpa",
    "split_kv",
    "varlen",
    "flex",
    "paged",
    "loop",
    "grouped",
    "batched",
    "upcast",
]
"""Every backend that some operation has."""

Op = Literal[
    "norm",
    "rope",
    "activation",
    "dropout",
    "attention",
    "experts",
    "cross_entropy",
    "optimizer",
    "matmul",
    "small_batch_matmul",
]
OPS: tuple[Op, ...] = get_args(Op)

FusedBackendSetting = Literal["auto", "torch", "reference", "numba", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig:
    """Backend of each operation. An error is raised if an explicitly named backend is
    unavailable or does not support an input."""

    shorthand: ClassVar[str] = "all"
    """Field that `kernels: torch` sets."""

    all: Kernel = "auto"
    """Backend of operations left at auto. auto: the fastest backend on this machine; torch:
    torch operations; reference: plain definitions."""

    norm: FusedBackendSetting = "auto"
    """Backend of RMSNorm and LayerNorm, also fused with the residual addition: numba (CPUs),
    triton (NVIDIA GPUs)."""

    rope: FusedBackendSetting = "auto"
    """Backend of rotary position embedding: numba (CPUs), triton (NVIDIA GPUs)."""

    activation: FusedBackendSetting = "auto"
    """Backend of activations and gated activations, also those of experts with router weights:
    numba (CPUs), triton (NVIDIA GPUs)."""

    dropout: Literal["auto", "torch", "reference", "numba"] = "auto"
    """Backend of dropout of hidden states: numba (CPUs)."""

    attention: Literal[
        "auto",
        "torch",
        "reference",
        "cpu_tiled",
        "sdpa",
        "split_kv",
        "varlen",
        "flex",
        "paged",
        "triton",
    ] = "auto"
    """Backend of attention: cpu_tiled (CPUs), sdpa (torch's kernel), split_kv (intervals of
    keys), varlen and flex (NVIDIA GPUs), paged (decoding with a paged KV cache on CPUs), triton
    (the same on NVIDIA GPUs). torch: sdpa where it supports the scores, else the reference."""

    experts: Literal["auto", "torch", "reference", "loop", "grouped", "batched"] = "auto"
    """Backend of the experts' matmuls: loop (one expert at a time), grouped (torch's
    grouped_mm), batched (equal numbers of tokens per expert). torch: the same as auto."""

    cross_entropy: FusedBackendSetting = "auto"
    """Backend of softmax cross-entropy and its gradient: numba (CPUs), triton (NVIDIA GPUs)."""

    optimizer: Literal["auto", "torch", "reference", "numba"] = "auto"
    """Backend of AdamW's update: numba (CPUs), one loop that also rounds the weights, bitwise equal
    to torch's fused kernel where its vector code runs; torch: the fused kernel. auto: numba for
    models of 2^20 parameters or more."""

    matmul: Literal["auto", "torch", "reference", "upcast"] = "auto"
    """Backend of bf16 matmuls on CPUs, including those of attention and experts. upcast: fp32
    matmul of upcast operands, rounded to bf16; torch and reference: torch's bf16 kernels;
    auto: upcast on CPUs for which torch has no bf16 kernels."""

    small_batch_matmul: FusedBackendSetting = "auto"
    """Backend of matmuls of few rows in the inference engine. auto: numba (CPUs) or triton (NVIDIA
    GPUs) up to the number of rows for which it was measured to be faster than torch on this
    machine; numba, triton: for every number of rows; torch and reference: torch's matmuls."""

    def backend_name(self, op: Op) -> BackendName:
        """Return the configured backend of an operation; `all` where it is auto."""
        own: BackendName = getattr(self, op)
        return self.all if own == "auto" else own


KernelSetting = Kernel | KernelsConfig


def expand_kernel_setting(setting: KernelSetting) -> KernelsConfig:
    """Return the backend of each operation for a setting that may be a single word."""
    return setting if isinstance(setting, KernelsConfig) else KernelsConfig(all=setting)


def default_backend(setting: KernelSetting) -> Kernel:
    """Return the backend of operations that are not set individually."""
    return expand_kernel_setting(setting).all


def reset_explicit_backends(setting: KernelSetting) -> KernelSetting:
    """Return the setting with explicitly named backends replaced by auto, since they do not
    support every dtype and device."""
    if not isinstance(setting, KernelsConfig):
        return setting
    replaced: dict[str, Any] = {
        op: "auto" for op in OPS if is_explicit_backend(getattr(setting, op))
    }  # Any: each field has its own Literal
    return replace(setting, **replaced)


def is_explicit_backend(backend: BackendName) -> bool:
    """Return whether this backend exists for some operations only, so that it must be available
    if it is named."""
    return backend not in get_args(Kernel)
