"""Attention stays inside a document, looks only back, and serves a cache."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalith.kernels import cpu
from megalith.kernels.attention import (
    KEPT_LENGTH,
    Tile,
    _hidden,
    _loop_softmax,
    attention,
    reference_attention,
    sdpa_documents,
)
from megalith.kernels.tokens import Tokens, tokens_of_lengths, tokens_of_queries, tokens_of_rows

LAYOUTS = {
    "long rows": tokens_of_rows(2, 70),
    "one row": tokens_of_rows(1, 9),
    "long documents": tokens_of_lengths([70, 3, 100, 1, 64, 40]),
    "padded documents": tokens_of_queries([(90, 90), (0, 0), (38, 38), (0, 0)]),
    "rows": tokens_of_rows(3, 5),
    "rows of one token": tokens_of_rows(4, 1),
    "documents": tokens_of_lengths([4, 1, 7, 3]),
    "cache": tokens_of_queries([(1, 6), (2, 5), (4, 4), (1, 1)]),
    "padded": tokens_of_queries([(3, 3), (0, 0), (2, 4), (0, 0)]),
}


def qkv(tokens: Tokens, *, heads: int, kv_heads: int, d: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries, keys = tokens.num_tokens, sum(kv for _, kv in tokens.lengths)
    shapes = [(queries, heads, d), (keys, kv_heads, d), (keys, kv_heads, d)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_result_and_gradients_equal_the_reference(layout: str, heads: int, kv_heads: int) -> None:
    tokens = LAYOUTS[layout]
    inputs = qkv(tokens, heads=heads, kv_heads=kv_heads)
    y, expected = attention(*inputs, tokens), reference_attention(*inputs, tokens)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    for mine, theirs in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy)):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_the_reference_is_softmax_over_visible_scores() -> None:
    q, k, v = qkv(tokens_of_rows(1, 3), heads=1, kv_heads=1)
    y = reference_attention(q, k, v, tokens_of_rows(1, 3))[:, 0]
    for i in range(3):
        weights = torch.softmax(torch.stack([q[i, 0] @ k[j, 0] for j in range(i + 1)]) / 8**0.5, dim=0)
        torch.testing.assert_close(y[i], weights @ v[: i + 1, 0])


@pytest.mark.parametrize("lengths", [[3, 3, 3], [2, 4, 3], [40, 90, 10, 60], [100, 100]])
def test_a_token_changes_nothing_before_it_nor_in_other_documents(lengths: list[int]) -> None:
    tokens = tokens_of_lengths(lengths)
    q, k, v = (x.detach() for x in qkv(tokens, heads=2, kv_heads=2))
    before = attention(q, k, v, tokens)
    changed = lengths[0] + 1  # inside the second document
    k, v = k.clone(), v.clone()
    k[changed] += 1
    v[changed] -= 2
    moved = (attention(q, k, v, tokens) != before).flatten(1).any(1)
    same_document = tokens.document == tokens.document[changed]
    assert torch.equal(moved, same_document & (torch.arange(tokens.num_tokens) >= changed))


def test_reading_one_token_at_a_time_from_a_cache_gives_the_same() -> None:
    whole = tokens_of_rows(1, 6)
    q, k, v = (x.detach() for x in qkv(whole, heads=4, kv_heads=2))
    expected = attention(q, k, v, whole)
    for i in range(6):
        step = tokens_of_queries([(1, i + 1)])
        torch.testing.assert_close(attention(q[i : i + 1], k[: i + 1], v[: i + 1], step), expected[i : i + 1])
    chunk = tokens_of_queries([(2, 6)])
    torch.testing.assert_close(attention(q[4:], k, v, chunk), expected[4:])


@pytest.mark.parametrize("layout", ["rows", "documents"])
def test_slices_of_one_wide_projection_need_no_copy(layout: str) -> None:
    tokens = LAYOUTS[layout]
    wide = torch.randn(tokens.num_tokens, 4 + 2 + 2, 8, dtype=torch.float64)
    q, k, v = wide.split([4, 2, 2], dim=1)
    expected = attention(q.clone(), k.clone(), v.clone(), tokens)
    torch.testing.assert_close(attention(q, k, v, tokens), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("layout", ["rows", "documents", "cache"])
def test_narrow_types_stay_near_float64(dtype: torch.dtype, tolerance: float, layout: str) -> None:
    tokens = LAYOUTS[layout]
    inputs = [x.detach() for x in qkv(tokens, heads=4, kv_heads=2, dtype=dtype)]
    y = attention(*inputs, tokens)
    assert y.dtype == dtype
    expected = reference_attention(*(x.double() for x in inputs), tokens)
    assert (y.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_hold_on_meta(layout: str) -> None:
    tokens = LAYOUTS[layout]
    q, k, v = (x.detach().to("meta").requires_grad_() for x in qkv(tokens, heads=4, kv_heads=2))
    y = attention(q, k, v, tokens)
    assert y.shape == q.shape
    y.sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape


@pytest.mark.parametrize("length", [70, 600])
def test_tiles_give_the_same_whether_probabilities_are_kept_or_computed_again(length: int) -> None:
    tokens = tokens_of_rows(2, length)
    q, k, v = qkv(tokens, heads=4, kv_heads=2)
    y, expected = attention(q, k, v, tokens), sdpa_documents(q, k, v, length)
    assert (type(y.grad_fn).__name__, length <= KEPT_LENGTH) == ("TiledAttentionBackward", length == 70)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    for mine, theirs in zip(torch.autograd.grad(y, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy)):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_tile_of_few_heads_gives_the_same_as_one_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_of_rows(3, 70)
    q, k, v = qkv(tokens, heads=4, kv_heads=2)
    expected = attention(q, k, v, tokens)
    monkeypatch.setattr("megalith.kernels.attention.TILE_SCORES", 1)
    y = attention(q, k, v, tokens)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    y.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("length", [40, 200])
def test_bf16_gradients_are_as_near_to_float64_as_those_of_torch(length: int) -> None:
    tokens = tokens_of_rows(2, length)
    inputs = qkv(tokens, heads=4, kv_heads=2, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dy = torch.randn(tokens.num_tokens, 4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    grads = torch.autograd.grad(attention(*inputs, tokens), inputs, dy)
    torchs = torch.autograd.grad(sdpa_documents(*inputs, length), inputs, dy)
    expected = torch.autograd.grad(reference_attention(*exact, tokens), exact, dy.double())
    for mine, theirs, right in zip(grads, torchs, expected):
        assert (mine - right).norm() <= 2 * (theirs - right).norm()


@pytest.mark.skipif(cpu.openmp() is None, reason="no OpenMP library to call on this machine")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [Tile(slice(0, 3), 0, 64, 128, ()), Tile(slice(0, 3), 32, 64, 100, (70, 71, 99))])
def test_the_loop_takes_the_softmax_over_visible_keys_alone(tile: Tile, dtype: torch.dtype) -> None:
    scores = 4 * torch.randn(3, 2 * (tile.stop - tile.start), tile.stop - tile.first)
    hidden = _hidden(tile, scores)
    expected = scores.clone()
    expected.unflatten(1, (2, -1))[..., -hidden.shape[1] :].add_(hidden)
    expected = expected.double().softmax(-1)
    ours = _loop_softmax(scores.clone(), tile, dtype)
    assert ours.dtype == dtype
    assert not ours[expected == 0].any()
    torch.testing.assert_close(ours.double(), expected, rtol=2e-6 if dtype == torch.float32 else 4e-3, atol=1e-7)


def test_values_that_are_a_part_of_a_larger_tensor_do_not_keep_all_of_it() -> None:
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
        return saved

    product = torch.randn(12, 8 * 6, requires_grad=True) * 1
    q, k, v = (part.unflatten(-1, (-1, 6)) for part in product.split([24, 12, 12], dim=-1))
    with saved_tensors_hooks(note, lambda saved: saved):
        out = attention(q.contiguous(), k.contiguous(), v, tokens_of_rows(1, 12))
    assert sorted(kept.values()) == sorted(4 * size for size in (12 * 24, 12 * 12, 12 * 12, 12 * 4, 12 * 24))
    with saved_tensors_hooks(note, lambda saved: saved):
        assert torch.equal(attention(q, k, v, tokens_of_rows(1, 12)), out)
    assert product.untyped_storage()._cdata in kept, "where queries keep it anyway, a copy would only add to it"
