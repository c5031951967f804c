"""Tests of megalith/plan/grid.py."""

import pytest

from megalith.config.model import ModelConfig
from megalith.config.parallel import ContextConfig, ParallelConfig
from megalith.errors import PlanError
from megalith.plan.grid import min_world_size, model_grid

MODEL = ModelConfig(
    vocab_size=99, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=2, ffn_hidden_size=64
)


def test_grid_has_whole_and_factored_axes() -> None:
    parallel = ParallelConfig(
        tp=4, cp=6, context=ContextConfig(kind="a2a+ring", a2a=2), pp=2, dp_replicate=3, zero=1
    )
    grid = model_grid(parallel, MODEL, 4 * 6 * 2 * 9)
    sizes = {axis: grid.size(axis) for axis in grid.names}
    assert sizes == {
        "tp_copy": 2,
        "tp_kv": 2,
        "tp": 4,
        "cp_a2a": 2,
        "cp_ring": 3,
        "cp": 6,
        "dp_shard": 3,
        "dp_replica": 3,
        "dp": 9,
        "pp": 2,
    }


@pytest.mark.parametrize("kind, inner", [("ring", 1), ("gather", 1), ("a2a", 4)])
def test_context_parallel_kind_determines_the_all_to_all_ranks(kind: str, inner: int) -> None:
    parallel = ParallelConfig(cp=4, context=ContextConfig(kind=kind))  # type: ignore[arg-type]
    assert model_grid(parallel, MODEL, 4).size("cp_a2a") == inner


def test_context_parallel_kind_has_no_effect_without_cp() -> None:
    parallel = ParallelConfig(context=ContextConfig(kind="a2a+ring", a2a=2))
    assert model_grid(parallel, MODEL, 2).size("cp_a2a") == 1


def test_a_world_that_does_not_fit_is_rejected_with_one_that_does() -> None:
    with pytest.raises(PlanError) as error:
        model_grid(ParallelConfig(tp=4, cp=2), MODEL, 12)
    assert "use 8 or 16 processes" in str(error.value)


def test_default_world_is_the_smallest_for_the_layout() -> None:
    assert min_world_size(ParallelConfig(tp=2, cp=3, pp=4)) == 24
    assert min_world_size(ParallelConfig(tp=2, dp=5)) == 10
    assert min_world_size(ParallelConfig(zero=1, dp_replicate=4)) == 4
