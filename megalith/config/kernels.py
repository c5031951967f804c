"""How operations are computed: the fastest way, in torch's operations, by their definitions, or in
a way by name."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

Kernel = Literal["auto", "torch", "reference"]
"""auto: the fastest way on this machine; torch: torch operations with our own backward;
reference: the plain definition, whose backward is autograd's."""

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
    "loop",
    "grouped",
    "batched",
    "upcast",
]
"""Every way that some operation knows."""

Op = Literal[
    "norm", "rope", "activation", "dropout", "attention", "experts", "cross_entropy", "matmul"
]
OPS: tuple[Op, ...] = get_args(Op)

FusedBackendSetting = Literal["auto", "torch", "reference", "numba", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig:
    """How each operation is computed. One that is named, and is not here or does not take what
    comes, is an error."""

    shorthand: ClassVar[str] = "all"
    """What `kernels: torch` sets."""

    all: Kernel = "auto"
    """Of operations that are left at auto: auto, the fastest way on this machine; torch;
    reference."""

    norm: FusedBackendSetting = "auto"
    """RMSNorm and LayerNorm, alone and after a residual: numba (CPUs), triton (NVIDIA GPUs)."""

    rope: FusedBackendSetting = "auto"
    """RotaryEmbedding by position: numba (CPUs), triton (NVIDIA GPUs)."""

    activation: FusedBackendSetting = "auto"
    """Gates and activations, also those of experts with their weights: numba (CPUs), triton (NVIDIA
    GPUs)."""

    dropout: Literal["auto", "torch", "reference", "numba"] = "auto"
    """Of hidden states: numba (CPUs)."""

    attention: Literal[
        "auto", "torch", "reference", "cpu_tiled", "sdpa", "split_kv", "varlen", "flex"
    ] = "auto"
    """cpu_tiled (CPUs), sdpa (torch's kernel), split_kv (intervals of keys), varlen and flex
    (NVIDIA GPUs); torch: sdpa where it knows the scores, else the definition."""

    experts: Literal["auto", "torch", "reference", "loop", "grouped", "batched"] = "auto"
    """Their matmuls: loop (one by one), grouped (torch's grouped_mm), batched (equal groups);
    torch: as auto."""

    cross_entropy: FusedBackendSetting = "auto"
    """Softmax and gradients of the loss: numba (CPUs), triton (NVIDIA GPUs)."""

    matmul: Literal["auto", "torch", "reference", "upcast"] = "auto"
    """Matmuls of bf16 on CPUs, those of attention and experts too: upcast (fp32 on upcast
    operands, rounded to bf16); torch and reference: torch's bf16 kernels; auto: upcast on CPUs
    for which torch has no bf16 kernels."""

    def of(self, op: Op) -> BackendName:
        """How an operation is computed."""
        own: BackendName = getattr(self, op)
        return self.all if own == "auto" else own


KernelSetting = Kernel | KernelsConfig


def kernels_of(setting: KernelSetting) -> KernelsConfig:
    """Of each operation, where one word may stand for all."""
    return setting if isinstance(setting, KernelsConfig) else KernelsConfig(all=setting)


def switch_of(setting: KernelSetting) -> Kernel:
    """What goes for operations that are not named."""
    return kernels_of(setting).all


def plainly(setting: KernelSetting) -> KernelSetting:
    """The same with auto for ways by name, which do not take every dtype and device."""
    if not isinstance(setting, KernelsConfig):
        return setting
    left: dict[str, Any] = {
        op: "auto" for op in OPS if is_explicit_backend(getattr(setting, op))
    }  # Any: all know that word
    return replace(setting, **left)


def is_explicit_backend(form: BackendName) -> bool:
    """Whether this is a way of some operations only, which must be had."""
    return form not in get_args(Kernel)
