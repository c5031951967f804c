"""Adapters on paper are those that layers declare, on every tensor-parallel rank."""

import pytest

from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.models.decoder import build_chunks, declared_parameters
from megalith.nn.lora import attach_adapters
from megalith.parallel.mesh import mesh_on_paper, model_grid
from megalith.plan.adapters import trained, with_adapters
from megalith.plan.parameters import held_parameters

MODEL = ModelConfig(
    vocab_size=61, hidden_size=12, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=6, ffn_hidden_size=11,
    max_seq_len=16, qkv_bias=True,
)  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("lora", [LoraConfig(rank=3), LoraConfig(rank=1, targets=("kv", "o"))])
def test_names_sizes_and_cuts_are_those_of_the_layers(tp: int, lora: LoraConfig) -> None:
    for rank in range(tp):
        mesh = mesh_on_paper(model_grid(ParallelConfig(tp=tp), MODEL, tp), rank=rank)
        chunks = build_chunks(MODEL, mesh, ParallelConfig(tp=tp, sp=tp > 1))
        attach_adapters(chunks, MODEL, lora)
        shards = {one.shard.name: one.shard for one, module, name in declared_parameters(chunks[0])}
        held = held_parameters(MODEL, tp=tp, tp_rank=rank, layers=range(2), embedding=True, loss=True)
        found = {one.name: one for one in with_adapters(held, MODEL, lora)}
        assert found.keys() == shards.keys()
        for name, one in found.items():
            assert one.numel == shards[name].numel, name
            assert one.frozen == ("lora" not in name)
            if "lora" in name and tp == 2:
                assert one.cut == bool(shards[name].cut), name
        assert [one.name for one in trained(list(found.values()))] == [name for name in found if "lora" in name]


def test_without_adapters_everything_is_trained() -> None:
    held = held_parameters(MODEL, tp=1, tp_rank=0, layers=range(2), embedding=True, loss=True)
    assert with_adapters(held, MODEL, None) == trained(held) == held
