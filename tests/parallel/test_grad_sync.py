"""What both engines do: slices that tensor-parallel ranks or stages share are summed, and compared
beforehand."""

import random
from dataclasses import replace

import pytest
import torch

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import RankError
from megalith.parallel.grad_sync import (
    ShardedParam,
    SharedGradients,
    can_shard_weights,
    check_slices_consistent_across_ranks,
    sum_bits,
    warn_unused_params,
)
from megalith.parallel.mesh import Mesh, build_mesh, build_meta_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import PARTS, Shard
from megalith.testing.ranks import run_ranks
from megalith.verify.matrix import BIASED_CHOICE, PLAIN

SHARDS = (
    Shard.full("invariant", (3,), invariant=frozenset(PARTS["tp"]), inputs=0),
    Shard.full("norm", (3,), inputs=0),
    replace(Shard.full("shared_head", (2, 3)), cut=("tp_kv",)),
    replace(Shard.full("own_head", (2, 3)), cut=PARTS["tp"]),
    replace(Shard.full("table", (5,), invariant=frozenset(PARTS["tp"]), inputs=0), stages=(0, 1)),
)


def mesh_of(parallel: ParallelConfig, rank: int, world: int) -> Mesh:
    config = ModelConfig(
        vocab_size=30, hidden_size=12, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_size=10
    )
    return build_mesh(model_grid(parallel, config, world), rank=rank)


def sharded_param(shard: Shard, value: float) -> ShardedParam:
    return ShardedParam(
        shard, torch.zeros(shard.matrix_shape), torch.full(shard.matrix_shape, value)
    )


def _summed(rank: int, world: int, parallel: ParallelConfig, names: tuple[str, ...]) -> list[float]:
    """One element of each gradient, of which rank r has 10**r."""
    local = [sharded_param(shard, 10.0**rank) for shard in SHARDS if shard.name in names]
    SharedGradients(local, mesh_of(parallel, rank, world)).all_reduce()
    assert all(bool(each.gradient.eq(each.gradient.flatten()[0]).all()) for each in local)
    return [each.gradient.flatten()[0].item() for each in local]


def test_gradients_of_replicated_slices_are_summed_over_tensor_parallel_ranks() -> None:
    names = ("invariant", "norm", "shared_head", "own_head")
    results = run_ranks(_summed, 4, ParallelConfig(tp=4), names)
    pairs = [11.0, 11.0, 1100.0, 1100.0]  # ranks 0 and 1 share a key/value head, 2 and 3 the other
    assert results == [[10.0**rank, 1111.0, pairs[rank], 10.0**rank] for rank in range(4)]


def test_gradients_are_summed_over_the_stages_that_hold_the_same_slice() -> None:
    parallel = ParallelConfig(pp=2)
    assert run_ranks(_summed, 2, parallel, ("invariant", "table")) == [[1.0, 11.0], [10.0, 11.0]]


def _compared(rank: int, world: int, parallel: ParallelConfig, name: str) -> None:
    shard = next(shard for shard in SHARDS if shard.name == name)
    mesh = mesh_of(parallel, rank, world)
    check_slices_consistent_across_ranks([sharded_param(replace(shard, flat=(0, 2)), 0.0)], mesh)
    check_slices_consistent_across_ranks(
        [sharded_param(replace(shard, flat=(rank, 2 + rank)), 0.0)], mesh
    )


@pytest.mark.parametrize(
    ("parallel", "name", "message"),
    [
        (
            ParallelConfig(tp=2),
            "norm",
            r"elements \(0, 2\) on rank 0 and norm elements \(1, 3\) on rank 1",
        ),
        (
            ParallelConfig(pp=2),
            "table",
            r"elements \(0, 2\), held by stages \(0, 1\) on rank 0 and table",
        ),
    ],
)
def test_summed_slices_must_be_equal_on_ranks(
    parallel: ParallelConfig, name: str, message: str
) -> None:
    with pytest.raises(
        RankError, match=f"lay out differently; the first difference is {name} {message}"
    ):
        run_ranks(_compared, 2, parallel, name)


def test_slices_that_are_not_summed_may_differ() -> None:
    run_ranks(_compared, 2, ParallelConfig(tp=2), "invariant")


def test_unused_parameters_are_named_up_to_ten(caplog: pytest.LogCaptureFixture) -> None:
    assert not warn_unused_params([])
    assert warn_unused_params([f"w{i}" for i in range(10)]) and warn_unused_params(
        [f"w{i}" for i in range(12)]
    )
    ten, twelve = (record.getMessage() for record in caplog.records)
    assert ten.startswith("w0, w1, w2, w3, w4, w5, w6, w7, w8, w9 had no gradient in this step")
    assert "w8, w9 and 2 more had no gradient" in twelve


def test_weights_are_sharded_where_several_ranks_hold_the_same() -> None:
    def mesh(tp: int, etp: int, *, experts: bool) -> Mesh:
        parallel = ParallelConfig(tp=tp, sp=tp > 1, etp=etp if experts else None)
        return build_meta_mesh(model_grid(parallel, BIASED_CHOICE if experts else PLAIN, 2), rank=0)

    assert can_shard_weights(mesh(1, 1, experts=False)) and not can_shard_weights(
        mesh(2, 1, experts=False)
    )
    assert can_shard_weights(mesh(2, 1, experts=True)), (
        "experts lie whole on both of the ranks that divide everything else"
    )
    assert not can_shard_weights(mesh(2, 2, experts=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sum_over_bits_changes_with_any_single_bit(dtype: torch.dtype) -> None:
    for seed in range(200):
        choose = random.Random(seed)
        start, numel = choose.randrange(9), choose.randrange(1, 40)
        memory = torch.randn(start + numel, dtype=torch.float64).to(dtype)
        tensor = memory[start:]  # not aligned to words of 8 bytes
        before = int(sum_bits(tensor))
        assert before == int(sum_bits(memory.clone()[start:])), seed
        data = tensor.view(torch.uint8)
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        assert int(sum_bits(tensor)) != before, seed
    assert int(sum_bits(torch.empty(0, dtype=dtype))) == 0
