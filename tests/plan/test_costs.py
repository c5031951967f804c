"""Tests of megalith/plan/costs.py."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.cross_entropy import Head
from megalith.models.decoder import Decoder
from megalith.parallel.group import alone
from megalith.parallel.mesh import mesh_on_paper, model_grid
from megalith.plan.costs import (
    flops_per_token,
    loss_chunk,
    model_flops_utilisation,
    num_parameters,
    num_parameters_per_rank,
    step_flops,
    tflops_per_device,
)

LLAMA3_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336
)
SMALL = ModelConfig(
    vocab_size=999,
    hidden_size=96,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=200,
    vocab_multiple=64,
)
VARIANTS = [
    SMALL,
    replace(SMALL, tied_embeddings=True),
    replace(SMALL, qkv_bias=True, output_bias=True, mlp_bias=True),
    replace(SMALL, num_kv_heads=8, head_dim=None, vocab_multiple=1),
]


def llama(h: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=h,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
    )


QWEN25_HALF_B = replace(llama(896, 24, 14, 2, 4864, 151936), tied_embeddings=True, qkv_bias=True)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (llama(8192, 80, 64, 8, 28672, 128256), 70_553_706_496),  # Llama 3 70B
        (llama(4096, 32, 32, 32, 11008, 32000), 6_738_415_616),  # Llama 2 7B
        (replace(llama(2048, 16, 32, 8, 8192, 128256), tied_embeddings=True), 1_235_814_400),  # Llama 3.2 1B
        (QWEN25_HALF_B, 494_032_768),
    ],
)
def test_published_models_have_their_published_number_of_parameters(config: ModelConfig, parameters: int) -> None:
    assert num_parameters(config) == parameters


def built(config: ModelConfig, *, tp: int, rank: int = 0, sp: bool = False) -> Decoder:
    """One rank's part of the model, without memory."""
    grid = model_grid(ParallelConfig(tp=tp), config, tp)
    return Decoder(config, mesh_on_paper(grid, rank=rank), sp=sp)


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_count_per_rank_is_that_of_the_largest_part_built(config: ModelConfig, tp: int) -> None:
    counts = [sum(p.numel() for p in built(config, tp=tp, rank=rank).parameters()) for rank in range(tp)]
    assert num_parameters_per_rank(config, tp=tp) == max(counts)
    if tp == 1:
        assert num_parameters(config) == counts[0]


def test_the_count_per_rank_with_parts_of_unequal_size() -> None:
    config = replace(SMALL, num_heads=8, num_kv_heads=4)
    counts = [sum(p.numel() for p in built(config, tp=3, rank=rank).parameters()) for rank in range(3)]
    assert num_parameters_per_rank(config, tp=3) == max(counts) > min(counts)


def test_llama3_8b_costs_its_known_operations() -> None:
    assert flops_per_token(LLAMA3_8B, 8192) == 51_470_401_536
    assert step_flops(LLAMA3_8B, tokens=8192, squared_lengths=8192**2) == 421_645_529_382_912


def test_documents_cost_less_attention_than_one_long_row() -> None:
    whole = step_flops(SMALL, tokens=64, squared_lengths=64**2)
    halves = step_flops(SMALL, tokens=64, squared_lengths=2 * 32**2)
    assert whole - halves == 6 * (64**2 - 2 * 32**2) * SMALL.num_layers * 8 * 16


@pytest.mark.parametrize("config", VARIANTS)
def test_operations_equal_those_counted_in_plain_products(config: ModelConfig) -> None:
    config = replace(config, vocab_multiple=1)
    length = 24
    with FlopCounterMode(display=False) as counter:
        plain_forward(config, length).sum().backward()
    heads = config.num_heads * config.head_size()
    uncounted = 6 * length**2 * config.num_layers * heads  # the counter sees what the causal mask hides
    assert counter.get_total_flops() == step_flops(config, tokens=length, squared_lengths=length**2) + uncounted


def plain_forward(config: ModelConfig, length: int) -> torch.Tensor:
    """The model's products and nothing else, on meta tensors; biases and norms are not counted anyway."""
    h, n, g, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size()

    def product(x: torch.Tensor, width: int) -> torch.Tensor:
        return x @ torch.empty(width, x.shape[-1], device="meta", requires_grad=True).T

    x = torch.empty(length, h, device="meta", requires_grad=True)
    for _ in range(config.num_layers):
        q, k, v = product(x, (n + 2 * g) * d).split([n * d, g * d, g * d], dim=-1)
        q, k, v = (heads.unflatten(-1, (-1, d)).transpose(0, 1) for heads in (q, k, v))
        k, v = k.repeat_interleave(n // g, dim=0), v.repeat_interleave(n // g, dim=0)
        x = x + product((q @ k.transpose(1, 2) @ v).transpose(0, 1).flatten(1), h)
        x = x + product(product(x, config.ffn_hidden_size) * product(x, config.ffn_hidden_size), h)
    return product(x, config.vocab_size)


def test_rates() -> None:
    assert tflops_per_device(6e15, seconds=2.0, devices=10) == 300.0
    assert model_flops_utilisation(6e15, seconds=2.0, devices=10, peak_tflops=600.0) == 0.5


def test_the_head_takes_a_chunk_of_the_size_that_the_estimate_counts() -> None:
    assert loss_chunk(4096, ranks=1) == 512
    assert loss_chunk(1024, ranks=1) == 2048
    assert loss_chunk(1024, ranks=3) == 6144, "each rank forms a third of these logits"
    assert loss_chunk(128_256, ranks=1) == 512, "large vocabularies still take 512 tokens"
    head = Head.of(torch.empty(128_256, 2, device="meta"), alone("tp"), 0, 128_256, None, loops=False)
    assert head.chunk == 512
