"""Experts with latent features or without a gate match the same layer of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import allocate, initialize
from megalith.nn.build import build_context
from megalith.nn.moe import MoE
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tolerance import PARITY, relative_error

LATENT = MoEConfig(
    num_experts=6,
    top_k=2,
    ffn_hidden_size=11,
    shared_ffn_hidden_size=13,
    latent_size=7,
    router=RouterConfig(score="sigmoid", expert_bias=True, routed_scaling_factor=2.5),
)
KINDS = {
    "latent": LATENT,
    "latent, groups": replace(
        LATENT, num_experts=8, top_k=4, router=replace(LATENT.router, num_groups=4, topk_groups=2)
    ),
    "latent, weights not renormalized": replace(
        LATENT, router=replace(LATENT.router, norm_topk_prob=False)
    ),
    "all features": replace(LATENT, latent_size=None),
}
MODEL = ModelConfig(
    vocab_size=8,
    hidden_size=18,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    ffn_hidden_size=8,
    gated=False,
    activation="squared_relu",
)


def theirs_of(moe: MoEConfig) -> Any:
    """NemotronH's layer of these sizes, every weight and the balancing bias random."""
    pytest.importorskip("transformers", reason="compares with transformers, which is not installed")
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    assert moe.shared_ffn_hidden_size is not None
    config = NemotronHConfig(
        hidden_size=MODEL.hidden_size,
        layers_block_type=["moe"],
        mlp_hidden_act="relu2",
        n_routed_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        moe_intermediate_size=moe.ffn_hidden_size,
        moe_shared_expert_intermediate_size=moe.shared_ffn_hidden_size,
        moe_latent_size=moe.latent_size,
        routed_scaling_factor=moe.router.routed_scaling_factor,
        norm_topk_prob=moe.router.norm_topk_prob,
        n_group=moe.router.num_groups or 1,
        topk_group=moe.router.topk_groups or 1,
    )
    layer, draw = NemotronHMoE(config), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, 0.4, generator=draw)
        layer.gate.e_score_correction_bias.normal_(0.0, 0.2, generator=draw)
    return layer


def ours_of(moe: MoEConfig) -> MoE:
    mesh = build_single_rank_mesh()
    layer = MoE("layers.0.moe", MODEL, moe, build_context(MODEL, mesh, dtype=torch.float32))
    allocate(layer, torch.device("cpu"))
    initialize(layer, seed=3)
    return layer


def pairs(ours: MoE, theirs: Any) -> dict[str, tuple[Any, Any]]:
    """Our parameters and theirs, which lie alike in memory."""
    (shared,) = ours.shared
    mlp: Any = shared.mlp
    result = {
        "router": (ours.router.gate.router, theirs.gate.weight),
        "experts.up": (ours.experts.up.up, theirs.experts.up_proj),
        "experts.down": (ours.experts.down.down, theirs.experts.down_proj),
        "shared.up": (mlp.up.up, theirs.shared_experts.up_proj.weight),
        "shared.down": (mlp.down.down, theirs.shared_experts.down_proj.weight),
    }
    if ours.router.moe.latent_size is not None:
        result["latent_in"] = ours.narrow.latent_in, theirs.fc1_latent_proj.weight
        result["latent_out"] = ours.widen.latent_out, theirs.fc2_latent_proj.weight
    return result


def close(a: Tensor, b: Tensor, name: str) -> None:
    assert bool(b.any()) and relative_error(a.reshape(b.shape), b) <= PARITY.relative, name


@pytest.mark.parametrize("moe", KINDS.values(), ids=KINDS)
def test_layer_and_gradients_match_nemotron_h_of_transformers(
    moe: MoEConfig,
) -> None:
    reference, ours = theirs_of(moe), ours_of(moe)
    both = pairs(ours, reference)
    with torch.no_grad():
        for actual, other in both.values():
            actual.copy_(other.reshape(actual.shape))
        assert ours.router.expert_bias is not None
        ours.router.expert_bias.copy_(reference.gate.e_score_correction_bias)
    assert {id(actual) for actual, _ in both.values()} == {
        id(one) for one in ours.parameters() if one.requires_grad
    }
    assert {id(other) for _, other in both.values()} == {id(one) for one in reference.parameters()}
    draw = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, 10, 18, generator=draw), torch.randn(2, 10, 18, generator=draw)
    actual, other = x.flatten(0, 1).requires_grad_(), x.clone().requires_grad_()
    y, expected = ours(actual, LayerInputs(seq_params_from_rows(2, 10))), reference(other)
    close(y.detach(), expected.detach(), "y")
    y.backward(dy.flatten(0, 1))
    expected.backward(dy)
    assert actual.grad is not None and other.grad is not None
    close(actual.grad, other.grad, "x")
    for name, (weight, its) in both.items():
        close(weight.grad, its.grad, name)
