"""One transformer layer."""

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.recompute import RecomputeConfig
from megalith.kernels.attention import attention
from megalith.kernels.rebuilt import Rebuilding, Rebuilt, checked
from megalith.kernels.tokens import Tokens
from megalith.nn.attention import Attention, Core, LayerCache
from megalith.nn.mlp import SwiGLU
from megalith.nn.norm import RMSNorm
from megalith.parallel.mesh import Mesh
from megalith.parallel.recompute import Recomputed
from megalith.parallel.tensor import Region
from megalith.plan.recompute import modules_again

KEEP_ALL = RecomputeConfig()


class Block(nn.Module):
    """Pre-norm transformer layer: x [t, h] -> x [t, h]."""

    def __init__(
        self, name: str, config: ModelConfig, mesh: Mesh, region: Region, *, dtype: torch.dtype,
        core: Core = attention, recompute: RecomputeConfig = KEEP_ALL,
    ) -> None:  # fmt: skip
        """`core`: how attention sees other tokens; `recompute`: parts whose results backward computes a second time."""
        super().__init__()
        size, eps, same = config.hidden_size, config.norm_eps, region.invariant
        again, check = modules_again(recompute), recompute.check
        rebuilding: Rebuilding = checked if check else Rebuilt
        norm = rebuilding if "norm" in again else None
        act = rebuilding if "mlp_act" in again else None
        self.attention_norm = RMSNorm(f"{name}.attention_norm", size, eps=eps, invariant=same, dtype=dtype, again=norm)
        self.attention = Attention(f"{name}.attention", config, mesh, region, dtype=dtype, core=core)
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm", size, eps=eps, invariant=same, dtype=dtype, again=norm)
        mlp = SwiGLU(f"{name}.mlp", config, mesh, region, dtype=dtype, act_again=act)
        self.mlp = Recomputed(mlp, check=check) if "mlp" in again else mlp
        if "core_attention" in again:
            self.attention.core = Recomputed(self.attention.core, check=check)

    def forward(self, x: Tensor, tokens: Tokens, cache: LayerCache | None = None) -> Tensor:
        """x [t, h] -> [t, h]."""
        x, normed = self.mlp_norm.after_adding(self.attention(self.attention_norm(x), tokens, cache), x)
        return x + self.mlp(normed)
