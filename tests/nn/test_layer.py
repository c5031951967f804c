"""MoE layer matches a loop over tokens; experts without rows, over capacity, or with latent
features."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.moe import CapacityConfig, MoEConfig, RouterConfig
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs, RouterInputs, RoutingDecisions
from megalith.kernels.packed import seq_params_from_rows
from megalith.kernels.routing import DROPPED_CHOICE, Choice, expert_weights, score_experts
from megalith.models.decoder import allocate, initialize
from megalith.nn.build import build_context
from megalith.nn.moe import MoE, Router
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.parallel.recompute import Recomputed

MODEL = ModelConfig(
    vocab_size=8, hidden_size=12, num_layers=2, num_heads=2, num_kv_heads=1, ffn_hidden_size=8
)
MOE = MoEConfig(num_experts=5, top_k=2, ffn_hidden_size=7)


def build(moe: MoEConfig, model: ModelConfig = MODEL) -> MoE:
    mesh = build_single_rank_mesh()
    layer = MoE("layers.0.moe", model, moe, build_context(model, mesh, dtype=torch.float64))
    allocate(layer, torch.device("cpu"))
    initialize(layer, seed=3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(
                torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
                )
            )
    return layer


def training(rows: int = 1, length: int = 9) -> LayerInputs:
    return LayerInputs(
        seq_params_from_rows(rows, length),
        router_inputs=RouterInputs(AuxLossScale(0, 1, 1.0)),
    )


def plain(layer: MoE, x: Tensor, moe: MoEConfig) -> Tensor:
    """Token by token, expert by expert: softmax, renormalized, SwiGLU."""
    scores = (x @ layer.router.gate.router.t()).softmax(1)
    up = layer.experts.up.gate_up.view(moe.num_experts, 2, moe.ffn_hidden_size, -1)
    down = layer.experts.down.down.view(moe.num_experts, -1, moe.ffn_hidden_size)
    out = []
    for token, row in zip(x, scores, strict=True):
        chosen = row.topk(moe.top_k)
        parts = [
            weight
            / chosen.values.sum()
            * (down[e] @ (torch.nn.functional.silu(up[e, 0] @ token) * (up[e, 1] @ token)))
            for weight, e in zip(chosen.values, chosen.indices, strict=True)
        ]
        out.append(torch.stack(parts).sum(0))
    return torch.stack(out)


def test_the_layer_is_the_weighted_sum_of_the_chosen_experts() -> None:
    layer, x = build(MOE), torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    y, expected = layer(x, training()), plain(layer, other, MOE)
    assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    results = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()
    expected.square().sum().backward()
    assert torch.allclose(x.grad, other.grad, rtol=1e-10)  # type: ignore[arg-type]
    for name, parameter in layer.named_parameters():
        assert torch.allclose(results[name], parameter.grad, rtol=1e-10), name  # type: ignore[arg-type]


def test_all_tokens_may_go_to_one_expert_and_none_to_others() -> None:
    layer = build(replace(MOE, top_k=1, router=RouterConfig(norm_topk_prob=False, bias=True)))
    with torch.no_grad():
        layer.router.router_bias.copy_(torch.tensor([0, 0, 1e6, 0, 0]))  # type: ignore[operator]
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    layer(x, training()).sum().backward()
    gradient = layer.experts.up.gate_up.grad.view(5, -1)  # type: ignore[union-attr]
    assert [bool(part.any()) for part in gradient] == [False, False, True, False, False]
    assert layer.router.balance.record is not None
    assert layer.router.balance.record.counts.tolist() == [[0, 0, 9, 0, 0]]


def test_large_capacity_drops_no_tokens() -> None:
    x = torch.randn(9, 12, dtype=torch.float64)
    roomy = build(replace(MOE, capacity=CapacityConfig(factor=5.0)))
    assert torch.equal(roomy(x, training()), build(MOE)(x, training()))


def test_dispatched_rows_are_recomputed_and_not_saved() -> None:
    layer, x = build(MOE), torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        layer(x, training()).sum().backward()
    shapes = {tuple(tensor.shape) for tensor in kept if tensor.is_floating_point()}
    assert (9, 12) in shapes and (18, 14) in shapes, (
        "the tokens, and what gate and up gave of their rows"
    )
    assert (18, 12) not in shapes and x.grad is not None


@pytest.mark.parametrize("factor", [0.4, 1.0, 9.0])
def test_padding_does_not_change_the_output(factor: float) -> None:
    results = []
    for pad in (False, True):
        layer = build(replace(MOE, biases=True, capacity=CapacityConfig(factor=factor, pad=pad)))
        x = torch.randn(
            9,
            12,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(4),
            requires_grad=True,
        )
        sent, _ = layer.dispatch_within_capacity(x, layer.router(x, training())).wait()
        assert not pad or sent.groups.on_host() == (min(9, math.ceil(9 * 2 / 5 * factor)),) * 5
        y = layer(x, training())
        y.square().sum().backward()
        gradients = [
            parameter.grad for parameter in layer.parameters() if parameter.grad is not None
        ]
        results.append([y, x.grad, *gradients, layer(x, LayerInputs(seq_params_from_rows(1, 9)))])
    assert len(results[0]) == len(results[1])
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(*results, strict=True))


def test_dropped_choices_give_zero_and_no_gradient() -> None:
    layer = build(
        replace(
            MOE,
            num_experts=1,
            top_k=1,
            router=RouterConfig(score="sigmoid", norm_topk_prob=False),
            capacity=CapacityConfig(factor=0.5, drop="last"),
        )
    )
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    y = layer(x, training())
    assert [bool(row.any()) for row in y] == [True] * 5 + [False] * 4
    y.sum().backward()
    assert [bool(row.any()) for row in x.grad] == [True] * 5 + [False] * 4  # type: ignore[union-attr]
    assert layer.router.balance.record is not None
    assert layer.router.balance.record.num_dropped.tolist() == [4]
    assert bool(layer(x, LayerInputs(seq_params_from_rows(1, 9))).any(1).all()), (
        "nothing is num_dropped outside training"
    )


def test_shared_experts_are_added_to_routed_experts() -> None:
    x = torch.randn(9, 12, dtype=torch.float64)
    layer = build(replace(MOE, shared_ffn_hidden_size=6, shared_gate=True))
    (shared,) = layer.shared
    alone = layer(x, training()) - shared(x, training())
    assert torch.allclose(alone, plain(layer, x, MOE), rtol=1e-10)
    gate = (x @ shared.weigh[0].shared_gate.t()).sigmoid()
    assert torch.allclose(shared(x, training()), gate * shared.mlp(x), rtol=1e-12)


def test_experts_with_latent_features() -> None:
    layer, x = build(replace(MOE, latent_size=4)), torch.randn(9, 12, dtype=torch.float64)
    narrow = x @ layer.narrow.latent_in.t()
    rows = replace(MOE)
    scores = layer.router(x, training())
    up = layer.experts.up.gate_up.view(5, 2, 7, 4)
    down = layer.experts.down.down.view(5, 4, 7)
    expected = torch.zeros_like(narrow)
    for t in range(9):
        for k in range(rows.top_k):
            e = int(scores.experts[t, k])
            inner = torch.nn.functional.silu(up[e, 0] @ narrow[t]) * (up[e, 1] @ narrow[t])
            expected[t] += scores.weights[t, k] * (down[e] @ inner)
    assert torch.allclose(layer(x, training()), expected @ layer.widen.latent_out.t(), rtol=1e-10)


def test_router_weight_may_multiply_the_input() -> None:
    layer = build(
        replace(
            MOE,
            top_k=1,
            apply_router_weight_on_input=True,
            router=RouterConfig(score="sigmoid", norm_topk_prob=False),
        )
    )
    x = torch.randn(3, 12, dtype=torch.float64)
    choice = layer.router(x, training(1, 3))
    up, down = layer.experts.up.gate_up.view(5, 2, 7, 12), layer.experts.down.down.view(5, 12, 7)
    for t in range(3):
        e, token = int(choice.experts[t, 0]), x[t] * choice.weights[t, 0]
        expected = down[e] @ (torch.nn.functional.silu(up[e, 0] @ token) * (up[e, 1] @ token))
        assert torch.allclose(layer(x, training(1, 3))[t], expected, rtol=1e-10)


@pytest.mark.parametrize("gated", [True, False])
def test_expert_biases_are_weighted_like_outputs(gated: bool) -> None:
    alone = RouterConfig(score="sigmoid", norm_topk_prob=False)
    model = replace(MODEL, gated=gated, activation="silu" if gated else "squared_relu")
    layer = build(replace(MOE, num_experts=1, top_k=1, biases=True, router=alone), model)
    x = torch.randn(4, 12, dtype=torch.float64)
    word = "gate_up" if gated else "up"
    wide = x @ getattr(layer.experts.up, word).t() + getattr(layer.experts.up, f"{word}_bias")
    inner = torch.nn.functional.silu(wide[:, :7]) * wide[:, 7:] if gated else wide.relu() ** 2
    weight = (x @ layer.router.gate.router.t()).sigmoid()
    expected = weight * (inner @ layer.experts.down.down.t() + layer.experts.down.down_bias)
    assert torch.allclose(layer(x, training(1, 4)), expected, rtol=1e-10)


class Flipping(Router):
    """Router that shifts the chosen experts by one more index in every call."""

    calls = 0

    def choose(self, logits: Tensor, *, training: bool) -> Choice:
        moe = self.moe
        experts = (
            super().choose(logits.detach(), training=training).experts + self.calls
        ) % moe.num_experts
        self.calls += 1
        return Choice(
            experts,
            expert_weights(logits, score_experts(logits, moe.router.score), experts, moe.router),
        )


@pytest.mark.parametrize("capacity", [None, 0.6])
def test_recomputation_repeats_routing_decisions(capacity: float | None) -> None:
    moe, x = (
        replace(MOE, capacity=CapacityConfig(factor=capacity)),
        torch.randn(9, 12, dtype=torch.float64),
    )
    gradients, calls = [], []
    for again in (False, True):
        layer = build(moe)
        layer.router.__class__ = Flipping
        local = x.clone().requires_grad_()
        run = Recomputed(layer) if again else layer
        for _ in range(2):  # a second microbatch decides for itself
            run(local, training()).square().sum().backward()
        gradients.append([local.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
        calls.append(layer.router.calls)
    assert calls == [2, 2]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_dropped_choices_are_recorded_with_chosen_experts() -> None:
    decided, chosen = RoutingDecisions(), torch.tensor([[0, 3], [2, 1]])
    assert decided.chosen("layers.0") is None and decided.kept("layers.0") is None
    decided.record("layers.0", chosen, torch.tensor([[DROPPED_CHOICE, 3], [2, DROPPED_CHOICE]]))
    assert torch.equal(decided.chosen("layers.0"), chosen)  # type: ignore[arg-type]  # it is there
    assert decided.kept("layers.0").tolist() == [[False, True], [True, False]]  # type: ignore[union-attr]  # the same
