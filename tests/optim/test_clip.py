"""The norm is that of all gradients, each element once; the factor never enlarges."""

from dataclasses import replace

import pytest
import torch

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.optim.clip import clip_factor, first_replica_gradients, num_zeros, sum_of_squares
from megalith.optim.slots import find_first_replicas
from megalith.parallel.mesh import build_meta_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import Shard

CPU = torch.device("cpu")


def test_norm_matches_torch() -> None:
    gradients = [torch.randn(5, 3), torch.randn(7)]
    pairs = [
        (Shard.full("a", (5, 3)), gradients[0]),
        (Shard.full("b", (7,), inputs=0), gradients[1]),
    ]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    norm = sum_of_squares(first_replica_gradients(pairs, {"a", "b"}), CPU).sqrt()
    assert norm.dtype == torch.float64
    assert torch.allclose(norm.float(), expected)
    factor = clip_factor(norm, 1.0)
    assert factor is not None
    assert torch.allclose((gradients[0] * factor).float(), parameters[0].grad)


def test_small_gradients_are_not_clipped_and_zero_disables_clipping() -> None:
    factor = clip_factor(torch.tensor(0.5, dtype=torch.float64), 1.0)
    assert factor is not None
    assert float(factor) == 1.0
    assert clip_factor(torch.tensor(5.0), 0.0) is None


def test_squares_are_summed_in_float64_for_any_size() -> None:
    for numel in (0, 1, 63, 64, 65, 300_001):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        result = sum_of_squares([gradient, gradient[:5]], CPU)
        expected = gradient.double().square().sum() + gradient[:5].double().square().sum()
        assert result.dtype == torch.float64
        assert float(result) == pytest.approx(float(expected), rel=5e-7)
    assert float(sum_of_squares([], CPU)) == 0.0


def test_sum_over_slices_matches_the_whole_within_rounding() -> None:
    """So that clipping does not depend on who owns what."""
    gradient = torch.randn(64 * 1000 + 17, generator=torch.Generator().manual_seed(1))
    whole_sum = sum_of_squares([gradient], CPU)
    for cuts in ([64], [640, 6400], [64 * 999]):
        parts = torch.tensor_split(gradient, cuts)
        assert float(sum(sum_of_squares([part], CPU) for part in parts)) == pytest.approx(
            float(whole_sum), rel=1e-14
        )


def test_slice_boundary_inside_a_row_changes_only_rounding() -> None:
    """As a slice does of weights that lie without gaps in one bucket."""
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    whole_sum = float(sum_of_squares([gradient], CPU))
    for cut in (5, 33, 1666, 2501):
        result = sum(
            float(sum_of_squares([part], CPU)) for part in torch.tensor_split(gradient, [cut])
        )
        assert 1e-12 < abs(result / whole_sum - 1) < 1e-8


def test_zeros_are_counted_once_each() -> None:
    assert int(num_zeros([torch.tensor([0.0, 1.0, -0.0]), torch.zeros(2, 3)], CPU)) == 8
    assert int(num_zeros([], CPU)) == 0


MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_hidden_size=8
)
LAYOUTS = [
    ParallelConfig(dp=2),
    ParallelConfig(tp=4, dp=2, zero=1),
    ParallelConfig(dp=6, zero=1, dp_replicate=3),
    ParallelConfig(tp=2, cp=2, dp=2, zero=1),
    ParallelConfig(pp=2, dp=2, zero=2),
    ParallelConfig(pp=2, tp=2),
]


def held(parallel: ParallelConfig, coordinates: dict[str, int]) -> list[Shard]:
    """A matrix cut over tp_kv, a vector that all have, and a table that the first and last stage
    share; 60 elements."""
    row = coordinates["tp_kv"]
    parts = {1: [(0, 10)], 2: [(0, 5), (5, 10)]}[2 if parallel.tp > 1 else 1]
    shards = [
        Shard("w", (10, 2), box=(parts[row], (0, 2)), cut=("tp_kv",)),
        Shard.full("n", (16,), inputs=0),
    ]
    shards = [
        replace(shard, stages=(coordinates["pp"],)) for shard in shards if coordinates["pp"] == 0
    ]
    shards.append(replace(Shard.full("t", (6, 4)), stages=tuple(range(parallel.pp))))
    if parallel.zero == 0:
        return shards
    ranks = (parallel.dp or 1) // parallel.dp_replicate * parallel.cp
    place = coordinates["dp_shard"] * parallel.cp + coordinates["cp_ring"]
    flat = [(shard.numel * place // ranks, shard.numel * (place + 1) // ranks) for shard in shards]
    axes = ("dp_shard", "cp_ring", "cp_a2a")
    return [replace(s, flat=f, cut=(*s.cut, *axes)) for s, f in zip(shards, flat, strict=True)]


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_all_ranks_together_count_every_element_once(parallel: ParallelConfig) -> None:
    world = parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1)
    grid = model_grid(parallel, MODEL, world)
    total = 0
    for rank in range(world):
        mesh = build_meta_mesh(grid, rank=rank)
        shards = held(parallel, mesh.coordinates)
        pairs = [
            (shard, torch.ones(shard.flat[1] - shard.flat[0] if shard.flat else shard.numel))
            for shard in shards
        ]
        total += sum(
            gradient.numel()
            for gradient in first_replica_gradients(pairs, find_first_replicas(shards, mesh))
        )
    assert total == 20 + 16 + 24
