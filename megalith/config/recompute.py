"""Activation checkpointing (recomputation in backward) and activation offload to host memory."""

from dataclasses import dataclass
from typing import Literal

RecomputedModule = Literal[
    "core_attention", "norm", "mlp", "mlp_act", "shared_experts", "mla_up_proj"
]
"""Modules for selective recomputation. In a mixture of experts, `mlp` is the whole block
including communication; `mlp_act` is the activation of the shared experts (routed experts
never save theirs); `shared_experts` is the whole shared MLP, redundant with `mlp`.
`mla_up_proj` is latent attention from the latent vectors to the heads' outputs: up
projections, RoPE and core_attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """Activation checkpointing: what is recomputed in backward. Source: Korthikanti et al. 2022,
    arXiv:2205.05198, section 5."""

    granularity: Literal["none", "full", "selective", "auto"] = "none"
    """What is recomputed. none: nothing; full: whole layers, of which only the inputs are saved;
    selective: `modules` of every layer; auto: the cheapest of these with which the run fits
    on `device`."""

    device: str | None = None
    """auto: device whose memory must suffice: a100, h100, h200, b200, or a size in GiB. Unset
    with the other granularities."""

    method: Literal["uniform", "block"] = "uniform"
    """full: which layers are recomputed. uniform: all layers, in chunks of num_layers; block:
    only the first num_layers of each stage."""

    num_layers: int = 1
    """full: layers per chunk (uniform), or number of recomputed layers per stage (block)."""

    modules: tuple[RecomputedModule, ...] = ("core_attention",)
    """selective: modules to recompute."""

    mlp_chunks: int = 1
    """selective, with mlp among `modules`: number of chunks into which a rank's tokens of a
    microbatch are split for the MLP, forward and backward, so that intermediate activations
    of only one chunk exist at a time. A mixture of experts is not split."""

    shard_inputs: bool = False
    """full: shard each saved input over the tensor-parallel ranks; needs tp > 1 without sp."""

    check: bool = False
    """Compare all recomputed values with the original ones and raise an error if they are not
    bitwise equal; slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Activation offload: saved activations are copied to host memory between forward and
    backward."""

    layers: int = 0
    """Number of layers, from the first of each stage, whose saved activations are offloaded to
    host memory; 0: none."""

    min_numel: int = 1 << 20
    """Minimum number of elements of an offloaded tensor; smaller ones stay on the device."""
