"""Tests of megalith/plan/parameters.py."""

from dataclasses import replace

import pytest

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.models.decoder import Decoder, declared_parameters
from megalith.parallel.mesh import mesh_on_paper, model_grid
from megalith.parallel.tensor import TensorParallel
from megalith.plan.costs import num_parameters
from megalith.plan.parameters import held_parameters, tensor_part

SMALL = ModelConfig(
    vocab_size=999, hidden_size=96, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16, ffn_hidden_size=201
)
VARIANTS = [
    SMALL,
    replace(SMALL, tied_embeddings=True),
    replace(SMALL, qkv_bias=True, output_bias=True, mlp_bias=True),
    replace(SMALL, num_kv_heads=8, head_dim=None, vocab_multiple=1),
]


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_a_rank_holds_what_the_model_declares_in_its_order(config: ModelConfig, tp: int) -> None:
    if tp == 3:
        config = replace(config, num_heads=9, num_kv_heads=3, head_dim=16)
    grid = model_grid(ParallelConfig(tp=tp), config, tp)
    for rank in range(tp):
        model = Decoder(config, mesh_on_paper(grid, rank=rank))
        built = [(one.shard.name, one.shard.matrix_shape) for one, _, _ in declared_parameters(model)]
        held = held_parameters(config, tp=tp, tp_rank=rank, layers=range(3), embedding=True, loss=True)
        assert [(one.name, one.rows, one.columns) for one in held] == [(name, *shape, 1)[:3] for name, shape in built]
        stacks = {
            f"{name}.{part}".removesuffix(".weight")
            for name, layer in model.named_modules()
            if isinstance(layer, TensorParallel)
            for part in getattr(layer, "weight_names", [])[1:]
        }
        assert len(stacks) == sum(one.stacked for one in held)


def test_stages_hold_everything_once_and_a_tied_table_twice() -> None:
    for config in VARIANTS:
        first = held_parameters(config, tp=1, tp_rank=0, layers=[0, 1], embedding=True, loss=False)
        last = held_parameters(config, tp=1, tp_rank=0, layers=[2], embedding=False, loss=True)
        table = config.padded_vocab_size() * config.hidden_size
        total = sum(one.numel for one in first + last)
        assert total == num_parameters(config) + config.tied_embeddings * table
        shared = {one.name for one in first} & {one.name for one in last}
        assert shared == ({"embed.weight"} if config.tied_embeddings else set())


def test_ranks_that_share_heads_hold_the_same_ones() -> None:
    parts = [tensor_part(SMALL, tp=4, rank=rank) for rank in range(4)]
    assert [part.kv_heads for part in parts] == [1] * 4
    assert {part.kv_copies for part in parts} == {2}
    assert [part.ffn for part in parts] == [51, 50, 50, 50]
    kv = next(one for one in held_parameters(SMALL, tp=4, tp_rank=0, layers=[0], embedding=False, loss=False)
              if one.name.endswith("kv"))  # fmt: skip
    assert not kv.cut and kv.stacked
