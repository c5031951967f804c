"""Attention in which each query sees an interval of the keys, computed in parts that can be merged
(split-KV).

Besides the output, each part gives `lse`, the log of the sum of exponentials. Two results of the
same queries for different keys merge by weighting each with its share of the sum. Backward needs
only the merged lse, from which the probabilities of any part follow. A query that sees no key gives
0 and lse -inf. A sink, a score without a key, is the initial state of a query: output 0 and lse =
sink. Dropped weights count in the sum, because dropout follows softmax. Relative position biases
and attention masks are looked up tile by tile, so that only a tile's scores are in memory.

Tensors are ordered by head, as by `by_head`: q [heads, shared, length, d], k and v [heads, keys,
d], where `heads` counts the key/value heads of all rows, and `shared` the query heads that share
each. Widths of k and v may differ.

Time of forward + backward relative to cpu_tiled causal attention, 2048 tokens in fp32 (bf16), 8
heads of 64 features, one core with AVX-512, torch 2.13: sinks 1.03 (1.13), a soft cap 1.44 (1.70),
a window of 128 tokens 0.22 (0.30); 512 tokens: 1.28 (1.49), 1.74 (2.22), 0.80 (1.04). Source:
Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels import cpu_threads
from megalith.kernels.attention.cpu_tiled import TILE_SCORES, by_head, by_token, wide
from megalith.kernels.attention.scores import (
    PLAIN,
    Distances,
    MaxScores,
    PairBiases,
    PairMask,
    Scores,
    masked_attention,
)
from megalith.kernels.dropout import DroppedWeights
from megalith.kernels.linear import Context, bmm
from megalith.plan.context import KeySpans, KeyTile


class PartialAttention(NamedTuple):
    """Attention output of queries over the keys processed so far."""

    out: Tensor
    """[heads, shared, length, d of v], fp32 or float64."""

    lse: Tensor
    """[heads, shared, length]: log of the sum of exp(score) over the visible keys so far; -inf:
    none yet."""


def init_attention_result(
    q: Tensor, width: int, sinks: Tensor | None = None, *, off_by_one: bool = False
) -> PartialAttention:
    """Return the result before any key; `width`: features of a value; sinks [n]; `off_by_one`: a
    sink of 0."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full(q.shape[:3], 0.0 if off_by_one else -math.inf, dtype=dtype)
    if sinks is not None:
        lse.copy_(_by_head(sinks, q))
    return PartialAttention(q.new_zeros(*q.shape[:3], width, dtype=dtype), lse)


def _by_head(sinks: Tensor, q: Tensor) -> Tensor:
    """Expand sinks [n] -> [heads, shared, 1], equal in every row."""
    return (
        sinks.view(-1, q.shape[1]).repeat(q.shape[0] * q.shape[1] // sinks.numel(), 1).unsqueeze(-1)
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: KeySpans,
    result: PartialAttention,
    scores: Scores = PLAIN,
    dropped: DroppedWeights | None = None,
    biases: PairBiases | None = None,
    pair_mask: PairMask | None = None,
    row_max: Tensor | None = None,
) -> None:
    """Attend to these keys and merge into `result` in place. Hidden keys are given by the spans and
    the attention mask `pair_mask`; `dropped` is attention dropout, `biases` the relative position
    bias. `row_max` [heads, shared, length]: largest score of each query so far, updated in
    place."""
    wide_q, wide_k = wide(q), wide(k)
    if row_max is not None and (scores.softcap is not None or biases is not None):
        # the largest scores below are those after the soft cap and the bias
        add_max_scores(row_max, q, k, spans, scores, pair_mask)
        row_max = None
    for tile, heads in _work(q, spans):
        s = _scores(wide_q, wide_k, tile, heads, scores)
        s = (
            s
            if biases is None
            else s.add_(biases.of_tile(tile, _kv_heads(heads, q, spans), q.shape[1]))
        )
        mask = None if pair_mask is None else pair_mask.of_tile(spans, tile, heads, q)
        p, largest, total = _exponentials(s, tile, v.dtype, mask)
        p = p if dropped is None else p * dropped.factors(spans, tile, heads, q).to(p.dtype)
        weighted_values = bmm(p, v[heads, tile.first : tile.last]).to(result.out.dtype)
        index = heads, slice(None), slice(tile.start, tile.stop)
        shape = result.lse[index].shape
        if row_max is not None:
            _update_max(row_max, index, largest.masked_fill(total == 0, -math.inf))
        _merge(
            result, index, weighted_values.view(*shape, -1), largest.view(shape), total.view(shape)
        )


def add_max_scores(
    row_max: Tensor,
    q: Tensor,
    k: Tensor,
    spans: KeySpans,
    scores: Scores = PLAIN,
    pair_mask: PairMask | None = None,
) -> None:
    """Update the largest score of each query, row_max [heads, shared, length], in place: scaled,
    without soft cap and bias. Only the scores of a tile are in memory."""
    plain = replace(scores, softcap=None)
    wide_q, wide_k = wide(q), wide(k)
    for tile, heads in _work(q, spans):
        s = _scores(wide_q, wide_k, tile, heads, plain)
        _hide(s, tile, None if pair_mask is None else pair_mask.of_tile(spans, tile, heads, q))
        _update_max(row_max, (heads, slice(None), slice(tile.start, tile.stop)), s.amax(-1))


def _update_max(row_max: Tensor, index: tuple[slice, ...], largest: Tensor) -> None:
    part = row_max[index]
    torch.maximum(part, largest.view(part.shape), out=part)


def init_row_max(q: Tensor) -> Tensor:
    """Return the largest scores of queries [heads, shared, length, d] before any key: -inf, [heads,
    shared, length]."""
    return q.new_full(q.shape[:3], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))


@torch.no_grad()
def max_span_scores(
    q: Tensor,
    k: Tensor,
    spans: KeySpans,
    scores: Scores = PLAIN,
    pair_mask: PairMask | None = None,
) -> Tensor:
    """Return the largest score of each query and head over its visible keys, for backends that do
    not return it: q [t, n, d], k [t_kv, g, d] -> [t, n]; -inf without visible keys."""
    heads = k.shape[1]
    q, k = rows_by_head(q, heads, spans.repeats), rows_by_head(k, heads, spans.repeats).squeeze(1)
    row_max = init_row_max(q)
    add_max_scores(row_max, q, k, spans, scores, pair_mask)
    return max_by_token(row_max, heads)


def max_by_token(row_max: Tensor, kv_heads: int) -> Tensor:
    """[heads, shared, length] -> [t, n]."""
    return by_token(row_max.unsqueeze(-1), kv_heads).squeeze(-1)


def _merge(
    result: PartialAttention,
    place: tuple[slice, ...],
    weighted_values: Tensor,
    largest: Tensor,
    total: Tensor,
) -> None:
    """Add to the result `weighted_values`, the sum of exp(score - largest) · v, and `total`, the
    sum of the same exponentials."""
    out, old = result.out[place], result.lse[place]
    new = torch.logaddexp(old, total.log().add_(largest))
    # -inf - -inf would be NaN: a row without visible keys gives 0
    finite = new.clamp(min=torch.finfo(new.dtype).min)
    out.mul_((old - finite).exp_().unsqueeze(-1)).addcmul_(
        weighted_values, (largest - finite).exp_().unsqueeze(-1)
    )
    old.copy_(new)


class AttentionGrads(NamedTuple):
    """Accumulated gradients, fp32 or float64, ordered by head."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dvalues: Tensor | None = None
    """Gradient of the relative position bias, [n, distances], if there is one."""


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    dout: Tensor,
    delta: Tensor,
    spans: KeySpans,
    into: AttentionGrads,
    scores: Scores = PLAIN,
    dropped: DroppedWeights | None = None,
    biases: PairBiases | None = None,
    pair_mask: PairMask | None = None,
) -> None:
    """Add the contribution of these keys to the gradients, given the lse over all keys and `delta`
    = sum of dout · out.

    dout as q with the width of v; lse and delta [heads, shared, length] fp32 or float64.
    """
    scale = scores.factor(q.shape[-1])
    wide_q, wide_k = wide(q), wide(k)
    for tile, heads in _work(q, spans):
        queries, keys = (
            (heads, slice(None), slice(tile.start, tile.stop)),
            (heads, slice(tile.first, tile.last)),
        )
        rows, drows = q[queries].flatten(1, 2), dout[queries].flatten(1, 2)
        s = _scores(wide_q, wide_k, tile, heads, scores)
        slope = None if scores.softcap is None else _slope(s, scores.softcap)
        s = (
            s
            if biases is None
            else s.add_(biases.of_tile(tile, _kv_heads(heads, q, spans), q.shape[1]))
        )
        mask = None if pair_mask is None else pair_mask.of_tile(spans, tile, heads, q)
        p, narrow = _probabilities(s, tile, lse[queries].flatten(1, 2), q.dtype, mask)
        factors = None if dropped is None else dropped.factors(spans, tile, heads, q)
        kept = narrow if factors is None else narrow * factors.to(narrow.dtype)
        into.dv[keys] += bmm(kept.transpose(1, 2), drows)
        minus = -delta[queries].flatten(1, 2).unsqueeze(-1)
        if factors is not None:
            dp = bmm(drows, v[keys].transpose(1, 2)).to(p.dtype)
            ds = dp.mul_(factors).add_(minus).mul_(p)
        elif q.dtype == p.dtype:
            ds = torch.baddbmm(minus, drows, v[keys].transpose(1, 2)).mul_(p)
        else:
            ds = bmm(drows, v[keys].transpose(1, 2)).to(p.dtype).add_(minus).mul_(p)
        if biases is not None and into.dvalues is not None:
            biases.add_gradient(into.dvalues, ds, tile, _kv_heads(heads, q, spans), q.shape[1])
        ds = (ds if slope is None else ds.mul_(slope)).to(q.dtype)
        into.dq[queries] += bmm(ds, k[keys]).mul_(scale).view(into.dq[queries].shape)
        into.dk[keys] += bmm(ds.transpose(1, 2), rows).mul_(scale)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the contribution of the local queries to the gradient of the sinks [n]: lse and delta
    [heads, shared, length] of all keys.

    A sink's share of softmax is exp(sink - lse), and its value is 0.
    """
    share = (_by_head(sinks, lse) - lse).exp_()
    return share.mul_(delta).sum(-1).view(-1, sinks.numel()).sum(0).neg_().to(sinks.dtype)


def _work(q: Tensor, spans: KeySpans) -> Iterator[tuple[KeyTile, slice]]:
    """Yield every tile with as many heads at a time as keep its scores in the cache; nothing for
    meta tensors."""
    for tile in () if q.is_meta else spans.tiles:
        scores = q.shape[1] * (tile.stop - tile.start) * (tile.last - tile.first)
        heads_per_tile = max(1, TILE_SCORES // scores)
        for head in range(0, q.shape[0], heads_per_tile):
            yield tile, slice(head, head + heads_per_tile)


def _kv_heads(heads: slice, q: Tensor, spans: KeySpans) -> Tensor:
    """Return the key/value heads of a tile; their indices restart in every row."""
    return torch.arange(*heads.indices(q.shape[0]), device=q.device) % (q.shape[0] // spans.repeats)


def _scores(q: Tensor, k: Tensor, tile: KeyTile, heads: slice, scores: Scores) -> Tensor:
    """Return the scores of a tile [heads, shared * rows, keys], scaled and capped, including hidden
    keys."""
    rows, keys = q[heads, :, tile.start : tile.stop].flatten(1, 2), k[heads, tile.first : tile.last]
    s = rows.new_empty(*rows.shape[:2], keys.shape[1])
    factor, cap = scores.factor(q.shape[-1]), scores.softcap
    if cap is None:
        return torch.baddbmm(s, rows, keys.transpose(1, 2), beta=0, alpha=factor, out=s)
    return (
        torch.baddbmm(s, rows, keys.transpose(1, 2), beta=0, alpha=factor / cap, out=s)
        .tanh_()
        .mul_(cap)
    )


def _slope(s: Tensor, cap: float) -> Tensor:
    """Return the derivative of cap · tanh(x / cap) from capped scores s."""
    return s.square().mul_(-1 / cap**2).add_(1)


def _exponentials(
    scores: Tensor, tile: KeyTile, dtype: torch.dtype, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(score - largest) of the visible keys in `dtype`, 0 elsewhere; the largest; the
    sum. Overwrites the scores."""
    largest, total = scores.new_empty(scores.shape[:2]), scores.new_empty(scores.shape[:2])
    if mask is None and cpu_threads.should_use(scores) and dtype in cpu_threads.DTYPES:
        # the numba loop supports intervals, not masks
        return _loop(scores, tile, dtype, largest, total, known=False), largest, total
    _hide(scores, tile, mask)
    # -inf where nothing is visible
    torch.amax(scores, -1, out=largest).clamp_(min=torch.finfo(scores.dtype).min)
    p = scores.sub_(largest.unsqueeze(-1)).exp_()
    return p.to(dtype), largest, torch.sum(p, -1, out=total)


def _probabilities(
    scores: Tensor, tile: KeyTile, lse: Tensor, dtype: torch.dtype, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return exp(score - lse) of the visible keys, 0 elsewhere: in the scores' dtype and in
    `dtype`. Overwrites the scores."""
    if mask is None and cpu_threads.should_use(scores) and dtype in cpu_threads.DTYPES:
        return scores, _loop(scores, tile, dtype, lse.contiguous(), lse, known=True)
    _hide(scores, tile, mask)
    # A query without keys has lse -inf and scores -inf: the result is 0, not NaN.
    p = scores.sub_(lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
    return p, p.to(dtype)


def _loop(
    scores: Tensor,
    tile: KeyTile,
    dtype: torch.dtype,
    largest: Tensor,
    total: Tensor,
    *,
    known: bool,
) -> Tensor:
    """Compute exp(score - largest) in one numba pass, in `dtype`; also computes largest and total
    unless they are `known`."""
    p = scores if dtype == scores.dtype else torch.empty_like(scores, dtype=dtype)
    rows, keys, queries = largest.numel(), scores.shape[-1], tile.stop - tile.start
    key_ranges = (
        np.tile([[0, keys]], (queries, 1))
        if tile.visible is None
        else np.ascontiguousarray(tile.visible)
    )
    cpu_threads.run(
        "visible_exp",
        dtype,
        rows,
        keys,
        queries,
        int(known),
        largest,
        total,
        scores,
        torch.from_numpy(key_ranges),
        p,
        elements=scores.numel(),
    )
    return p


def _hide(scores: Tensor, tile: KeyTile, mask: Tensor | None) -> None:
    """Set the scores of hidden keys to -inf: outside the query's interval, and where `mask`, bool
    [heads, 1, rows or 1, keys], is False."""
    if mask is not None:
        scores.unflatten(1, (-1, tile.stop - tile.start)).masked_fill_(~mask, -math.inf)
    if tile.visible is None:
        return
    place = np.arange(tile.last - tile.first)
    hidden = torch.from_numpy((place < tile.visible[:, :1]) | (place >= tile.visible[:, 1:]))
    scores.unflatten(1, (-1, tile.stop - tile.start)).masked_fill_(
        hidden.to(scores.device), -math.inf
    )


class SpanAttention(Function):
    """Autograd function of `span_attention`; saves q, k, v, the output and the lse."""

    reference = staticmethod(
        lambda q, k, v, spans, scores, sinks, dropped, values, distances, pair_mask, *_: (
            reference_span_attention(
                q, k, v, spans, scores, sinks, biases=_paired(values, distances)
            )
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spans: KeySpans,
        scores: Scores,
        sinks: Tensor | None,
        dropped: DroppedWeights | None,
        values: Tensor | None,
        distances: Distances | None,
        pair_mask: PairMask | None,
        max_scores: MaxScores | None,
    ) -> Tensor:
        """q [t, n, d], k [t_kv, g, d], v [t_kv, g, d_v], sinks [n], values [n, distances] -> [t, n,
        d_v]."""
        heads, dtype = k.shape[1], q.dtype
        q, k, v = (rows_by_head(x, heads, spans.repeats) for x in (q, k, v))
        k, v = k.squeeze(1), v.squeeze(1)
        result = init_attention_result(q, v.shape[-1], sinks, off_by_one=scores.off_by_one)
        row_max = None if max_scores is None else init_row_max(q)
        biases = _paired(values, distances)
        attend(q, k, v, spans, result, scores, dropped, biases, pair_mask, row_max)
        if max_scores is not None and row_max is not None:
            max_scores.update(max_by_token(row_max, heads))
        out = by_token(result.out.to(dtype), heads)
        ctx.save_for_backward(q, k, v, out, result.lse, sinks, values)
        ctx.spans, ctx.kv_heads, ctx.scores, ctx.dropped, ctx.distances = (
            spans,
            heads,
            scores,
            dropped,
            distances,
        )
        ctx.pair_mask = pair_mask
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
        """dout [t, n, d_v] -> dq, dk, dv and the gradients of sinks and relative position bias."""
        q, k, v, out, lse, sinks, values = ctx.saved_tensors
        heads, repeats = ctx.kv_heads, ctx.spans.repeats
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        sums = AttentionGrads(dq, dk, dv, zeros_for(values, lse.dtype))
        delta = rows_by_head(output_share(dout, out, lse.dtype), heads, repeats).squeeze(-1)
        dout = rows_by_head(dout, heads, repeats)
        biases = _paired(values, ctx.distances)
        attend_backward(
            q,
            k,
            v,
            lse,
            dout,
            delta,
            ctx.spans,
            sums,
            ctx.scores,
            ctx.dropped,
            biases,
            ctx.pair_mask,
        )
        dq, dk, dv = (x.to(q.dtype) for x in (dq, dk, dv))
        dsinks = None if sinks is None else sink_gradient(sinks, lse, delta)
        return (
            by_token(dq, heads),
            by_token(dk.unsqueeze(1), heads),
            by_token(dv.unsqueeze(1), heads),
            None,
            None,
            dsinks,
            None,
            None if sums.dvalues is None else sums.dvalues.to(values.dtype),
            None,
            None,
            None,
        )


def zeros_for(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return zeros for the gradient of the relative position bias, or None without one."""
    return None if values is None else torch.zeros_like(values, dtype=dtype)


def _paired(values: Tensor | None, distances: Distances | None) -> PairBiases | None:
    return None if values is None or distances is None else PairBiases(values, distances)


def rows_by_head(x: Tensor, kv_heads: int, repeats: int) -> Tensor:
    """[t, n, d] -> [repeats · g, n / g, t / repeats, d], contiguous."""
    return by_head(x, kv_heads, x.shape[0] // repeats)


def output_share(dout: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of dout · out over the features, [t, n, 1], which softmax's backward subtracts
    from each probability's gradient."""
    return (dout.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)


def span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: KeySpans,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    dropped: DroppedWeights | None = None,
    biases: PairBiases | None = None,
    pair_mask: PairMask | None = None,
    *,
    max_scores: MaxScores | None = None,
) -> Tensor:
    """Softmax attention of each query to its interval of the keys: q [t, n, d], k, v [t_kv, g, d]
    -> [t, n, d_v].

    Hidden keys are given by the spans and the attention mask `pair_mask`; `dropped` is attention
    dropout, `biases` the relative position bias; sinks [n]. `max_scores` records the largest
    scores.
    """
    if q.is_meta:
        return reference_span_attention(q, k, v, spans, scores, sinks, biases=biases)
    values, distances = (None, None) if biases is None else (biases.values, biases.distances)
    out: Tensor = SpanAttention.apply(
        q, k, v, spans, scores, sinks, dropped, values, distances, pair_mask, max_scores
    )  # type: ignore[no-untyped-call]  # torch's own
    return out


def reference_span_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: KeySpans,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    dropped: DroppedWeights | None = None,
    biases: PairBiases | None = None,
    pair_mask: PairMask | None = None,
    *,
    max_scores: MaxScores | None = None,
) -> Tensor:
    """Reference implementation of `span_attention` in plain PyTorch operations, row by row with the
    intervals as a mask."""
    if max_scores is not None:
        max_scores.update(max_span_scores(q, k, spans, scores, pair_mask))
    visible = None
    if not q.is_meta:  # meta tensors have no values to mask
        place = torch.arange(k.shape[0] // spans.repeats, device=q.device)
        bounds = torch.from_numpy(spans.visible).to(q.device)
        visible = (place >= bounds[:, :1]) & (place < bounds[:, 1:])
    q_rows, k_rows, v_rows = (x.unflatten(0, (spans.repeats, -1)) for x in (q, k, v))
    outs, bias = [], None if biases is None else biases.of_row(spans.repeats)
    for row, tensors in enumerate(zip(q_rows, k_rows, v_rows, strict=True)):
        factors = (
            None if dropped is None else dropped.of_row(row, spans.repeats, q.shape[1], q.dtype)
        )
        mask = (
            visible
            if pair_mask is None or visible is None
            else visible & pair_mask.of_row(row, spans.repeats)
        )
        outs.append(masked_attention(*tensors, mask, scores, sinks, bias=bias, factors=factors))
    return torch.cat(outs)
