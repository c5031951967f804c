"""Tiled attention on CPUs matches SDPA."""

import math

import pytest
import torch
from torch import Tensor

from megalith.kernels import cpu_threads
from megalith.kernels.attention.cpu_tiled import (
    KEPT_LENGTH,
    AttentionTile,
    _hidden,
    _loop_softmax,
    tiled_attention,
)
from megalith.kernels.attention.dispatch import attention, reference_attention
from megalith.kernels.attention.scores import Scores
from megalith.kernels.attention.sdpa import sdpa_documents
from megalith.kernels.linear import bf16_matmul
from megalith.kernels.packed import PackedSeqParams, seq_params_from_lengths, seq_params_from_rows


def qkv(
    tokens: PackedSeqParams,
    *,
    heads: int,
    kv_heads: int,
    d: int = 8,
    d_v: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (tokens.num_tokens, heads, d),
        (tokens.num_tokens, kv_heads, d),
        (tokens.num_tokens, kv_heads, d_v),
    ]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


@pytest.mark.parametrize("length", [70, 600])
def test_saved_and_recomputed_probabilities_match(length: int) -> None:
    tokens = seq_params_from_rows(2, length)
    q, k, v = qkv(tokens, heads=4, kv_heads=2)
    y, expected = attention(q, k, v, tokens), sdpa_documents(q, k, v, length)
    assert (type(y.grad_fn).__name__, length <= KEPT_LENGTH) == (
        "TiledAttentionBackward",
        length == 70,
    )
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    for actual, reference in zip(
        torch.autograd.grad(y, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy)
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


def test_tiles_of_few_heads_match_tiles_of_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = seq_params_from_rows(3, 70)
    q, k, v = qkv(tokens, heads=4, kv_heads=2)
    expected = attention(q, k, v, tokens)
    monkeypatch.setattr("megalith.kernels.attention.cpu_tiled.TILE_SCORES", 1)
    y = attention(q, k, v, tokens)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    y.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("length", [40, 200])
def test_bf16_gradients_are_as_accurate_as_torch(length: int) -> None:
    tokens = seq_params_from_rows(2, length)
    inputs = qkv(tokens, heads=4, kv_heads=2, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dy = torch.randn(tokens.num_tokens, 4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    grads = torch.autograd.grad(attention(*inputs, tokens), inputs, dy)
    with bf16_matmul("torch"):
        torchs = torch.autograd.grad(sdpa_documents(*inputs, length), inputs, dy)
    expected = torch.autograd.grad(reference_attention(*exact, tokens), exact, dy.double())
    for actual, reference, right in zip(grads, torchs, expected):
        assert (actual - right).norm() <= 2 * (reference - right).norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(70,), (600,), (40, 90, 3), (3, 50, 1, 80, 64)])
def test_values_may_have_another_width_and_scores_another_scale(
    lengths: tuple[int, ...], causal: bool
) -> None:
    tokens = seq_params_from_lengths(list(lengths) * 2)
    inputs = qkv(tokens, heads=4, kv_heads=2, d=6, d_v=4)
    y = tiled_attention(*inputs, lengths, scale=0.7, causal=causal)
    expected = reference_attention(*inputs, tokens, Scores(scale=0.7, causal=causal))
    assert y.shape == (tokens.num_tokens, 4, 4)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    for actual, reference in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy)
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_match_finite_differences(causal: bool) -> None:
    inputs = qkv(seq_params_from_lengths([3, 4]), heads=2, kv_heads=1, d=3, d_v=2)
    assert torch.autograd.gradcheck(
        lambda *x: tiled_attention(*x, (3, 4), scale=1 / math.sqrt(3), causal=causal), inputs
    )


@pytest.mark.skipif(
    cpu_threads.openmp() is None, reason="no OpenMP library to call on this machine"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "tile",
    [
        AttentionTile(slice(0, 3), 0, 64, 128, 128, (), causal=True),
        AttentionTile(slice(0, 3), 32, 64, 100, 100, (70, 71, 99), causal=True),
        AttentionTile(slice(0, 3), 32, 64, 100, 120, (70, 71, 99), causal=False),
    ],
)
def test_numba_softmax_uses_only_visible_keys(tile: AttentionTile, dtype: torch.dtype) -> None:
    scores = 4 * torch.randn(3, 2 * (tile.stop - tile.start), tile.last - tile.first)
    hidden = _hidden(tile, scores)
    expected = scores.clone()
    expected.unflatten(1, (2, -1))[..., -hidden.shape[1] :].add_(hidden)
    expected = expected.double().softmax(-1)
    ours = _loop_softmax(scores.clone(), tile, dtype)
    assert ours.dtype == dtype
    assert not ours[expected == 0].any()
    torch.testing.assert_close(
        ours.double(), expected, rtol=2e-6 if dtype == torch.float32 else 4e-3, atol=1e-7
    )
