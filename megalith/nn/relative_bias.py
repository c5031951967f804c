"""Relative position bias of a model: one table of biases by distance that all layers share."""

from dataclasses import replace

import torch
from torch import nn

from megalith.config.model import ModelConfig
from megalith.kernels.tokens import PackedSeqParams
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import Init, ParameterSpec, register_param
from megalith.plan.shards import Shard, split_heads


class RelativeBias(nn.Module):
    """Adds the table of relative position biases [buckets, n] to the tokens.

    A rank has the columns of its heads. Pipeline stages hold a copy each, whose gradients are
    summed; chunks of a rank share one. Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    weight: nn.Parameter

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        shared: nn.Parameter | None = None,
    ) -> None:
        """`shared`: the table, if another chunk of this rank has it already."""
        super().__init__()
        n, heads = (
            config.num_heads,
            split_heads(config.num_heads, config.num_kv_heads, mesh.tp.size).queries,
        )
        shard = Shard.full("relative.weight", (config.relative.buckets, n)).split_dim(
            1,
            heads,
            mesh.tp.rank,
            mesh.tp.axes,
        )
        if shared is None:
            register_param(self, "weight", ParameterSpec(shard, Init(config.init_std)), dtype=dtype)
        else:
            self.register_parameter("weight", shared)

    def add_to(self, tokens: PackedSeqParams) -> PackedSeqParams:
        """Return the tokens with the local heads' biases: the parameter itself, so that recomputed
        layers read it again."""
        return replace(tokens, biases=self.weight)


class NoBias(nn.Module):
    """Placeholder for models without relative position bias."""

    def add_to(self, tokens: PackedSeqParams) -> PackedSeqParams:
        """Return the tokens unchanged."""
        return tokens
