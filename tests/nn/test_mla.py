import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config.model import AttentionConfig, MLAConfig, ModelConfig, RopeConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_queries
from megalith.nn.mla import LatentAttention, choose_form, latent_scores
from megalith.parallel.collectives import all_gather
from megalith.parallel.tensor import SequenceParallelComm
from megalith.plan.serving.cache_layout import AttentionView
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, PARITY, assert_close, assert_equals
from tests.infer.engines import SequenceCache

SIZES: dict[str, Any] = {"kv_rank": 7, "nope_dim": 5, "rope_dim": 4, "value_dim": 3}
YARN = RopeConfig(
    scaling="yarn", factor=40.0, original_max_position=16, attention_factor=1.2, interleaved=True
)
KINDS: dict[str, dict[str, Any]] = {
    "queries from x": {"mla": MLAConfig(**SIZES)},
    "queries from a short vector": {"mla": MLAConfig(**SIZES, q_rank=8)},
    "yarn": {"mla": MLAConfig(**SIZES, q_rank=8, yarn_mscale=0.707), "rope": YARN},
    "values wider than keys": {"mla": MLAConfig(**SIZES | {"value_dim": 11, "rope_dim": 2})},
    "a window": {"mla": MLAConfig(**SIZES), "attention": AttentionConfig(window=3)},
    "LayerNorm": {"mla": MLAConfig(**SIZES, q_rank=8), "norm": "layer"},
    "no norms": {"mla": MLAConfig(**SIZES, q_rank=8, norms=False)},
    "zero-centered": {"mla": MLAConfig(**SIZES, q_rank=8), "zero_centered_gamma": True},
}


def config_of(kind: str, layers: SimpleNamespace, **changes: Any) -> ModelConfig:
    """Five heads, which no number of ranks divides."""
    interleaved = {"rope": RopeConfig(interleaved=True)}
    config: ModelConfig = layers.config(
        **interleaved | KINDS[kind] | {"num_heads": 5, "num_kv_heads": 5} | changes
    )
    return config


def formula(w: dict[str, Tensor], x: Tensor, tokens: LayerInputs, config: ModelConfig) -> Tensor:
    """The papers' attention, one head after the other: arXiv:2405.04434, equations 9 to 19."""
    sizes, (cos, sin) = config.mla, tokens.rope
    assert sizes is not None
    scale = latent_scores(config, 0).scale
    latent = short(x, w, "kv_down", config)
    shared = turned((x @ w["kv_down"].T)[:, sizes.kv_rank :], cos, sin)
    heads = []
    for head in range(config.num_heads):
        q = x @ w["q"][head].T if "q" in w else short(x, w, "q_down", config) @ w["q_up"][head].T
        q = torch.cat([q[:, : sizes.nope_dim], turned(q[:, sizes.nope_dim :], cos, sin)], 1)
        k = torch.cat([latent @ w["kv_up"][head, : sizes.nope_dim].T, shared], 1)
        v = latent @ w["kv_up"][head, sizes.nope_dim :].T
        heads.append((scores_seen(q @ k.T * scale, tokens, config.attention.window)).softmax(1) @ v)
    return torch.einsum("ntv,hnv->th", torch.stack(heads), w["o"]) + w["o_bias"]


def short(x: Tensor, w: dict[str, Tensor], word: str, config: ModelConfig) -> Tensor:
    assert config.mla is not None
    y = (x @ w[word].T)[:, : config.mla.kv_rank if word == "kv_down" else config.mla.q_rank]
    if not config.mla.norms:
        assert not any("norm" in name for name in w)
        return y
    weight = w[f"{word}_norm.weight"]
    if config.norm == "layer":
        y = y - y.mean(1, keepdim=True)
    y = y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt() * (weight + config.zero_centered_gamma)
    return y + w[f"{word}_norm.bias"] if config.norm == "layer" else y


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbors as complex numbers, turned."""
    y = torch.view_as_complex(x.unflatten(1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
    return torch.view_as_real(y).flatten(1)


def scores_seen(scores: Tensor, tokens: LayerInputs, window: int | None) -> Tensor:
    t = torch.arange(len(scores))
    ago = t[:, None] - t
    seen = (ago >= 0) & (tokens.seq_params.document_ids[:, None] == tokens.seq_params.document_ids)
    return scores.masked_fill(~(seen if window is None else seen & (ago < window)), -math.inf)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_matches_the_formula_of_the_paper(kind: str, layers: SimpleNamespace) -> None:
    config = config_of(kind, layers)
    layer = layers.build(LatentAttention, config)
    x, tokens = layers.inputs(9), layers.layer_inputs(config, [5, 1, 3])
    assert_equals(
        "attention", layer(x, tokens), formula(layers.weights(layer), x, tokens, config), FP64
    )


@pytest.mark.parametrize("q_rank", [None, 8])
@pytest.mark.parametrize("mscale", [None, (0.707, 0.707), (1.0, 0.5), (0.707, 0.0)])
def test_mla_matches_transformers(
    q_rank: int | None, mscale: tuple[float, float] | None, layers: SimpleNamespace
) -> None:
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
    if mscale is not None:
        rope |= {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16}
        rope |= {"mscale": mscale[0], "mscale_all_dim": mscale[1], "beta_fast": 32, "beta_slow": 1}
    theirs_config = deepseek.DeepseekV3Config(
        hidden_size=18,
        num_attention_heads=5,
        num_key_value_heads=5,
        q_lora_rank=q_rank,
        kv_lora_rank=7,
        qk_nope_head_dim=5,
        qk_rope_head_dim=4,
        v_head_dim=3,
        rope_parameters=rope,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    reference = deepseek.DeepseekV3Attention(theirs_config, 0).double()
    config = config_of(
        "queries from x",
        layers,
        output_bias=False,
        mla=MLAConfig(**SIZES, q_rank=q_rank),
        rope=RopeConfig(theta=100.0, interleaved=True),
    )
    if mscale is not None:
        factor = _g(mscale[0]) / _g(mscale[1]) if all(mscale) else _g(1.0)
        yarn = replace(YARN, theta=100.0, attention_factor=factor)
        sizes = MLAConfig(**SIZES, q_rank=q_rank, yarn_mscale=mscale[1] or None)
        config = replace(config, rope=yarn, mla=sizes)
    layer = layers.build(LatentAttention, config)
    names = {
        "q": "q_proj",
        "q_down": "q_a_proj",
        "q_down_norm.weight": "q_a_layernorm",
        "q_up": "q_b_proj",
    }
    names |= {
        "kv_down": "kv_a_proj_with_mqa",
        "kv_down_norm.weight": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
    }
    names |= {"o": "o_proj"}
    ours = layers.weights(layer)
    with torch.no_grad():
        for name, tensor in ours.items():
            weight = getattr(reference, names[name]).weight
            weight.copy_(tensor.reshape(weight.shape))
    x, tokens = layers.inputs(9), layers.layer_inputs(config, [9])
    rotary = deepseek.DeepseekV3RotaryEmbedding(theirs_config)
    mask = torch.full((1, 1, 9, 9), -math.inf, dtype=torch.float64).triu(1)
    positions = rotary(x, torch.arange(9)[None])
    assert_close(
        dict(zip(("cos", "sin"), tokens.rope)),
        dict(zip(("cos", "sin"), [p[0, :, :2] for p in positions])),
        FP64,
    )
    expected, _ = reference(x[None], positions, mask)
    assert_equals("attention", layer(x, tokens), expected[0], PARITY)  # their norms are fp32


def _g(mscale: float) -> float:
    return 0.1 * mscale * math.log(40) + 1


def test_yarn_temperature_matches_deepseek_v3(layers: SimpleNamespace) -> None:
    sizes = MLAConfig(kv_rank=512, yarn_mscale=1.0)
    config = layers.config(mla=sizes, rope=RopeConfig(scaling="yarn", factor=40.0))
    assert latent_scores(config, 0).scale == pytest.approx(0.1352338, abs=1e-7)
    given = replace(config, attention=AttentionConfig(scale=0.3, softcap=5.0))
    assert latent_scores(given, 0).scale == 0.3 and latent_scores(given, 0).softcap == 5.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[9], [1] * 9, [4, 1, 3, 1]])
def test_decoding_with_kv_cache_matches_full_forward(
    kind: str, steps: list[int], layers: SimpleNamespace
) -> None:
    config = config_of(kind, layers)
    layer = layers.build(LatentAttention, config)
    x, tokens, read, result = layers.inputs(9), layers.layer_inputs(config, [9]), 0, []
    cache = SequenceCache([AttentionView(config.attention.window)])
    with torch.no_grad():
        for count in steps:
            now = slice(read, read + count)
            rope = tuple(table[now] for table in tokens.rope)
            seq_params = seq_params_from_queries([(count, read + count)])
            part = LayerInputs(seq_params, cache=cache.layers(read, count)[0], rope=rope)
            result.append(layer(x[now], part))
            read += count
        assert_equals("attention", torch.cat(result), layer(x, tokens), FP64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [[9], [4, 1, 3, 1]])
def test_expanded_and_absorbed_forms_match(
    kind: str, steps: list[int], layers: SimpleNamespace
) -> None:
    config, result = config_of(kind, layers), []
    x, tokens = layers.inputs(9), layers.layer_inputs(config, [9])
    for form in ("absorbed", "expanded"):
        layer, read = layers.build(LatentAttention, config), 0
        cache = SequenceCache([AttentionView(config.attention.window)])
        layer.reading = lambda sizes, lengths, form=form: form
        for count in steps:
            rope = tuple(table[read : read + count] for table in tokens.rope)
            seq_params = seq_params_from_queries([(count, read + count)])
            part = LayerInputs(seq_params, cache=cache.layers(read, count)[0], rope=rope)
            with torch.no_grad():
                result.append(layer(x[read : read + count], part))
            read += count
    half = len(steps)
    torch.testing.assert_close(
        torch.cat(result[:half]), torch.cat(result[half:]), rtol=1e-9, atol=1e-9
    )
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(result[:half]), layer(x, tokens), rtol=1e-9, atol=1e-9)


def test_prefill_is_expanded_and_decoding_absorbed() -> None:
    large = MLAConfig(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    assert choose_form(large, [(4096, 4096)]) == "expanded"
    assert choose_form(large, [(1, 2)]) == "absorbed"
    assert choose_form(large, [(1, 900), (1, 30)]) == "absorbed"
    # MatmulOps of 4096 tokens read after 4096: n · r · (d_nope + d_v) per key, or more for each
    # pair.
    assert choose_form(large, [(4096, 8192)]) == "expanded"
    assert choose_form(large, [(64, 8192)]) == "absorbed"
    for queries, keys in ((16, 64), (300, 5000), (2, 3)):
        pairs = sum(keys - ago for ago in range(queries))
        costs = {
            "expanded": keys * 512 * 256 + pairs * (128 + 64 + 128),
            "absorbed": queries * 512 * 256 + pairs * (576 + 512),
        }
        assert choose_form(large, [(queries, keys)]) == min(costs, key=costs.__getitem__)


def test_training_always_uses_the_expanded_form(layers: SimpleNamespace) -> None:
    layer = layers.build(LatentAttention, config_of("queries from x", layers))
    layer.reading = None
    tokens = layers.layer_inputs(config_of("queries from x", layers), [9])
    layer(layers.inputs(9), tokens).sum().backward()
    assert all(part.grad is not None for part in layer.parameters())


class Sizes:
    """Counts what a cache is given for a token."""

    def __init__(self) -> None:
        self.values = 0

    def read(self, rows: Tensor, *, value_size: int) -> Tensor:
        assert value_size == 7
        self.values = rows[0].numel()
        return rows


def test_kv_cache_stores_the_latent_vector_and_the_shared_key(layers: SimpleNamespace) -> None:
    config, cache = config_of("queries from x", layers), Sizes()
    inputs = replace(layers.layer_inputs(config, [9]), cache=cache)
    layers.build(LatentAttention, config)(layers.inputs(9), inputs)
    assert cache.values == 7 + 4


@pytest.mark.parametrize("tp", [2, 3, 5])
def test_rank_holds_whole_heads_and_replicated_down_projections(
    tp: int, layers: SimpleNamespace
) -> None:
    config = config_of("queries from a short vector", layers)
    whole, taken = layers.weights(layers.build(LatentAttention, config)), 0
    for rank in range(tp):
        layer = layers.build(LatentAttention, config, layers.paper(config, tp, rank))
        part, heads = layers.weights(layer), layer.num_heads
        for name in ("q_up", "kv_up"):
            assert torch.equal(part[name], whole[name][taken : taken + heads])
        assert torch.equal(part["o"], whole["o"][:, taken : taken + heads])
        for name in ("q_down", "kv_down", "q_down_norm.weight", "kv_down_norm.weight", "o_bias"):
            assert torch.equal(part[name], whole[name])
        taken += heads
    assert taken == 5


def shared_heads(
    rank: int,
    world: int,
    config: ModelConfig,
    x: Tensor,
    tokens: LayerInputs,
    build: Any,
    real: Any,
    sp: bool,
) -> tuple[Tensor, Tensor]:
    """What a rank gives, and the gradient of x, both of all tokens."""
    mesh = real(config, world, rank)
    layer: nn.Module = build(LatentAttention, config, mesh)
    tp_comm = SequenceParallelComm(mesh.tp) if sp else layer.tp_comm
    for module in layer.modules():
        if hasattr(module, "tp_comm"):
            module.tp_comm = tp_comm
    assert isinstance(layer, LatentAttention)
    local = tp_comm.select_local(x).clone().requires_grad_()
    y = layer(local, tokens)
    y.square().sum().backward()
    assert local.grad is not None
    whole = [
        all_gather(part.detach(), mesh.tp) if sp else part.detach() for part in (y, local.grad)
    ]
    return whole[0], whole[1]


@pytest.mark.parametrize(("tp", "sp"), [(2, False), (3, False), (2, True), (3, True)])
@pytest.mark.parametrize("kind", ["queries from x", "yarn"])
def test_tensor_parallel_matches_one_rank(
    kind: str, tp: int, sp: bool, layers: SimpleNamespace
) -> None:
    config = config_of(kind, layers)
    x, tokens = layers.inputs(12).requires_grad_(), layers.layer_inputs(config, [7, 5])
    expected = layers.build(LatentAttention, config)(x, tokens)
    expected.square().sum().backward()
    args = (config, x.detach(), tokens, layers.build, layers.real, sp)
    for y, dx in run_ranks(shared_heads, tp, *args):
        assert_equals("attention", y, expected.detach(), FP64)
        assert x.grad is not None
        assert_equals("gradient", dx, x.grad, FP64)
