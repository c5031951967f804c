"""One mixture of experts, forward and backward: ours as `megalith train` builds it, and
transformers' block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from contenders.expert_matmuls import Matmuls
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs, RouterInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import allocate
from megalith.nn.build import build_context
from megalith.nn.moe import MoE
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.recipes import build_recipe
from megalith.testing.tolerance import relative_error

DTYPE, TOLERANCE = torch.bfloat16, 3e-2
"""bf16 rounds to 0.4 %, and a token's gradient is a sum of one such number from each of its
experts."""

PEERS = ("grouped_mm", "eager")
"""transformers' ways. batched_mm copies a matrix for every row; deepgemm and sonicmoe need kernels
from a network."""

AS_THEIRS = "ours, router in bf16"
RESULTS = ("y", "dx", "drouter", "dup", "ddown")
LEVEL = 2.0**-4
"""Between two logits: all are exact in bf16, so that no way to compute them makes two of them
equal."""

UNEVEN = 0.5
"""Standard deviation of what makes some experts more popular, beside 1 of a token's own taste. A
guess: the busiest then has several times its share, as under a young router."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """One layer of a model, and its tokens."""

    model: Callable[[], ModelConfig]
    tokens: int


def qwen3_moe() -> ModelConfig:
    """Of Qwen3 30B-A3B: h 2048, 128 experts of f 768, 8 for each token."""
    return build_recipe("qwen3_30b_a3b").model


def tiny_moe() -> ModelConfig:
    """For a rehearsal; features are whole blocks of 16 bytes, as grouped matmuls want them."""
    return ModelConfig(
        vocab_size=8,
        hidden_size=40,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        ffn_hidden_size=8,
        moe=MoEConfig(num_experts=6, top_k=2, ffn_hidden_size=24),
    )


class Layer:
    """Our layer, its weights and inputs; every contender's step gives the results and gradients
    that it should.

    Logits are the tokens' first features, so that all contenders choose the same experts, whatever
    they round.
    """

    def __init__(self, mixture: Mixture, device: torch.device) -> None:
        self.config, t = mixture.model(), mixture.tokens
        assert self.config.moe is not None
        # transformers' block has no losses of balance: they are beside it.
        self.moe = replace(self.config.moe, aux_loss=AuxLossConfig())
        draw = torch.Generator(device).manual_seed(0)
        self.layer = build(self.config, self.moe, device)
        taste = torch.randn(t, self.moe.num_experts, generator=draw, device=device)
        popular = UNEVEN * torch.randn(self.moe.num_experts, generator=draw, device=device)
        places = (taste + popular).argsort(1).argsort(1)
        self.chosen = places.topk(self.moe.top_k, dim=1).indices
        self.x, self.dy = (
            torch.randn(t, self.config.hidden_size, generator=draw, device=device, dtype=DTYPE)
            for _ in range(2)
        )
        self.x[:, : self.moe.num_experts] = LEVEL * (places - self.moe.num_experts // 2)
        self.weights = weights_key(self.layer)
        with torch.no_grad():
            for matrix in self.weights[1:]:
                matrix.normal_(std=matrix.shape[1] ** -0.5, generator=draw)
            self.weights[0].copy_(torch.eye(*self.weights[0].shape))
        self.x.requires_grad_()
        self.tokens = LayerInputs(
            seq_params_from_rows(1, t, device=device),
            router_inputs=RouterInputs(AuxLossScale(0, 1, 1.0)),
        )

    def words(self) -> str:
        """Its sizes, and how uneven its choices are."""
        moe, rows = self.moe, self.chosen.numel()
        busiest = int(self.chosen.flatten().bincount().max()) * moe.num_experts / rows
        return (
            f"{len(self.x)} tokens of h {self.config.hidden_size}, {moe.num_experts} "
            "experts of "
            f"f {moe.ffn_hidden_size}, {moe.top_k} for each token, the busiest with {busiest:.1f} "
            "times its share"
        )

    def matmuls(self) -> Matmuls:
        """Those of its experts alone."""
        _, up, down = self.weights
        return Matmuls(
            self.x.detach(), self.dy, self.chosen, up, down, experts=self.moe.num_experts
        )

    def steps(self, peers: Sequence[str] = PEERS) -> dict[str, Callable[[], list[Tensor]]]:
        """By name, ours first; all of them share the weights."""
        same = build(
            self.config,
            replace(self.moe, router=replace(self.moe.router, dtype="model")),
            self.x.device,
        )
        for local, first in zip(same.parameters(), self.layer.parameters(), strict=True):
            local.data = first.data
        steps = {"ours": self.ours(self.layer), AS_THEIRS: self.ours(same)}
        return steps | {f"transformers {peer}": self.theirs(peer) for peer in peers}

    def ours(self, layer: MoE) -> Callable[[], list[Tensor]]:
        """Forward and backward."""
        weights = weights_key(layer)
        return lambda: self.results(layer(self.x, self.tokens), weights)

    def theirs(self, implementation: str) -> Callable[[], list[Tensor]]:
        """The block of Qwen3-MoE with the same weights."""
        config = Qwen3MoeConfig(
            num_experts=self.moe.num_experts,
            num_experts_per_tok=self.moe.top_k,
            hidden_size=self.config.hidden_size,
            moe_intermediate_size=self.moe.ffn_hidden_size,
            norm_topk_prob=self.moe.router.norm_topk_prob,
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            block = Qwen3MoeSparseMoeBlock(config)
        router, up, down = self.weights
        block.gate.weight = nn.Parameter(router.data)
        block.experts.gate_up_proj = nn.Parameter(up.data.view(block.experts.gate_up_proj.shape))
        block.experts.down_proj = nn.Parameter(down.data.view(block.experts.down_proj.shape))
        weights = [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj]
        return lambda: self.results(block(self.x.unsqueeze(0)).squeeze(0), weights)

    def results(self, y: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """y and all gradients, as flat as ours."""
        grads = torch.autograd.grad(y, [self.x, *weights], self.dy)
        return [
            y.detach(),
            *(
                g.reshape(local.shape)
                for g, local in zip(grads, (self.x, *self.weights), strict=True)
            ),
        ]


def build(config: ModelConfig, moe: MoEConfig, device: torch.device) -> MoE:
    """The layer, its weights not written yet."""
    mesh = build_single_rank_mesh()
    layer = MoE("layers.0.moe", config, moe, build_context(config, mesh, dtype=DTYPE))
    allocate(layer, device)
    return layer


def weights_key(layer: MoE) -> list[Tensor]:
    """Router [E, h], up [E 2 f, h], down [E h, f]."""
    return [
        *layer.router.gate.accumulated_parameters(),
        *layer.experts.up.accumulated_parameters(),
        *layer.experts.down.accumulated_parameters(),
    ]


def unlike(steps: Mapping[str, Callable[[], Sequence[Tensor]]]) -> list[str]:
    """What contenders compute unlike the first, in words; nothing where all are alike."""
    (first, step), *others = steps.items()
    expected, result = step(), list[str]()
    for name, other in others:
        for what, actual, reference in zip(RESULTS, expected, other(), strict=True):
            error = relative_error(reference, actual)
            if not error <= TOLERANCE:
                result.append(f"{what} of {name} is off by {error:.1e} of that of {first}")
    return result
