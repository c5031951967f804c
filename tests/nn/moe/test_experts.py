"""Experts' matrices: whose part they are, and the same first values however they are divided."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.grouped_linear import groups_of
from megalith.models.decoder import allocate, declared_parameters, initialise
from megalith.nn.moe.experts import Experts
from megalith.parallel.expert import Sent
from megalith.parallel.mesh import mesh_of_one, mesh_on_paper, model_grid
from megalith.plan.shards import copies

MOE = MoEConfig(experts=4, top_k=2, ffn_hidden_size=7)
MODEL = ModelConfig(
    vocab_size=8, hidden_size=6, num_layers=2, num_heads=2, num_kv_heads=2, ffn_hidden_size=8, init_std=1.0, moe=MOE
)


def built(parallel: ParallelConfig, world: int, rank: int, moe: MoEConfig = MOE) -> Experts:
    mesh = mesh_of_one() if world == 1 else mesh_on_paper(model_grid(parallel, MODEL, world), rank=rank)
    experts = Experts("layers.0.moe.experts", MODEL, moe, mesh, dtype=torch.float64)
    allocate(experts, torch.device("cpu"))
    initialise(experts, seed=5)
    return experts


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("etp", [1, 2])
def test_a_rank_holds_its_part_of_the_same_first_weights(ep: int, etp: int) -> None:
    whole = {declared.shard.name: getattr(module, name) for declared, module, name in _parameters(built_alone())}
    for rank in range(4):
        for declared, module, name in _parameters(built(ParallelConfig(dp=4, ep=ep, etp=etp), 4, rank)):
            shard = declared.shard
            box = tuple(slice(start, stop) for start, stop in shard.box)
            expected = whole[shard.name].view(shard.shape)[box].reshape(shard.matrix_shape)
            assert torch.equal(getattr(module, name), expected), shard
            assert shard.grid == "expert" and copies(shard) == ("edp_replica", "edp_shard")


def built_alone() -> Experts:
    return built(ParallelConfig(), 1, 0)


def _parameters(experts: Experts) -> list[Any]:
    return list(declared_parameters(experts))


def test_a_weight_multiplies_what_its_expert_gives() -> None:
    experts, rows = built_alone(), torch.randn(5, 6, dtype=torch.float64)
    groups, ones = groups_of([2, 0, 3, 0]), torch.ones(5, dtype=torch.float64)
    plain = experts(Sent(rows, ones, groups))
    doubled = experts(Sent(rows, ones * torch.tensor([2.0, 1, 0, 1, 1]), groups))
    assert torch.allclose(doubled, plain * torch.tensor([[2.0], [1], [0], [1], [1]]), rtol=1e-12)


def test_no_rows_at_all_are_no_rows() -> None:
    experts = built_alone()
    out = experts(Sent(torch.empty(0, 6, dtype=torch.float64), torch.empty(0, dtype=torch.float64), groups_of([0] * 4)))
    assert out.shape == (0, 6)
    out.sum().backward()
    assert experts.up.gate_up.grad is not None and not experts.up.gate_up.grad.any()  # type: ignore[union-attr]


def test_biases_belong_to_experts() -> None:
    names = {d.shard.name for d, _, _ in declared_parameters(built(ParallelConfig(), 1, 0, replace(MOE, biases=True)))}
    assert {name.rsplit(".", 1)[1] for name in names} == {"gate_up", "gate_up_bias", "down", "down_bias"}
