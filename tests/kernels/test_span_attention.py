"""Attention over intervals of keys matches the reference, and partial results merge."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.kernels import cpu_threads
from megalith.kernels.attention.dispatch import reference_attention
from megalith.kernels.attention.scores import PLAIN, Scores
from megalith.kernels.attention.split_kv import (
    AttentionGrads,
    attend,
    attend_backward,
    init_attention_result,
    output_share,
    reference_span_attention,
    rows_by_head,
    sink_gradient,
    span_attention,
)
from megalith.kernels.packed import PackedSeqParams, seq_params_from_lengths, seq_params_from_rows
from megalith.plan.context import KeySpans, Slicing, plan_length_spans, plan_slices, plan_spans
from megalith.testing.tolerance import BF16, FP32, FP64, assert_equals
from tests.cases import loop_over


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def qkv(
    queries: int, keys: int, *, n: int = 4, g: int = 2, d_v: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    return random(queries, n, 6, seed=1), random(keys, g, 6, seed=2), random(keys, g, d_v, seed=3)


def assert_same(mine: Tensor, reference: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Output and gradients."""
    assert_equals("output", mine, reference, FP64)
    dy = torch.randn(mine.shape, generator=torch.Generator().manual_seed(9), dtype=mine.dtype)
    pairs = zip(
        "qkv", torch.autograd.grad(mine, inputs, dy), torch.autograd.grad(reference, inputs, dy)
    )
    for name, a, b in pairs:
        assert_equals(f"d{name}", a, b, FP64)


@pytest.mark.parametrize(
    "tokens",
    [
        seq_params_from_rows(2, 70),
        seq_params_from_lengths([3, 100, 1, 64, 40]),
        seq_params_from_rows(3, 4),
    ],
)
@pytest.mark.parametrize(("n", "g"), [(4, 4), (6, 2), (3, 1)])
def test_spans_of_all_earlier_tokens_are_causal_attention(
    tokens: PackedSeqParams, n: int, g: int
) -> None:
    inputs = qkv(tokens.num_tokens, tokens.num_tokens, n=n, g=g)
    actual = span_attention(*inputs, plan_length_spans(tokens.lengths))
    assert_same(actual, reference_attention(*inputs, tokens), inputs)


@pytest.mark.parametrize("window", [2, 5, 70, 500])
@pytest.mark.parametrize(
    "tokens", [seq_params_from_rows(2, 90), seq_params_from_lengths([3, 100, 1, 40])]
)
def test_spans_of_a_window(tokens: PackedSeqParams, window: int) -> None:
    inputs = qkv(tokens.num_tokens, tokens.num_tokens)
    place = torch.arange(tokens.num_tokens)
    near = (place[:, None] - place[None] < window) & (place[:, None] >= place[None])
    mask = near & (tokens.document_ids[:, None] == tokens.document_ids[None])
    q, k, v = (x.transpose(0, 1) for x in inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True
    )
    assert_same(
        span_attention(*inputs, plan_length_spans(tokens.lengths, window)),
        expected.transpose(0, 1),
        inputs,
    )


def pieces(seed: int) -> tuple[list[KeySpans], KeySpans, list[int]]:
    """What one rank's queries see of every rank's keys; the same of all keys at once; and tokens
    per rank."""
    draw = np.random.default_rng(seed)
    ranks, row = 3, 6 * int(draw.integers(8, 30))
    cuts = np.sort(draw.choice(np.arange(1, 2 * row), size=int(draw.integers(0, 6)), replace=False))
    lengths = np.diff([0, *cuts.tolist(), 2 * row])
    slices = plan_slices(lengths, row=row, slicing=Slicing(ranks=ranks))
    window = [None, 7, row // 2][seed % 3]
    local, starts = slices.numbers[seed % ranks], slices.starts()
    parts = [plan_spans(local, keys, starts, window=window) for keys in slices.numbers]
    return (
        parts,
        plan_spans(local, np.arange(2 * row), starts, window=window),
        slices.numbers.reshape(-1).tolist(),
    )


@loop_over("seed", range(12))
def test_partial_results_merge_into_full_attention(seed: int) -> None:
    parts, whole, order = pieces(seed)
    count = len(order) // len(parts)
    q, k, v = qkv(count, len(order))
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64).requires_grad_()
    scores = [PLAIN, Scores(scale=0.3), Scores(softcap=1.5)][seed % 3]
    expected = reference_span_attention(q, k, v, whole, scores, sinks)
    dout = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(5), dtype=expected.dtype
    )
    reference = torch.autograd.grad(expected, [q, k, v, sinks], dout)

    heads = k.shape[1]
    by_rank = [
        [
            rows_by_head(x.detach()[order[r * count : (r + 1) * count]], heads, 1).squeeze(1)
            for x in (k, v)
        ]
        for r in range(len(parts))
    ]
    qh = rows_by_head(q.detach(), heads, 1)
    result = init_attention_result(qh, v.shape[-1], sinks.detach())
    for spans, (kh, vh) in zip(parts, by_rank):
        attend(qh, kh, vh, spans, result, scores)
    assert_equals("output", result.out, rows_by_head(expected, heads, 1), FP64)

    douth = rows_by_head(dout, heads, 1)
    delta = output_share(douth, result.out, torch.float64).squeeze(-1)
    dq = torch.zeros_like(qh)
    for r, (spans, (kh, vh)) in enumerate(zip(parts, by_rank)):
        into = AttentionGrads(dq, torch.zeros_like(kh), torch.zeros_like(vh))
        attend_backward(qh, kh, vh, result.lse, douth, delta, spans, into, scores)
        actual = order[r * count : (r + 1) * count]
        for name, a, b in zip("kv", into[1:], reference[1:3]):
            expected_part = rows_by_head(b[actual], heads, 1).squeeze(1)
            torch.testing.assert_close(
                a, expected_part, rtol=1e-11, atol=1e-11, msg=f"d{name} of rank {r}"
            )
    assert_equals("dq", dq, rows_by_head(reference[0], heads, 1), FP64)
    assert_equals("dsinks", sink_gradient(sinks.detach(), result.lse, delta), reference[3], FP64)


def test_query_without_keys_gives_zero_and_no_gradient() -> None:
    spans = plan_spans(np.array([0, 1, 4, 5]), np.array([2, 3, 4]), np.zeros(6, dtype=np.int64))
    assert spans.visible.tolist() == [[0, 0], [0, 0], [0, 3], [0, 3]]
    inputs = qkv(4, 3)
    out = span_attention(*inputs, spans)
    assert not out[:2].any() and bool(out[2:].any())
    dq, dk, dv = torch.autograd.grad(out.sum(), inputs)
    assert not dq[:2].any() and bool(
        torch.isfinite(torch.cat([x.flatten() for x in (dq, dk, dv)])).all()
    )
    assert_same(span_attention(*inputs, spans), reference_span_attention(*inputs, spans), inputs)

    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    with_sinks = span_attention(*inputs, spans, PLAIN, sinks)
    assert not with_sinks[:2].any() and bool(torch.isfinite(with_sinks).all())
    (dsinks,) = torch.autograd.grad(with_sinks.sum(), sinks)
    alone = plan_spans(np.array([4, 5]), np.array([2, 3, 4]), np.zeros(6, dtype=np.int64))
    later = span_attention(inputs[0][2:], *inputs[1:], alone, PLAIN, sinks)
    assert_equals("dsinks", dsinks, torch.autograd.grad(later.sum(), sinks)[0], FP64)

    nobody = plan_spans(np.array([0, 1]), np.array([2, 3]), np.zeros(4, dtype=np.int64))
    assert nobody.tiles == () and not span_attention(*qkv(2, 2), nobody).any()


def test_query_with_first_key_in_a_later_part_is_exact() -> None:
    """A first piece of which it sees nothing leaves lse at -inf, and no NaN in what follows."""
    hidden = KeySpans(
        1,
        np.array([[0, 0], [0, 1]]),
        plan_spans(np.array([0, 3]), np.array([2]), np.zeros(4, int)).tiles,
    )
    q, k, v = (rows_by_head(x.detach(), 2, 1) for x in qkv(2, 1))
    result = init_attention_result(q, 5)
    attend(q, k.squeeze(1), v.squeeze(1), hidden, result)
    assert result.lse[..., 0].max() == -math.inf and not result.out[..., 0, :].any()
    attend(
        q,
        k.squeeze(1),
        v.squeeze(1),
        plan_spans(np.array([4, 5]), np.array([3]), np.zeros(6, int)),
        result,
    )
    assert torch.allclose(result.out[..., 0, :], v.expand(2, 2, 1, 5)[..., 0, :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_matches_float64(dtype: torch.dtype) -> None:
    tokens = seq_params_from_rows(2, 150)
    inputs = q, k, v = (
        random(300, 4, 16, seed=1),
        random(300, 2, 16, seed=2),
        random(300, 2, 16, seed=3),
    )
    narrow = nq, nk, nv = tuple(x.detach().to(dtype).requires_grad_() for x in inputs)
    spans = plan_length_spans(tokens.lengths, 70)
    actual, reference = span_attention(nq, nk, nv, spans), span_attention(q, k, v, spans)
    assert actual.dtype == dtype
    dy = torch.ones_like(reference).cumsum(0).sub(150).div(100)
    grads = zip(
        torch.autograd.grad(actual, narrow, dy.to(dtype)),
        torch.autograd.grad(reference, inputs, dy),
    )
    for a, b in [(actual, reference), *grads]:
        assert a.dtype == dtype
        assert_equals("value", a, b.detach(), BF16)


def test_only_inputs_output_and_lse_are_saved_for_backward() -> None:
    tokens = seq_params_from_rows(1, 256)
    inputs = qkv(256, 256, d_v=6)
    kept: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        span_attention(*inputs, plan_length_spans(tokens.lengths))
    per_token = 4 * 6 + 2 * 2 * 6 + 4 * 6 + 4  # q, k and v, output, lse
    assert sum(kept.values()) == 256 * per_token * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numba_pass_matches_torch_operations(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tiles of which all is seen, some of it by each query, and nothing by some queries."""
    spans = plan_spans(np.arange(100, 228), np.arange(90, 220), np.repeat([0, 220], [150, 78]))
    assert {tile.visible is None for tile in spans.tiles} == {False}
    dense = plan_spans(np.arange(200, 300), np.arange(100), np.zeros(300, np.int64))
    for what in (spans, dense):
        q, k, v = (
            x.detach().to(dtype).requires_grad_()
            for x in qkv(len(what.visible), 130 if what is spans else 100)
        )
        dy = torch.ones(q.shape[0], 4, 5, dtype=dtype).cumsum(0).div(100)
        results = []
        for compiled in (True, False):
            with monkeypatch.context() as patch:
                if not compiled:
                    patch.setattr(cpu_threads, "should_use", lambda *tensors: False)
                out = span_attention(
                    q, k, v, what, Scores(softcap=3.0), torch.linspace(-1, 1, 4, dtype=dtype)
                )
                results.append([out.detach(), *torch.autograd.grad(out, [q, k, v], dy)])
        for actual, reference in zip(*results):
            assert_equals("value", actual, reference, FP32 if dtype == torch.float32 else BF16)
