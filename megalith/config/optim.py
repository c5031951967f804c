"""The optimizer, its precision and its clipping."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """AdamW with fp32 master weights. Source: Loshchilov and Hutter 2017, arXiv:1711.05101."""

    beta1: float = 0.9
    """How much of the mean gradient is kept each step."""

    beta2: float = 0.95
    """How much of the mean squared gradient is kept each step; 0.999 remembers a spike for about 1000 steps."""

    eps: float = 1e-8
    """Added to the root of the mean squared gradient."""

    decoupled_weight_decay: bool = True
    """AdamW: decay the weights directly; off: add the decay to the gradient (Adam with L2)."""

    clip_grad: float = 1.0
    """Scale gradients so that their global L2 norm is at most this; 0 turns clipping off."""

    nonfinite_grad: Literal["skip", "raise"] = "skip"
    """A step whose gradient norm is not finite changes nothing and is counted (`skip`), or ends the run (`raise`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Number formats of one run."""

    params: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Weights and activations. bf16 keeps fp32 master weights and sums gradients in fp32; fp64 is for proofs."""
