"""QK norms: formulas, per head and over all heads, and over ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megalith.config.model import AttentionConfig, ModelConfig, QKNorm
from megalith.nn.attention import Attention
from megalith.nn.norm import AllHeadsNorms, l2_normalize
from megalith.plan.parameters import layer_parameters
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, assert_equals


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rms(x: Tensor, dims: tuple[int, ...], eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(dims, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize(("kind", "dims"), [("head", (2,)), ("whole", (1, 2)), ("l2", (2,))])
def test_qk_norm_eps_affects_only_qk_norms(
    kind: QKNorm, dims: tuple[int, ...], layers: SimpleNamespace
) -> None:
    config = layers.config(attention=AttentionConfig(qk_norm=kind, qk_norm_eps=0.5))
    layer = layers.build(Attention, config)
    w, q, k = layers.weights(layer), seeded(5, 6, 4), seeded(5, 3, 4, seed=1)
    normed_q, normed_k = layer.norms(q, k)
    assert config.norm_eps == 1e-5
    assert_equals("q", normed_q, rms(q, dims, 0.5) * w.get("q_norm.weight", 1.0), FP64)
    assert_equals("k", normed_k, rms(k, dims, 0.5) * w.get("k_norm.weight", 1.0), FP64)


def test_layers_without_qk_norm_have_no_weight(layers: SimpleNamespace) -> None:
    some = layers.config(
        num_layers=2, attention=AttentionConfig(qk_norm="head", qk_norm_layers=(True, False))
    )
    normed, plain = (layers.weights(layers.build(Attention, some.at(layer))) for layer in range(2))
    assert normed.keys() - plain.keys() == {"q_norm.weight", "k_norm.weight"}
    counts = [
        {one.name.split(".", 2)[2] for one in layer_parameters(some, layer)} for layer in range(2)
    ]
    assert counts[0] - counts[1] == {"attention.q_norm.weight", "attention.k_norm.weight"}


def test_per_head_all_heads_share_a_weight(layers: SimpleNamespace) -> None:
    layer = layers.build(Attention, layers.config(attention=AttentionConfig(qk_norm="head")))
    w, q, k = layers.weights(layer), seeded(5, 6, 4), seeded(5, 3, 4, seed=1)
    normed_q, normed_k = layer.norms(q, k)
    assert w["q_norm.weight"].shape == (4,)
    assert_equals("q", normed_q, rms(q, (2,)) * w["q_norm.weight"], FP64)
    assert_equals("k", normed_k, rms(k, (2,)) * w["k_norm.weight"], FP64)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_over_all_heads_every_feature_has_its_own_weight(
    zero_centered: bool, layers: SimpleNamespace
) -> None:
    config = layers.config(
        attention=AttentionConfig(qk_norm="whole"), zero_centered_gamma=zero_centered
    )
    layer = layers.build(Attention, config)
    w, q, k = layers.weights(layer), seeded(5, 6, 4), seeded(5, 3, 4, seed=1)
    normed_q, normed_k = layer.norms(q, k)
    offset = 1.0 if zero_centered else 0.0
    assert w["q_norm.weight"].shape == (6, 4) and w["k_norm.weight"].shape == (3, 4)
    assert_equals("q", normed_q, rms(q, (1, 2)) * (w["q_norm.weight"] + offset), FP64)
    assert_equals("k", normed_k, rms(k, (1, 2)) * (w["k_norm.weight"] + offset), FP64)


def test_l2_norms_have_no_weight_and_commute_with_rope() -> None:
    q, k = seeded(5, 6, 4), seeded(5, 3, 4, seed=1)
    normed_q, normed_k = l2_normalize(q, k, eps=1e-5)
    assert_equals("q", normed_q, rms(q, (2,)), FP64)
    assert_equals("k", normed_k, rms(k, (2,)), FP64)


def normed_by_ranks(
    rank: int, world: int, config: ModelConfig, q: Tensor, build: object, real: object
) -> Tensor:
    layer = build(Attention, config, real(config, world, rank))  # type: ignore[operator]  # functions of the conftest
    assert isinstance(layer.norms, AllHeadsNorms)
    first = 6 * rank // world
    normed: Tensor = layer.norms.q_norm(q[:, first : first + layer.num_heads])
    return normed.detach()


@pytest.mark.parametrize("tp", [2, 3])
def test_norm_over_all_heads_reduces_over_tensor_parallel_ranks(
    tp: int, layers: SimpleNamespace
) -> None:
    config, q = (
        layers.config(attention=AttentionConfig(qk_norm="whole"), num_kv_heads=6),
        seeded(5, 6, 4),
    )
    whole, _ = layers.build(Attention, config).norms(q, q)
    results = run_ranks(normed_by_ranks, tp, config, q, layers.build, layers.real)
    assert_equals("q", torch.cat(results, dim=1), whole, FP64)
