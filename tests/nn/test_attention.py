from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.model import AttentionConfig, ModelConfig
from megalith.kernels.layer_inputs import Attend, LayerInputs
from megalith.kernels.packed import seq_params_from_queries
from megalith.kernels.rope import reference_rope
from megalith.nn.attention import Attention
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, assert_equals


def formula(w: dict[str, Tensor], x: Tensor, tokens: LayerInputs, config: ModelConfig) -> Tensor:
    """The paper's attention, one document and one head after the other."""
    n, g, d = config.num_heads, config.num_kv_heads, config.head_size()
    q = torch.einsum("th,ndh->tnd", x, w["q"]) + w.get("q_bias", 0.0)
    k, v = (
        torch.einsum("th,gdh->tgd", x, w["kv"][i]) + (w["kv_bias"][i] if "kv_bias" in w else 0.0)
        for i in range(2)
    )
    q, k = reference_rope(q, *tokens.rope), reference_rope(k, *tokens.rope)
    heads = torch.zeros(len(x), n, d, dtype=x.dtype)
    for head in range(n):
        shared = head // (n // g)
        for t in range(len(x)):
            seen = [
                s
                for s in range(t + 1)
                if tokens.seq_params.document_ids[s] == tokens.seq_params.document_ids[t]
            ]
            scores = torch.stack([q[t, head] @ k[s, shared] / d**0.5 for s in seen]).softmax(0)
            heads[t, head] = scores @ v[seen, shared]
    if "gate" in w:
        heads = heads / (
            1 + (-torch.einsum("th,ndh->tnd", x, w["gate"]) - w.get("gate_bias", 0.0)).exp()
        )
    return torch.einsum("tnd,hnd->th", heads, w["o"]) + w.get("o_bias", 0.0)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_attention_matches_the_formula_of_the_paper(
    kv_heads: int, bias: bool, layers: SimpleNamespace
) -> None:
    config = layers.config(num_kv_heads=kv_heads, qkv_bias=bias, output_bias=bias)
    layer = layers.build(Attention, config)
    x, tokens = layers.inputs(9), layers.layer_inputs(config, [5, 1, 3])
    assert_equals(
        "attention", layer(x, tokens), formula(layers.weights(layer), x, tokens, config), FP64
    )


@pytest.mark.parametrize("bias", [False, True])
def test_a_gate_is_a_sigmoid_for_every_feature_of_every_head(
    bias: bool, layers: SimpleNamespace
) -> None:
    config = layers.config(attention=AttentionConfig(gated=True), qkv_bias=bias)
    layer = layers.build(Attention, config)
    x, tokens, result = (
        layers.inputs(9),
        layers.layer_inputs(config, [5, 1, 3]),
        layers.weights(layer),
    )
    assert "gate" in result and ("gate_bias" in result) == bias
    assert_equals("attention", layer(x, tokens), formula(result, x, tokens, config), FP64)


@pytest.mark.parametrize(
    ("tp", "kv_heads"), [(2, 3), (3, 3), (2, 1), (4, 2), (6, 2), (6, 3), (5, 6)]
)
def test_rank_holds_whole_heads_and_their_kv_heads(
    tp: int, kv_heads: int, layers: SimpleNamespace
) -> None:
    config = layers.config(num_kv_heads=kv_heads)
    whole = layers.weights(layers.build(Attention, config))
    taken = 0
    for rank in range(tp):
        layer = layers.build(Attention, config, layers.paper(config, tp, rank))
        part = layers.weights(layer)
        count = part["q"].shape[0]
        assert count == layer.num_heads > 0
        assert torch.equal(part["q"], whole["q"][taken : taken + count])
        assert torch.equal(part["q_bias"], whole["q_bias"][taken : taken + count])
        assert torch.equal(part["o"], whole["o"][:, taken : taken + count])
        first = taken // (6 // kv_heads)
        last = (taken + count - 1) // (6 // kv_heads)
        assert (
            torch.equal(part["kv"], whole["kv"][:, first : last + 1])
            and part["kv"].shape[1] == layer.num_kv_heads
        )
        assert torch.equal(part["kv_bias"], whole["kv_bias"][:, first : last + 1])
        taken += count
    assert taken == 6


def shared_heads(
    rank: int,
    world: int,
    config: ModelConfig,
    x: Tensor,
    tokens: LayerInputs,
    build: object,
    real: object,
) -> Tensor:
    layer = build(Attention, config, real(config, world, rank))  # type: ignore[operator]  # functions of the conftest
    y: Tensor = layer(x, tokens)
    return y.detach()


@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 3), (3, 1), (4, 2)])
def test_tensor_parallel_matches_one_rank(tp: int, kv_heads: int, layers: SimpleNamespace) -> None:
    config = layers.config(num_kv_heads=kv_heads)
    x, tokens = layers.inputs(9), layers.layer_inputs(config, [5, 4])
    expected = layers.build(Attention, config)(x, tokens)
    for y in run_ranks(shared_heads, tp, config, x, tokens, layers.build, layers.real):
        assert_equals("attention", y, expected, FP64)


class SpanHook:
    """A cache of one document in plain operations."""

    def __init__(self) -> None:
        self.k, self.v = [torch.zeros(0)] * 0, [torch.zeros(0)] * 0

    def attend(
        self, core: Attend, q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any
    ) -> Tensor:
        self.k.append(k)
        self.v.append(v)
        return core(q, torch.cat(self.k), torch.cat(self.v), *others, **options)


@pytest.mark.parametrize("steps", [[9], [1] * 9, [4, 1, 3, 1]])
def test_decoding_with_kv_cache_matches_full_forward(
    steps: list[int], layers: SimpleNamespace
) -> None:
    config = layers.config()
    layer = layers.build(Attention, config)
    x, tokens, cache, read = layers.inputs(9), layers.layer_inputs(config, [9]), SpanHook(), 0
    cos, sin = tokens.rope
    results = []
    for count in steps:
        now = slice(read, read + count)
        read += count
        seq_params = seq_params_from_queries([(count, read)])
        part = LayerInputs(seq_params, cache=cache, rope=(cos[now], sin[now]))
        results.append(layer(x[now], part))
    assert_equals("attention", torch.cat(results), layer(x, tokens), FP64)
