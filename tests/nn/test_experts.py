"""Experts: rows of each, expert parallel and expert tensor parallel ranks, and initialization."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.grouped_linear import Groups
from megalith.models.decoder import allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.nn.moe import Experts, weighted_activation
from megalith.parallel.expert import DispatchedTokens
from megalith.parallel.mesh import build_meta_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid

MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=7)
MODEL = ModelConfig(
    vocab_size=8,
    hidden_size=6,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    ffn_hidden_size=8,
    init_std=0.5,
    moe=MOE,
)
COUNTS: tuple[int, ...] = (3, 0, 2, 1)


def build(
    moe: MoEConfig = MOE,
    model: ModelConfig = MODEL,
    parallel: ParallelConfig | None = None,
    *,
    rank: int = 0,
) -> Experts:
    """Experts of one of the ranks, without processes, and with their first weights."""
    world = 1 if parallel is None else parallel.dp or 1
    mesh = (
        build_single_rank_mesh()
        if parallel is None
        else build_meta_mesh(model_grid(parallel, model, world), rank=rank)
    )
    layer = Experts(
        "layers.0.moe.num_experts", model, moe, build_context(model, mesh, dtype=torch.float64)
    )
    allocate(layer, torch.device("cpu"))
    initialize(layer, seed=3)
    return layer


def sent(counts: tuple[int, ...] = COUNTS, features: int = 6) -> DispatchedTokens:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), features, dtype=torch.float64, generator=draw)
    return DispatchedTokens(
        rows, torch.rand(sum(counts), dtype=torch.float64, generator=draw), Groups(counts)
    )


def of_one_expert(layer: Experts, e: int, x: Tensor) -> Tensor:
    """The MLP of an expert, by its formula."""
    up = layer.up.gate_up.view(-1, 2, 7, x.shape[1])[e]  # type: ignore[operator]  # a parameter
    down = layer.down.down.view(-1, x.shape[1], 7)[e]  # type: ignore[operator]  # a parameter
    return (torch.nn.functional.silu(x @ up[0].t()) * (x @ up[1].t())) @ down.t()


def test_each_row_is_processed_by_its_expert_and_weighted_once() -> None:
    layer, given = build(), sent()
    parts = [of_one_expert(layer, e, x) for e, x in enumerate(given.rows.split(COUNTS))]
    assert torch.allclose(layer(given), torch.cat(parts) * given.weights.unsqueeze(1), rtol=1e-12)


def test_router_weight_on_input_is_applied_once() -> None:
    layer, given = build(replace(MOE, top_k=1, apply_router_weight_on_input=True)), sent()
    weighed = given.rows * given.weights.unsqueeze(1)
    parts = [of_one_expert(layer, e, x) for e, x in enumerate(weighed.split(COUNTS))]
    assert torch.allclose(layer(given), torch.cat(parts), rtol=1e-12)


@pytest.mark.parametrize("ep", [2, 4])
def test_expert_parallel_ranks_have_the_same_initial_experts(
    ep: int,
) -> None:
    """So that runs with other ep can be compared, which the original's could not."""
    whole, given = build(), sent()
    each, rows = 4 // ep, given.rows.split(COUNTS)
    for rank in range(ep):
        local = slice(rank * each, (rank + 1) * each)
        layer = build(parallel=ParallelConfig(dp=ep, ep=ep), rank=rank)
        assert torch.equal(layer.down.down.view(each, -1), whole.down.down.view(4, -1)[local])  # type: ignore[operator]
        counts = COUNTS[local]
        weights = given.weights.split(COUNTS)[local]
        y = layer(DispatchedTokens(torch.cat(rows[local]), torch.cat(weights), Groups(counts)))
        assert torch.allclose(y, torch.cat(whole(given).split(COUNTS)[local]), rtol=1e-12)


def test_expert_tensor_parallel_outputs_sum_to_the_full_output() -> None:
    whole, given = build(), sent()
    parts = [build(parallel=ParallelConfig(dp=3, etp=3), rank=rank)(given) for rank in range(3)]
    assert torch.allclose(torch.stack(parts).sum(0), whole(given), rtol=1e-12)


def test_expert_parameters_use_the_expert_grid_and_mlp_init() -> None:
    layer = build(replace(MOE, biases=True, num_experts=40), replace(MODEL, hidden_size=64))
    results = {
        declared.shard.name.rsplit(".", 1)[1]: (declared, module, name)
        for declared, module, name in iter_parameter_specs(layer)
    }
    assert set(results) == {"gate_up", "gate_up_bias", "down", "down_bias"}
    assert {declared.shard.grid for declared, _, _ in results.values()} == {"expert"}
    stds = {
        kind: float(getattr(module, name).detach().std())
        for kind, (_, module, name) in results.items()
    }
    assert stds["gate_up"] == pytest.approx(0.5, rel=0.05)
    assert stds["down"] == pytest.approx(0.5 / math.sqrt(2 * MODEL.num_layers), rel=0.05)
    assert stds["gate_up_bias"] == stds["down_bias"] == 0


def test_no_rows_give_zero_gradients() -> None:
    layer = build()
    layer(sent((0, 0, 0, 0))).sum().backward()
    for _, module, name in iter_parameter_specs(layer):
        gradient = getattr(module, name).grad
        assert gradient is not None and not gradient.any()


@pytest.mark.parametrize("gated", [True, False])
def test_the_activation_is_that_of_the_models_mlp_times_the_weight(gated: bool) -> None:
    inner = weighted_activation(replace(MODEL, gated=gated, activation="silu" if gated else "relu"))
    x, w = torch.randn(3, 8, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    plain = torch.nn.functional.silu(x[:, :4]) * x[:, 4:] if gated else x.relu()
    assert torch.allclose(inner(x, w), plain * w.unsqueeze(1), rtol=1e-12)
