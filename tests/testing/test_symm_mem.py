"""Torch's fused products as defined for CPUs: there while it lasts, and a gather followed by a
product."""

import torch
from torch import Tensor

from megalith.parallel import tensor_overlap
from megalith.testing.inject import fused_on_cpus
from megalith.testing.ranks import run_ranks, world_group


def products(rank: int, world: int) -> tuple[Tensor, Tensor]:
    group = world_group(rank, world, "tp")
    x = torch.arange(6, dtype=torch.float64).view(2, 3) + rank
    w = torch.eye(3, dtype=torch.float64) * 2
    with fused_on_cpus():
        whole, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, group.name)
    return whole, product


def test_fallback_gathers_and_multiplies_all_parts() -> None:
    for whole, product in run_ranks(products, 2):
        expected = torch.cat(
            [torch.arange(6, dtype=torch.float64).view(2, 3) + rank for rank in range(2)]
        )
        assert torch.equal(whole, expected) and torch.equal(product, 2 * expected)


def test_availability_check_is_restored_after_the_context() -> None:
    before = tensor_overlap.find_fusion_obstacle
    with fused_on_cpus():
        assert tensor_overlap.find_fusion_obstacle([]) is None
    assert tensor_overlap.find_fusion_obstacle is before
