"""Activation memory: what is computed again in backward instead of being kept, and what waits in
host memory."""

from dataclasses import dataclass
from typing import Literal

RecomputedModule = Literal[
    "core_attention", "norm", "mlp", "mlp_act", "shared_experts", "mla_up_proj"
]
"""Of a mixture of experts `mlp` is all of it, messages too; `mlp_act` what the experts for all
tokens have between their matmuls, which those that are chosen never keep; `shared_experts` all
of the former, of no use beside `mlp`. `mla_up_proj` is latent attention from its short vectors
on, up to what heads find: projections, rotations and core_attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """What backward computes again. Source: Korthikanti et al. 2022, arXiv:2205.05198, section
    5."""

    granularity: Literal["none", "full", "selective", "auto"] = "none"
    """full: whole layers, keeping only their inputs; selective: some modules of every layer;
    auto: the cheapest of these with which the run fits `device`."""

    device: str | None = None
    """auto: a100, h100, h200, b200, or the GiB of one device; unset with the others."""

    method: Literal["uniform", "block"] = "uniform"
    """full: `uniform` recomputes all layers, num_layers at a time; `block` only the first
    num_layers of each stage."""

    num_layers: int = 1
    """full: layers per chunk (uniform), or layers that are recomputed (block)."""

    modules: tuple[RecomputedModule, ...] = ("core_attention",)
    """selective: which modules."""

    mlp_chunks: int = 1
    """selective, with mlp among modules: chunks of a microbatch's tokens on a rank that go
    through an MLP one after the other, forward and backward, so that its inner features exist
    for one at a time. A mixture of experts is whole."""

    shard_inputs: bool = False
    """full: keep 1/tp of each saved input on each tensor-parallel rank; needs tp > 1 without sp."""

    check: bool = False
    """Compare everything that is computed again with the first time, and stop where a bit differs;
    slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Activations that wait in host memory between forward and backward."""

    layers: int = 0
    """Of each stage, the first so many layers send what they keep for backward to host memory."""

    min_numel: int = 1 << 20
    """Smaller tensors stay where they are."""
