"""Tests of megalith/plan/costs.py."""

from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalith.config.kernels import KernelsConfig
from megalith.config.model import AttentionConfig, LayersConfig, MLAConfig, ModelConfig, MTPConfig
from megalith.config.moe import CapacityConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.backend import Backends
from megalith.kernels.grouped_linear import experts
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs, RouterInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import Decoder, allocate, initialize
from megalith.nn.build import build_context
from megalith.nn.moe import Experts
from megalith.parallel.cross_entropy import HeadShard, VocabShard
from megalith.parallel.expert import DispatchedTokens
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_meta_mesh, build_single_rank_mesh
from megalith.plan.costs import (
    active_parameters,
    attention_flops,
    flops_per_token,
    latent_flops,
    layer_flops,
    loss_chunk,
    loss_chunk_size,
    mlp_flops,
    model_flops_utilization,
    num_parameters,
    num_parameters_per_rank,
    step_flops,
    tflops_per_device,
)
from megalith.plan.grid import model_grid
from megalith.plan.layers.base import num_attended_pairs, pairs_in_window
from megalith.plan.layers.embedding import head_flops
from megalith.plan.parameters import held_parameters, layer_parameters
from megalith.plan.stages import Stage
from megalith.testing.tiny import tiny_run
from megalith.train.objective import sum_lm_losses
from megalith.verify.matrix import MIXTURES
from megalith.verify.matrix import VARIANTS as KINDS

LLAMA3_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
)
SMALL = ModelConfig(
    vocab_size=999,
    hidden_size=96,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=200,
    pad_vocab_to_multiple_of=64,
)
VARIANTS = [
    SMALL,
    replace(SMALL, tied_embeddings=True),
    replace(SMALL, qkv_bias=True, output_bias=True, mlp_bias=True),
    replace(SMALL, num_kv_heads=8, head_dim=None, pad_vocab_to_multiple_of=1),
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
GPT = replace(
    llama(12, 2, 4, 4, 48, 100),
    max_seq_len=4,
    positions="learned",
    norm="layer",
    gated=False,
    activation="gelu",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    pad_vocab_to_multiple_of=1,
)
GPT2 = replace(
    GPT,
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    ffn_hidden_size=3072,
    vocab_size=50257,
    max_seq_len=1024,
    tied_embeddings=True,
)
GPT3 = replace(
    GPT2,
    hidden_size=12288,
    num_layers=96,
    num_heads=96,
    num_kv_heads=96,
    ffn_hidden_size=49152,
    vocab_size=51200,
    max_seq_len=2048,
)
QWEN3_06B = replace(
    llama(1024, 28, 16, 8, 3072, 151936),
    head_dim=128,
    tied_embeddings=True,
    attention=AttentionConfig(qk_norm="head"),
)
DEEPSEEK = replace(
    llama(7168, 1, 128, 128, 18432, 129280),
    mla=MLAConfig(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128),
)
"""The attention of DeepSeek-V3, with its dense MLP."""


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (llama(8192, 80, 64, 8, 28672, 128256), 70_553_706_496),  # Llama 3 70B
        (llama(4096, 32, 32, 32, 11008, 32000), 6_738_415_616),  # Llama 2 7B
        (
            replace(llama(2048, 16, 32, 8, 8192, 128256), tied_embeddings=True),
            1_235_814_400,
        ),  # Llama 3.2 1B
        (QWEN25_HALF_B, 494_032_768),
        (GPT2, 124_439_808),
        (GPT, 6240),
        (QWEN3_06B, 596_049_920),
        (
            replace(llama(2048, 18, 8, 1, 16384, 256000), head_dim=256, tied_embeddings=True),
            2_506_172_416,
        ),  # Gemma 2B
        (
            GPT3,
            96 * (12 * 12288**2 + 13 * 12288) + (51200 + 2048 + 2) * 12288,
        ),  # Narayanan et al. 2021, eq. 2
    ],
)
def test_published_models_have_their_published_number_of_parameters(
    config: ModelConfig, parameters: int
) -> None:
    assert num_parameters(config) == parameters


MIXTRAL = replace(
    llama(4096, 32, 32, 8, 14336, 32000),
    moe=MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=14336),
)
QWEN3_30B = replace(
    llama(2048, 48, 32, 4, 6144, 151936),
    head_dim=128,
    attention=AttentionConfig(qk_norm="head"),
    moe=MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=768),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK,
    num_layers=61,
    moe=MoEConfig(
        num_experts=256,
        top_k=8,
        ffn_hidden_size=2048,
        shared_ffn_hidden_size=2048,
        layers=(False,) * 3 + (True,) * 58,
        router=RouterConfig(
            score="sigmoid",
            num_groups=8,
            topk_groups=4,
            expert_bias=True,
            routed_scaling_factor=2.5,
        ),
    ),
)


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (MIXTRAL, 46_702_792_704, 12_879_925_248),
        (QWEN3_30B, 30_532_122_624, 3_353_032_704),
        (DEEPSEEK_V3, 671_026_404_352, 37_552_282_624),
        (GPT2, 124_439_808, 124_439_808),
    ],
    ids=["Mixtral 8x7B", "Qwen3 30B-A3B", "DeepSeek-V3", "GPT-2"],
)
def test_published_moe_models_have_their_published_parameter_counts(
    config: ModelConfig, parameters: int, active: int
) -> None:
    assert num_parameters(config) == parameters
    assert active_parameters(config) == active
    held = [one for layer in range(config.num_layers) for one in layer_parameters(config, layer)]
    biases = sum(one.numel for one in held if not one.counts)
    assert biases == (14_848 if config is DEEPSEEK_V3 else 0), (
        "which are saved, and are no parameters"
    )


TINY_MIXTRAL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=48,
    moe=MoEConfig(num_experts=4, ffn_hidden_size=48),
)
TINY_QWEN3 = replace(
    TINY_MIXTRAL,
    attention=AttentionConfig(qk_norm="head"),
    moe=MoEConfig(num_experts=4, ffn_hidden_size=16),
)
TINY_DEEPSEEK = replace(
    TINY_MIXTRAL,
    num_layers=2,
    num_kv_heads=4,
    head_dim=None,
    mla=MLAConfig(kv_rank=16, q_rank=16, nope_dim=8, rope_dim=8, value_dim=8),
    moe=MoEConfig(
        num_experts=8, ffn_hidden_size=16, shared_ffn_hidden_size=16, layers=(False, True)
    ),
)


def test_tiny_moe_models_have_the_recorded_parameter_counts() -> None:
    found = [num_parameters(one) for one in (TINY_MIXTRAL, TINY_QWEN3, TINY_DEEPSEEK)]
    assert found == [25_824, 13_552, 31_712]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "kind", "own"),
    [
        (TINY_MIXTRAL, "MixtralConfig", {"num_local_experts": 4}),
        (TINY_QWEN3, "Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 16}),
        (
            TINY_DEEPSEEK,
            "DeepseekV3Config",
            {
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "n_routed_experts": 8,
                "n_shared_experts": 1,
                "moe_intermediate_size": 16,
                "first_k_dense_replace": 1,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
            },
        ),
    ],
    ids=["Mixtral", "Qwen3", "DeepSeek-V3"],
)
def test_tiny_moe_models_have_the_parameter_counts_of_transformers(
    config: ModelConfig, kind: str, own: dict[str, int]
) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="compares with transformers, which is not installed"
    )
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": 48,
    }
    heads = {} if config.mla else {"head_dim": 8}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, kind)(**sizes, **heads, **own)
        )
    assert num_parameters(config) == sum(one.numel() for one in model.parameters())


def test_moe_flops_count_only_activated_experts() -> None:
    """6·d·f·g·K, the router's 6·h·E, of the shared 6·h·f·g and 6·h of their gate, and 12·h·d of
    latents."""
    moe = MoEConfig(
        num_experts=8,
        top_k=3,
        ffn_hidden_size=21,
        shared_ffn_hidden_size=13,
        shared_gate=True,
        latent_size=19,
    )
    h, d = 96, 19
    for gated, g in ((True, 3), (False, 2)):
        config = replace(SMALL, gated=gated, moe=moe)
        per_token = 6 * d * 21 * g * 3 + 6 * h * 8 + 6 * h * 13 * g + 6 * h + 12 * h * d
        assert mlp_flops(config, 0, 10) == 10 * per_token
        dense = replace(SMALL, gated=gated)
        more = step_flops(config, tokens=10, squared_lengths=100) - step_flops(
            dense, tokens=10, squared_lengths=100
        )
        assert more == 3 * 10 * (per_token - 6 * h * 200 * g)


def test_mla_and_mtp_models_have_their_published_parameter_counts() -> None:
    held = layer_parameters(DEEPSEEK, 0)
    assert sum(one.numel for one in held if ".attention." in one.name) == 187_107_328
    num_mtp_layers, h = (
        num_parameters(replace(DEEPSEEK, mtp=MTPConfig(num_layers=1))) - num_parameters(DEEPSEEK),
        7168,
    )
    assert num_mtp_layers == sum(one.numel for one in held) + 2 * h * h + 3 * h
    assert (
        num_parameters(replace(DEEPSEEK_V3, mtp=MTPConfig(num_layers=1)))
        - num_parameters(DEEPSEEK_V3)
        == 11_610_067_968
    )


def test_gpt3_with_a_vocabulary_that_divides_well_has_174_billion_parameters() -> None:
    assert round(num_parameters(GPT3) / 1e9, 1) == 174.6


@pytest.mark.parametrize(
    ("own", "parameters"),
    [
        (LayersConfig(), 1_486_901_248),
        (LayersConfig(attention=("full", "none")), 1_444_954_112),
        (LayersConfig(mlp=("full", "none")), 1_310_736_384),
        (LayersConfig(attention=("full", "linear")), 1_461_735_424),
        (LayersConfig(mlp=("full", "linear")), 1_327_517_696),
    ],
    ids=["alike", "no attention", "no mlp", "attention by a matrix", "mlp by a matrix"],
)
def test_layers_without_or_with_replaced_parts_have_recorded_counts(
    own: LayersConfig, parameters: int
) -> None:
    model = replace(llama(4096, 2, 32, 8, 14336, 128256), layers=own)
    assert num_parameters(model) == parameters
    gone = 6 * (
        1_486_901_248
        - parameters
        - sum(4096 for part in (*own.attention, *own.mlp) if part == "none")
    )
    scores = 3 * 64 * 32 * (128 + 128) if own.attention else 0
    plain = step_flops(replace(model, layers=LayersConfig()), tokens=1, squared_lengths=64)
    assert plain - step_flops(model, tokens=1, squared_lengths=64) == gone + scores


def built(config: ModelConfig, *, tp: int, rank: int = 0, sp: bool = False) -> Decoder:
    """One rank's part of the model, without memory."""
    grid = model_grid(ParallelConfig(tp=tp), config, tp)
    return Decoder(build_context(config, build_meta_mesh(grid, rank=rank), ParallelConfig(sp=sp)))


@pytest.mark.parametrize("config", [*VARIANTS, *KINDS.values()], ids=lambda config: config.norm)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_count_per_rank_is_that_of_the_largest_part_built(config: ModelConfig, tp: int) -> None:
    counts = [
        sum(p.numel() for p in built(config, tp=tp, rank=rank).parameters()) for rank in range(tp)
    ]
    assert num_parameters_per_rank(config, tp=tp) == max(counts)
    if tp == 1:
        assert num_parameters(config) == counts[0]


def test_the_count_per_rank_with_parts_of_unequal_size() -> None:
    config = replace(SMALL, num_heads=8, num_kv_heads=4)
    counts = [
        sum(p.numel() for p in built(config, tp=3, rank=rank).parameters()) for rank in range(3)
    ]
    assert num_parameters_per_rank(config, tp=3) == max(counts) > min(counts)


def test_llama3_8b_has_its_known_flops() -> None:
    assert flops_per_token(LLAMA3_8B, 8192) == 51_470_401_536
    assert step_flops(LLAMA3_8B, tokens=8192, squared_lengths=8192**2) == 421_645_529_382_912
    pairs = (
        LLAMA3_8B.num_layers
        * attention_flops(LLAMA3_8B, 0, tokens=8192, squared_lengths=8192**2)
        // 8192
    )
    assert (51_470_401_536 - pairs, pairs) == (45_027_950_592, 6_442_450_944)


def test_flops_of_full_attention_gpt_layers_match_the_standard_formula() -> None:
    """72·t·L·h²·(1 + s / 6h + v / 12hL), by Narayanan et al. 2021, arXiv:2104.04473, less what runs
    again."""
    layers, h, v, s, rows = 3, 16, 50, 24, 5
    config = replace(
        GPT,
        hidden_size=h,
        num_layers=layers,
        ffn_hidden_size=4 * h,
        vocab_size=v,
        attention=AttentionConfig(causal=False),
    )
    classic = (
        72 * rows * s * layers * h**2 * (1 + Fraction(s, 6 * h) + Fraction(v, 12 * h * layers))
    )
    assert step_flops(config, tokens=rows * s, squared_lengths=rows * s**2) == classic


def test_parts_of_a_tiny_gpt_have_recorded_parameter_counts() -> None:
    held = held_parameters(GPT, Stage(range(1), embedding=True))
    assert (
        sum(one.numel for one in held if one.name in ("embed.weight", "positions.weight")) == 1248
    )
    assert sum(one.numel for one in held if ".mlp." in one.name) == 1212


def test_documents_have_fewer_attention_flops_than_one_long_row() -> None:
    whole = step_flops(SMALL, tokens=64, squared_lengths=64**2)
    halves = step_flops(SMALL, tokens=64, squared_lengths=2 * 32**2)
    assert whole - halves == 6 * (64**2 - 2 * 32**2) * SMALL.num_layers * 8 * 16


def test_window_counts_only_visible_pairs() -> None:
    for length, window in ((7, 3), (7, 1), (40, 39), (5, 5), (5, 9)):
        pairs = 2 * sum(min(window, seen) for seen in range(1, length + 1))
        assert pairs_in_window(length, window) == min(pairs, length**2)
        every = replace(SMALL, attention=AttentionConfig(window=window))
        without = replace(SMALL, attention=AttentionConfig(window=window, window_layers=(False,)))
        assert step_flops(without, tokens=length, squared_lengths=length**2) == step_flops(
            SMALL, tokens=length, squared_lengths=length**2
        )
        saved = step_flops(SMALL, tokens=length, squared_lengths=length**2) - step_flops(
            every, tokens=length, squared_lengths=length**2
        )
        assert saved == 6 * SMALL.num_layers * 8 * 16 * (
            length**2 - pairs_in_window(length, window)
        )


def test_flops_of_asymmetric_window_are_the_mean_of_both_sides() -> None:
    for length, window, right in ((7, 3, 0), (7, 1, 2), (40, 30, 12), (9, 99, 2)):
        seen = [(min(place, window - 1), min(length - 1 - place, right)) for place in range(length)]
        pairs = sum(before + 1 + after for before, after in seen)
        kind = AttentionConfig(causal=False, window=window, window_right=right)
        assert abs(num_attended_pairs(length, kind) - pairs) <= length, (
            "length² counts a token's own pair half"
        )
        even = replace(kind, window=right + 1, window_right=None)
        assert num_attended_pairs(length, even) == pairs_in_window(length, right + 1)


def test_attention_chunks_cost_as_documents_of_their_length() -> None:
    for length, size in ((7, 3), (7, 1), (40, 39), (5, 5), (5, 9)):
        parts = [min(size, length - start) for start in range(0, length, size)]
        squares = sum(part**2 for part in parts)
        assert pairs_in_window(length, size, chunked=True) == squares
        chunks = replace(SMALL, attention=AttentionConfig(window=size, chunked=True))
        assert attention_flops(
            chunks, 0, tokens=length, squared_lengths=length**2
        ) == attention_flops(SMALL, 0, tokens=length, squared_lengths=squares)


@pytest.mark.parametrize("window", [None, 4])
def test_bidirectional_attention_counts_all_pairs(window: int | None) -> None:
    causal, both = (
        replace(SMALL, attention=AttentionConfig(window=window, causal=one))
        for one in (True, False)
    )
    costs = [
        attention_flops(model, 0, tokens=24, squared_lengths=24 * 12) for model in (causal, both)
    ]
    assert costs[1] == 2 * costs[0]
    pairs = sum(abs(i - j) < (window or 12) for i in range(12) for j in range(12)) * 2
    exact = 12 * pairs * SMALL.num_heads * SMALL.head_size()
    assert abs(costs[1] - exact) <= exact / 6, "a token's own pair counts twice in a window"


def test_windowed_pairs_are_those_given_or_of_documents_that_are_equally_long() -> None:
    model = replace(SMALL, attention=AttentionConfig(window=4, window_layers=(True, False, False)))
    equal = step_flops(model, tokens=30, squared_lengths=3 * 10**2)
    given = step_flops(
        model, tokens=30, squared_lengths=3 * 10**2, windowed=3 * pairs_in_window(10, 4)
    )
    assert equal == given
    assert (
        given - step_flops(model, tokens=30, squared_lengths=300, windowed=0) == 6 * 8 * 16 * 3 * 68
    )
    assert step_flops(model, tokens=0, squared_lengths=0) == 0


def test_parts_sum_to_the_whole() -> None:
    for kind in (SMALL, *KINDS.values()):
        model = replace(kind, mtp=MTPConfig())  # what is predicted further ahead comes on top
        layers = sum(
            layer_flops(model, one, tokens=20, squared_lengths=400)
            for one in range(model.num_layers)
        )
        assert layers + head_flops(model, 20) == step_flops(model, tokens=20, squared_lengths=400)
        assert mlp_flops(model, 0, 20) + attention_flops(
            model, 0, tokens=20, squared_lengths=400
        ) < layer_flops(model, 0, tokens=20, squared_lengths=400)


MLA = replace(
    SMALL, num_kv_heads=8, mla=MLAConfig(kv_rank=10, q_rank=14, nope_dim=6, rope_dim=4, value_dim=5)
)


def test_mla_flops_count_up_projections_and_latent_products() -> None:
    between = attention_flops(MLA, 0, tokens=20, squared_lengths=400)
    queries, keys_and_values = 8 * (6 + 4), 8 * (6 + 5)
    short = latent_flops(MLA, 0, tokens=20, squared_lengths=400) - between
    assert short == 6 * 20 * (queries * 14 + keys_and_values * 10)
    mla = replace(MLA, mla=MLAConfig(kv_rank=10, nope_dim=6, rope_dim=4, value_dim=5))
    whole = latent_flops(mla, 0, tokens=20, squared_lengths=400) - between
    assert whole == 6 * 20 * (queries * mla.hidden_size + keys_and_values * 10)


# --- what a real model computes, counted by torch

BIDIRECTIONAL = replace(SMALL, attention=AttentionConfig(causal=False))
LATENT_EXPERTS = replace(
    SMALL,
    gated=False,
    activation="squared_relu",
    moe=MoEConfig(
        num_experts=6,
        top_k=2,
        ffn_hidden_size=20,
        shared_ffn_hidden_size=13,
        latent_size=12,
        router=RouterConfig(score="sigmoid", expert_bias=True, routed_scaling_factor=2.5),
    ),
)
"""As Nemotron 3: experts without a gate on a few features, an MLP for all tokens on all."""

SHARED_EXPERTS = replace(
    SMALL,
    moe=MoEConfig(
        num_experts=6, top_k=3, ffn_hidden_size=20, shared_ffn_hidden_size=13, shared_gate=True
    ),
)
MODELS = {
    "grouped queries": SMALL,
    "bidirectional": BIDIRECTIONAL,
    "latent attention, whole queries, two MTP layers": replace(
        MLA, mla=MLAConfig(kv_rank=10, rope_dim=4), mtp=MTPConfig(num_layers=2)
    ),
    "latent attention, shared experts, one MTP layer": replace(
        SHARED_EXPERTS, mla=MLA.mla, mtp=MTPConfig(num_layers=1)
    ),
    "latent experts": LATENT_EXPERTS,
    "no gate, gated heads": replace(SMALL, gated=False, attention=AttentionConfig(gated=True)),
}
MORE = {
    "tied": VARIANTS[1],
    "biases": VARIANTS[2],
    "a head for each query": VARIANTS[3],
    "latent attention": MLA,
    "shared experts": SHARED_EXPERTS,
    **{f"{name}, of the matrix": kind for name, kind in (KINDS | MIXTURES).items()},
}
ALL = [
    *(pytest.param(kind, id=name) for name, kind in MODELS.items()),
    *(pytest.param(kind, id=name, marks=pytest.mark.slow) for name, kind in MORE.items()),
]
DOCUMENTS = (13, 24, 5)


class Counted(NamedTuple):
    """One forward and backward of a model."""

    flops: int
    expert_rows: list[int]
    """Rows that the experts of each layer computed."""

    grouped: bool
    """Whether torch's grouped matmul was called."""

    batched: bool
    """Whether all experts had equally many rows."""


def grouped_mm_flops(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    """Rows by their experts' matrices, [r, i] by [e, i, o], or their sums of products, [o, r] by
    [r, i]."""
    return 2 * a[0] * a[1] * b[-1]


def count_model(
    config: ModelConfig, *, products: bool = False, dtype: torch.dtype = torch.float64
) -> Counted:
    """What torch counts in the model of plain definitions; with `products` experts compute as in
    training."""
    mesh, reference = build_single_rank_mesh(), Backends(KernelsConfig(all="reference"))
    model = Decoder(build_context(config, mesh, dtype=dtype, backends=reference))
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    sent: list[DispatchedTokens] = []
    for module in model.modules():
        if isinstance(module, Experts):
            module.register_forward_pre_hook(lambda _, given: sent.append(given[0]))
            module.compute = experts if products else module.compute
    tokens = LayerInputs(
        seq_params_from_lengths(list(DOCUMENTS)),
        router_inputs=RouterInputs(AuxLossScale(0, 1, 1.0)),
    )
    drawn = torch.randint(
        0, config.vocab_size, (2, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(2)
    )
    ids, labels = drawn.unbind()
    mtp_inputs = ((ids, labels),) * config.mtp.num_layers
    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_mm_flops}
    ) as counter:
        torch.stack(
            sum_lm_losses(model.outputs(ids, tokens, mtp_inputs=mtp_inputs), labels, mtp_inputs)
        ).sum().backward()
    return Counted(
        counter.get_total_flops(),
        [len(one.rows) for one in sent],
        torch.ops.aten._grouped_mm in counter.get_flop_counts()["Global"],
        bool(sent) and all(one.groups.equal for one in sent),
    )


def useful_and_hidden(config: ModelConfig) -> int:
    """The closed form, what masks hide of the scores that the plain definition forms of every
    pair of a document, and what the head's padding rows cost there."""
    tokens, kind = sum(DOCUMENTS), config.attention
    squares, windowed = (
        sum(length**2 for length in DOCUMENTS),
        sum(num_attended_pairs(length, kind) for length in DOCUMENTS),
    )
    size = kind.window if kind.chunked and kind.window else max(DOCUMENTS)
    runs = [min(size, length - start) for length in DOCUMENTS for start in range(0, length, size)]
    hidden = 0
    for layer in [*range(config.num_layers), *[config.num_layers - 1] * config.mtp.num_layers]:
        formed, seen = 2 * squares, squares
        if config.has_window(layer):
            formed, seen = 2 * sum(run**2 for run in runs), windowed
        seen = seen if kind.causal else 2 * seen
        hidden += (formed - seen) * (
            config.attention_part(layer) == "full"
        ) + squares * config.uses_cross_layer_source(layer)
    padding = (
        (config.padded_vocab_size() - config.vocab_size)
        * config.hidden_size
        * (1 + config.mtp.num_layers)
    )
    useful = step_flops(config, tokens=tokens, squared_lengths=squares, windowed=windowed)
    return (
        useful
        + 3 * hidden * config.num_heads * (config.key_size() + config.value_size())
        + 6 * tokens * padding
    )


def extra_expert_flops(config: ModelConfig, rows: list[int]) -> int:
    """What experts computed beyond top_k rows for each token, or less: only where they refuse
    tokens, or pad."""
    if config.moe is None:
        return 0
    matrices = (3 if config.gated else 2) * config.moe.ffn_hidden_size
    features = config.moe.latent_size or config.hidden_size
    return 6 * features * matrices * sum(one - sum(DOCUMENTS) * config.moe.top_k for one in rows)


@pytest.mark.parametrize("config", ALL)
def test_flops_match_those_counted_by_torch(config: ModelConfig) -> None:
    """Exactly, and in mixtures of the chosen experts alone: beside the closed form there is what
    masks hide, half of all pairs where they are causal, what padding of the vocabulary costs,
    and rows that experts refused or padded."""
    counted = count_model(config)
    extra_flops = extra_expert_flops(config, counted.expert_rows)
    assert counted.flops == useful_and_hidden(config) + extra_flops
    layers = [*range(config.num_layers), *[config.num_layers - 1] * config.mtp.num_layers]
    assert len(counted.expert_rows) == sum(config.has_experts(layer) for layer in layers)
    assert extra_flops == 0 or (config.moe is not None and config.moe.capacity.factor is not None)


def test_bidirectional_flops_match_those_counted_by_torch() -> None:
    exact = replace(BIDIRECTIONAL, pad_vocab_to_multiple_of=1)
    squares = sum(length**2 for length in DOCUMENTS)
    assert count_model(exact).flops == step_flops(
        exact, tokens=sum(DOCUMENTS), squared_lengths=squares
    )


@pytest.mark.parametrize("products", ["loop", "grouped", "batched"])
@pytest.mark.parametrize("config", [SHARED_EXPERTS, LATENT_EXPERTS], ids=["shared", "latent"])
def test_expert_flops_do_not_depend_on_the_backend(config: ModelConfig, products: str) -> None:
    assert config.moe is not None
    capacity = CapacityConfig(factor=1.0, pad=True) if products == "batched" else CapacityConfig()
    config = replace(config, num_layers=1, moe=replace(config.moe, capacity=capacity))
    dtype = torch.float32 if products == "grouped" else torch.float64
    counted = count_model(config, products=True, dtype=dtype)
    assert (counted.grouped, counted.batched) == (products == "grouped", products == "batched")
    assert counted.flops == useful_and_hidden(config) + extra_expert_flops(
        config, counted.expert_rows
    )


def test_rates() -> None:
    assert tflops_per_device(6e15, seconds=2.0, devices=10) == 300.0
    assert model_flops_utilization(6e15, seconds=2.0, devices=10, peak_tflops=600.0) == 0.5


def test_the_head_takes_a_chunk_of_the_size_that_the_estimate_counts() -> None:
    assert loss_chunk(4096, ranks=1) == 512
    assert loss_chunk(1024, ranks=1) == 2048
    assert loss_chunk(1024, ranks=3) == 6144, "each rank forms a third of these logits"
    assert loss_chunk(128_256, ranks=1) == 512, "large vocabularies still take 512 tokens"
    vocab = VocabShard(single_rank_group("tp"), 0, 128_256)
    head = HeadShard.build(torch.empty(128_256, 2, device="meta"), vocab)
    assert head.chunk == 512


def test_loss_chunk_of_the_run_determines_the_number_of_logits() -> None:
    assert loss_chunk_size(tiny_run({"train.loss_chunk": "7"})) == 7
    assert loss_chunk_size(tiny_run()) == loss_chunk(tiny_run().model.vocab_size, ranks=1)
