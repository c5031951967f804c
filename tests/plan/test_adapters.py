"""Adapters on paper are those that layers declare, on every tensor-parallel rank, and cost what is
counted."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megalith.config.lora import LoraConfig, has_adapters
from megalith.config.model import AttentionConfig, MLAConfig, ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.models.decoder import build_chunks, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.mesh import build_meta_mesh
from megalith.plan.costs import layer_flops, step_flops
from megalith.plan.frozen import trained, trained_layer_flops, trained_step_flops, with_adapters
from megalith.plan.grid import model_grid
from megalith.plan.layers.base import LayerRank, pairs_in_window
from megalith.plan.layers.embedding import head_flops
from megalith.plan.parameters import held_parameters
from megalith.plan.stages import single_stage

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=12,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=6,
    ffn_hidden_size=11,
    max_seq_len=16,
    qkv_bias=True,
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("lora", [LoraConfig(rank=3), LoraConfig(rank=1, targets=("kv", "o"))])
def test_names_sizes_and_shards_match_the_layers(tp: int, lora: LoraConfig) -> None:
    for rank in range(tp):
        mesh = build_meta_mesh(model_grid(ParallelConfig(tp=tp), MODEL, tp), rank=rank)
        parallel = ParallelConfig(tp=tp, sp=tp > 1)
        chunks = build_chunks(build_context(MODEL, mesh, parallel, lora=lora))
        shards = {
            one.shard.name: one.shard for one, module, name in iter_parameter_specs(chunks[0])
        }
        held = held_parameters(MODEL, single_stage(2, MODEL.mtp.num_layers), LayerRank(tp, rank))
        results = {one.name: one for one in with_adapters(held, MODEL, lora)}
        assert results.keys() == shards.keys()
        for name, one in results.items():
            assert one.numel == shards[name].numel, name
            assert one.frozen == ("lora" not in name)
            if "lora" in name and tp == 2:
                assert one.cut == bool(shards[name].cut), name
        assert [one.name for one in trained(list(results.values()))] == [
            name for name in results if "lora" in name
        ]


def test_without_adapters_everything_is_trained() -> None:
    held = held_parameters(MODEL, single_stage(2, MODEL.mtp.num_layers))
    assert with_adapters(held, MODEL, None) == trained(held) == held


class Plain:
    """The products of a model with adapters and nothing else, on meta tensors; frozen weights want
    no gradient."""

    def __init__(self, model: ModelConfig, lora: LoraConfig) -> None:
        self.model, self.lora, self.layer = model, lora, 0

    def product(self, x: Tensor, word: str, width: int, *, stacked: int = 1) -> Tensor:
        """x @ W.T, and where there is an adapter (x @ A.T) @ B.T beside it, once for each matrix
        that is stacked."""
        y = x @ torch.empty(width, x.shape[-1], device="meta").T
        if not has_adapters(f"layers.{self.layer}.any.{word}", self.lora, self.model):
            return y
        results = []
        for _ in range(stacked):
            a = torch.empty(self.lora.rank, x.shape[-1], device="meta", requires_grad=True)
            b = torch.empty(width // stacked, self.lora.rank, device="meta", requires_grad=True)
            results.append((x @ a.T) @ b.T)
        return y + torch.cat(results, dim=-1)

    def forward(self, length: int) -> Tensor:
        x = torch.empty(length, self.model.hidden_size, device="meta")
        for layer in range(self.model.num_layers):
            self.layer = layer
            x = self.block(x)
        return x @ torch.empty(self.model.vocab_size, self.model.hidden_size, device="meta").T

    def block(self, x: Tensor) -> Tensor:
        c, h = self.model, self.model.hidden_size
        q, k, v = self.latent(x) if c.mla is not None else self.heads(x)
        heads = (q @ k.transpose(1, 2) @ v).transpose(0, 1).flatten(1)
        if c.attention.gated:
            heads = heads * self.product(x, "gate", heads.shape[1])
        attended = x + self.product(heads, "o", h)
        read = attended if c.block == "sequential" else x
        if c.gated:
            gate, up = self.product(read, "gate_up", 2 * c.ffn_hidden_size, stacked=2).chunk(
                2, dim=-1
            )
            return attended + self.product(gate * up, "down", h)
        return attended + self.product(self.product(read, "up", c.ffn_hidden_size), "down", h)

    def heads(self, x: Tensor) -> list[Tensor]:
        n, g, d = self.model.num_heads, self.model.num_kv_heads, self.model.head_size()
        q, kv = self.product(x, "q", n * d), self.product(x, "kv", 2 * g * d, stacked=2)
        q, k, v = (y.unflatten(-1, (-1, d)).transpose(0, 1) for y in (q, *kv.chunk(2, dim=-1)))
        return [q, *(y.repeat_interleave(n // g, dim=0) for y in (k, v))]

    def latent(self, x: Tensor) -> list[Tensor]:
        c, sizes, n = self.model, self.model.mla, self.model.num_heads
        assert sizes is not None
        if sizes.q_rank is None:
            q = self.product(x, "q", n * c.key_size())
        else:
            q = self.product(self.product(x, "q_down", sizes.q_rank), "q_up", n * c.key_size())
        short = self.product(x, "kv_down", sizes.kv_rank + sizes.rope_dim)
        latent, turned = short.split([sizes.kv_rank, sizes.rope_dim], dim=-1)
        kv = self.product(latent, "kv_up", n * (sizes.nope_dim + sizes.value_dim)).unflatten(
            -1, (n, -1)
        )
        k, v = kv.split([sizes.nope_dim, sizes.value_dim], dim=-1)
        k = torch.cat([k, turned.unsqueeze(1).expand(-1, n, -1)], dim=-1)
        return [y.transpose(0, 1) for y in (q.unflatten(-1, (n, -1)), k, v)]


DEEP = replace(MODEL, num_layers=4, qkv_bias=False)
KINDS = {
    "default": DEEP,
    "gated": replace(DEEP, gated=False, attention=AttentionConfig(gated=True)),
    "parallel": replace(DEEP, block="parallel"),
    "latent": replace(
        DEEP,
        num_kv_heads=8,
        mla=MLAConfig(kv_rank=7, q_rank=9, nope_dim=5, rope_dim=4, value_dim=3),
    ),
    "latent from x": replace(
        DEEP, num_kv_heads=8, mla=MLAConfig(kv_rank=7, nope_dim=5, rope_dim=4, value_dim=3)
    ),
}
ADAPTERS = [
    LoraConfig(rank=3),
    LoraConfig(rank=3, layers=(2,)),
    LoraConfig(rank=3, targets=("o",)),
    LoraConfig(rank=3, targets=("down",), layers=(1, 3)),
    LoraConfig(rank=2, targets=("gate_up", "up", "down")),
    LoraConfig(rank=2, targets=("gate", "down")),
    LoraConfig(rank=2, targets=("q", "kv", "q_up", "kv_up", "down")),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lora", ADAPTERS, ids=range(len(ADAPTERS)))
def test_operations_equal_those_counted_in_plain_products(kind: str, lora: LoraConfig) -> None:
    model, length = KINDS[kind], 24
    with FlopCounterMode(display=False) as counter:
        Plain(model, lora).forward(length).sum().backward()
    pairs = model.num_heads * (model.key_size() + model.value_size()) * length**2
    # The counter sees what the causal mask hides; of frozen layers below the first adapter, in
    # forward alone.
    first = 0 if lora.layers is None else min(lora.layers)
    reached = trained_step_flops(model, lora, tokens=length, squared_lengths=0, windowed=0)
    core = trained_step_flops(model, lora, tokens=length, squared_lengths=length**2) - reached
    assert counter.get_total_flops() == reached + 2 * core
    assert core in (3 * pairs * (model.num_layers - first) + pairs * first, core)


def test_parts_of_a_step_sum_to_the_whole_and_cost_less_than_full_training() -> None:
    wide = replace(DEEP, hidden_size=96, ffn_hidden_size=200)
    for lora in ADAPTERS[:3]:
        layers = sum(
            trained_layer_flops(wide, lora, n, tokens=20, squared_lengths=400) for n in range(4)
        )
        head = head_flops(wide, 20) * 2 // 3
        assert layers + head == trained_step_flops(wide, lora, tokens=20, squared_lengths=400)
        assert layers < sum(layer_flops(wide, n, tokens=20, squared_lengths=400) for n in range(4))
    whole = step_flops(wide, tokens=20, squared_lengths=400)
    assert trained_step_flops(wide, None, tokens=20, squared_lengths=400) == whole


def test_window_counts_only_visible_pairs_with_adapters() -> None:
    model = replace(DEEP, attention=AttentionConfig(window=4, window_layers=(True, False)))
    lengths = (3, 11, 6)
    seen = {"tokens": 20, "squared_lengths": sum(n**2 for n in lengths)}
    exact = trained_step_flops(
        model, LoraConfig(rank=3), **seen, windowed=sum(pairs_in_window(n, 4) for n in lengths)
    )
    assert exact != trained_step_flops(model, LoraConfig(rank=3), **seen)
