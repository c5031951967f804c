"""One transformer layer."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.recompute import RecomputedModule
from megalith.kernels.attention import attention
from megalith.kernels.tokens import Tokens
from megalith.nn.attention import Attention, Core, LayerCache
from megalith.nn.mlp import SwiGLU
from megalith.nn.norm import RMSNorm
from megalith.parallel.mesh import Mesh
from megalith.parallel.recompute import Recomputed
from megalith.parallel.tensor import Region


class Block(nn.Module):
    """Pre-norm transformer layer: x [t, h] -> x [t, h]."""

    def __init__(
        self, name: str, config: ModelConfig, mesh: Mesh, region: Region, *, dtype: torch.dtype,
        core: Core = attention, again: Collection[RecomputedModule] = (),
    ) -> None:  # fmt: skip
        """`core`: how attention sees other tokens; `again`: parts whose results backward computes a second time instead
        of keeping them."""
        super().__init__()
        size, eps, same, norm = config.hidden_size, config.norm_eps, region.invariant, "norm" in again
        self.attention_norm = RMSNorm(f"{name}.attention_norm", size, eps=eps, invariant=same, dtype=dtype, again=norm)
        self.attention = Attention(f"{name}.attention", config, mesh, region, dtype=dtype, core=core)
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm", size, eps=eps, invariant=same, dtype=dtype, again=norm)
        mlp = SwiGLU(f"{name}.mlp", config, mesh, region, dtype=dtype, act_again="mlp_act" in again)
        self.mlp = Recomputed(mlp) if "mlp" in again else mlp
        if "core_attention" in again:
            self.attention.core = Recomputed(self.attention.core)

    def forward(self, x: Tensor, tokens: Tokens, cache: LayerCache | None = None) -> Tensor:
        """x [t, h] -> [t, h]."""
        x, normed = self.mlp_norm.after_adding(self.attention(self.attention_norm(x), tokens, cache), x)
        return x + self.mlp(normed)
