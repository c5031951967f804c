"""Attention in which each query sees an interval of the keys, in pieces: what several sets of keys give can be merged.

With the output comes the log of the sum of exponentials, `lse`. Two results of the same queries for different keys
merge into that for all of them: both are weighted by their share of the sum. Backward needs nothing but the merged lse,
from which any piece's probabilities follow. A query that sees no key gives 0 and lse -inf.

Tensors are ordered by head, as `by_head` gives them: q [heads, shared, length, d], k and v [heads, keys, d], where
`heads` counts key/value heads of all rows, and `shared` the query heads that use each. Widths of k and v may differ.
Source: Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from megalith.kernels import cpu
from megalith.kernels.attention import TILE_SCORES, by_head, by_token, wide
from megalith.kernels.linear import Context
from megalith.kernels.tokens import Tokens
from megalith.plan.context import Spans, Tile, plan_spans


class Result(NamedTuple):
    """What queries have found so far."""

    out: Tensor
    """[heads, shared, length, d of v], fp32 or float64."""

    lse: Tensor
    """[heads, shared, length]: log of the sum of exp(score) over the keys seen; -inf: none yet."""


def nothing_found(q: Tensor, width: int) -> Result:
    """The result before any key has been seen; `width`: features of a value."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return Result(q.new_zeros(*q.shape[:3], width, dtype=dtype), q.new_full(q.shape[:3], -math.inf, dtype=dtype))


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans, result: Result) -> None:
    """Let queries see these keys, too: merges into `result`, in place."""
    wide_q, wide_k = wide(q), wide(k)
    for tile, heads in _work(q, spans):
        p, largest, total = _exponentials(_scores(wide_q, wide_k, tile, heads), tile, v.dtype)
        found = torch.bmm(p, v[heads, tile.first : tile.last]).to(result.out.dtype)
        place = heads, slice(None), slice(tile.start, tile.stop)
        shape = result.lse[place].shape
        _merge(result, place, found.view(*shape, -1), largest.view(shape), total.view(shape))


def _merge(result: Result, place: tuple[slice, ...], found: Tensor, largest: Tensor, total: Tensor) -> None:
    """Add the sums `found` = sum of exp(score - largest) · v, and `total` of the same exponentials, to the result."""
    out, old = result.out[place], result.lse[place]
    new = torch.logaddexp(old, total.log().add_(largest))
    finite = new.clamp(min=torch.finfo(new.dtype).min)  # -inf - -inf would be NaN: a row that still sees nothing is 0
    out.mul_((old - finite).exp_().unsqueeze(-1)).addcmul_(found, (largest - finite).exp_().unsqueeze(-1))
    old.copy_(new)


class Gradients(NamedTuple):
    """Sums of gradients, fp32 or float64, ordered by head."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, dout: Tensor, delta: Tensor, spans: Spans, into: Gradients
) -> None:
    """Add what these keys contribute to the gradients, given the lse over all keys and `delta` = sum of dout · out.

    dout as q with the width of v; lse and delta [heads, shared, length] fp32 or float64.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    wide_q, wide_k = wide(q), wide(k)
    for tile, heads in _work(q, spans):
        queries, keys = (heads, slice(None), slice(tile.start, tile.stop)), (heads, slice(tile.first, tile.last))
        rows, drows = q[queries].flatten(1, 2), dout[queries].flatten(1, 2)
        p, narrow = _probabilities(_scores(wide_q, wide_k, tile, heads), tile, lse[queries].flatten(1, 2), q.dtype)
        into.dv[keys] += torch.bmm(narrow.transpose(1, 2), drows)
        minus = -delta[queries].flatten(1, 2).unsqueeze(-1)
        if q.dtype == p.dtype:
            ds = torch.baddbmm(minus, drows, v[keys].transpose(1, 2)).mul_(p)
        else:
            ds = torch.bmm(drows, v[keys].transpose(1, 2)).to(p.dtype).add_(minus).mul_(p).to(q.dtype)
        into.dq[queries] += torch.bmm(ds, k[keys]).mul_(scale).view(into.dq[queries].shape)
        into.dk[keys] += torch.bmm(ds.transpose(1, 2), rows).mul_(scale)


def _work(q: Tensor, spans: Spans) -> Iterator[tuple[Tile, slice]]:
    """Every tile, for as many heads at a time as keep its scores in a cache; none where there are no numbers."""
    for tile in () if q.is_meta else spans.tiles:
        scores = q.shape[1] * (tile.stop - tile.start) * (tile.last - tile.first)
        together = max(1, TILE_SCORES // scores)
        for head in range(0, q.shape[0], together):
            yield tile, slice(head, head + together)


def _scores(q: Tensor, k: Tensor, tile: Tile, heads: slice) -> Tensor:
    """q k^T / sqrt(d) of a tile [heads, shared * rows, keys], of keys that are not seen, too."""
    rows, keys = q[heads, :, tile.start : tile.stop].flatten(1, 2), k[heads, tile.first : tile.last]
    scores = rows.new_empty(*rows.shape[:2], keys.shape[1])
    scale = 1 / math.sqrt(q.shape[-1])
    return torch.baddbmm(scores, rows, keys.transpose(1, 2), beta=0, alpha=scale, out=scores)


def _exponentials(scores: Tensor, tile: Tile, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - largest) of the keys seen in `dtype`, 0 elsewhere; the largest; the sum. Overwrites the scores."""
    largest, total = scores.new_empty(scores.shape[:2]), scores.new_empty(scores.shape[:2])
    if cpu.takes(scores):
        return _loop(scores, tile, dtype, largest, total, known=False), largest, total
    _hide(scores, tile)
    torch.amax(scores, -1, out=largest).clamp_(min=torch.finfo(scores.dtype).min)  # -inf where nothing is seen
    p = scores.sub_(largest.unsqueeze(-1)).exp_()
    return p.to(dtype), largest, torch.sum(p, -1, out=total)


def _probabilities(scores: Tensor, tile: Tile, lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """exp(score - lse) of the keys seen, 0 elsewhere: as it is, and in `dtype`. Overwrites the scores."""
    if cpu.takes(scores):
        return scores, _loop(scores, tile, dtype, lse.contiguous(), lse, known=True)
    _hide(scores, tile)
    # lse of a query without any key is -inf, and so is its score: 0, not NaN.
    p = scores.sub_(lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
    return p, p.to(dtype)


def _loop(scores: Tensor, tile: Tile, dtype: torch.dtype, largest: Tensor, total: Tensor, *, known: bool) -> Tensor:
    """exp(score - largest) in one compiled pass, in `dtype`; finds largest and total unless they are `known`."""
    p = scores if dtype == scores.dtype else torch.empty_like(scores, dtype=dtype)
    rows, keys, queries = largest.numel(), scores.shape[-1], tile.stop - tile.start
    seen = np.tile([[0, keys]], (queries, 1)) if tile.visible is None else np.ascontiguousarray(tile.visible)
    cpu.run(
        "visible_exp", dtype, rows, keys, queries, int(known), largest, total, scores, torch.from_numpy(seen), p,
        elements=scores.numel(),
    )  # fmt: skip
    return p


def _hide(scores: Tensor, tile: Tile) -> None:
    """Set the scores of keys that a query does not see to -inf."""
    if tile.visible is None:
        return
    place = np.arange(tile.last - tile.first)
    hidden = torch.from_numpy((place < tile.visible[:, :1]) | (place >= tile.visible[:, 1:]))
    scores.unflatten(1, (-1, tile.stop - tile.start)).masked_fill_(hidden.to(scores.device), -math.inf)


class SpanAttention(Function):
    """Attention of queries to all the keys they see, at once; keeps q, k, v, the output and the lse."""

    reference = staticmethod(lambda q, k, v, spans: reference_span_attention(q, k, v, spans))

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        """q [t, n, d], k [t_kv, g, d], v [t_kv, g, d_v] -> [t, n, d_v]."""
        heads, dtype = k.shape[1], q.dtype
        q, k, v = (rows_by_head(x, heads, spans.repeats) for x in (q, k, v))
        k, v = k.squeeze(1), v.squeeze(1)
        result = nothing_found(q, v.shape[-1])
        attend(q, k, v, spans, result)
        out = by_token(result.out.to(dtype), heads)
        ctx.save_for_backward(q, k, v, out, result.lse)
        ctx.spans, ctx.kv_heads = spans, heads
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
        """dout [t, n, d_v] -> dq, dk, dv."""
        q, k, v, out, lse = ctx.saved_tensors
        heads, repeats = ctx.kv_heads, ctx.spans.repeats
        sums = Gradients(*(torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)))
        delta = rows_by_head(output_share(dout, out, lse.dtype), heads, repeats).squeeze(-1)
        attend_backward(q, k, v, lse, rows_by_head(dout, heads, repeats), delta, ctx.spans, sums)
        dq, dk, dv = (x.to(q.dtype) for x in sums)
        return by_token(dq, heads), by_token(dk.unsqueeze(1), heads), by_token(dv.unsqueeze(1), heads), None


def rows_by_head(x: Tensor, kv_heads: int, repeats: int) -> Tensor:
    """[t, n, d] -> [repeats · g, n / g, t / repeats, d], contiguous."""
    return by_head(x, kv_heads, x.shape[0] // repeats)


def output_share(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of dout · out over the features, [t, n, 1]: what softmax's backward subtracts from each probability's."""
    return (dout.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)


def span_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """Softmax attention of each query to its interval of the keys: q [t, n, d], k, v [t_kv, g, d] -> [t, n, d]."""
    if q.is_meta:
        return reference_span_attention(q, k, v, spans)
    out: Tensor = SpanAttention.apply(q, k, v, spans)  # type: ignore[no-untyped-call]  # torch's own
    return out


def window_attention(q: Tensor, k: Tensor, v: Tensor, tokens: Tokens, window: int) -> Tensor:
    """Causal attention in which a token sees itself and the window - 1 tokens before it in its document.

    Queries and keys are the same tokens, all of every document. Source: Beltagy et al. 2020, arXiv:2004.05150.
    """
    return span_attention(q, k, v, spans_of_documents(tokens, window=window))


def spans_of_documents(tokens: Tokens, *, window: int | None = None) -> Spans:
    """What tokens see when all of them are here."""
    lengths = np.array([length for length, _ in tokens.lengths])
    numbers = np.arange(lengths.sum())
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return plan_spans(numbers, numbers, starts, repeats=1 if tokens.uniform is None else len(lengths), window=window)


def reference_span_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """The same in one call of torch's, with the intervals as a mask."""
    q, k, v = (x.unflatten(0, (spans.repeats, -1)).transpose(1, 2) for x in (q, k, v))
    mask = seen = None
    if not q.is_meta:  # without numbers there is nothing to mask
        place = torch.arange(k.shape[2], device=q.device)
        visible = torch.from_numpy(spans.visible).to(q.device)
        mask = (place >= visible[:, :1]) & (place < visible[:, 1:])
        seen = mask.any(1)
        mask = mask | ~seen[:, None]  # who sees nothing sees all, and is then set to zero
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    if seen is not None:
        out = out * seen[:, None]
    return out.transpose(1, 2).flatten(0, 1)
