"""Context parallel attention: the tokens of each row (or document) are split over several ranks.

Each rank has an early and a late chunk of every row, so that causal attention costs the same on all
ranks (load-balanced context parallel, zig-zag); all other operations use the rank's own tokens
only. Four kinds of communication:

- ring attention: keys and values go around a ring of ranks, and the partial results of the steps
  are merged;
- gather: every rank all-gathers all keys and values;
- a2a (Ulysses): an all-to-all exchanges tokens for heads, and each rank computes all tokens of some
  heads;
- a2a+ring: Ulysses among neighboring ranks, and a ring across the groups of neighbors.

Sources: ring: Liu et al. 2023, arXiv:2310.01889; a2a: Jacobs et al. 2023, arXiv:2309.14509; both:
Fang and Zhao 2024, arXiv:2405.07719; gather: Llama 3, arXiv:2407.21783, section 3.3.2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.parallel import ContextConfig, ParallelConfig
from megalith.kernels.attention.cpu_tiled import by_token
from megalith.kernels.attention.dispatch import attention, build_dropped_weights
from megalith.kernels.attention.scores import (
    PLAIN,
    Distances,
    MaxScores,
    PairBiases,
    PairMask,
    Scores,
    biases_by_distance,
)
from megalith.kernels.attention.split_kv import (
    AttentionGrads,
    attend,
    attend_backward,
    init_attention_result,
    init_row_max,
    max_by_token,
    output_share,
    reference_span_attention,
    rows_by_head,
    sink_gradient,
    span_attention,
    zeros_for,
)
from megalith.kernels.backend import AUTO, Backends
from megalith.kernels.dropout import DropoutKey, DroppedWeights
from megalith.kernels.layer_inputs import Attend
from megalith.kernels.packed import ContextShard, PackedSeqParams, TokenPermutation
from megalith.parallel.collectives import Moves, all_gather, all_to_all
from megalith.parallel.group import Group
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor_overlap import PendingCollective, start_ring_exchange
from megalith.plan.context import KeySpans, Slicing, layer_context_kind


def build_attend(
    context: ContextConfig,
    layer: int,
    mesh: Mesh,
    *,
    overlap: bool = True,
    backends: Backends = AUTO,
) -> Attend:
    """Return the context-parallel attention of a layer, numbered over all stages.

    `overlap`: overlap the messages around a ring with computation. Context parallelism has one
    backend, split_kv; torch and reference select the reference over the keys of all ranks.
    """
    if mesh.cp.size == 1:
        return backends.bind("attention", attention)
    if backends.select("attention").name in ("torch", "reference"):
        return AllGatherAttend(mesh.cp, reference_span_attention)
    match layer_context_kind(context, layer):
        case "ring":
            return RingAttend(mesh.cp, overlap=overlap)
        case "gather":
            return AllGatherAttend(mesh.cp)
        case "a2a":
            return UlyssesAttend(mesh.cp)
        case "a2a+ring":
            return UlyssesRingAttend(mesh.over("cp_a2a"), mesh.over("cp_ring"), overlap=overlap)


def local_slicing(parallel: ParallelConfig, mesh: Mesh) -> Slicing:
    """Return which tokens of each row this rank gets."""
    return Slicing(
        ranks=mesh.cp.size,
        rank=mesh.cp.rank,
        by=parallel.context.slicing,
        multiple=mesh.tp.size if parallel.sp else 1,
        near=mesh.over("cp_a2a").size if parallel.context.kind == "a2a+ring" else 1,
    )


@dataclass(frozen=True, slots=True)
class RingAttend:
    """Ring attention: keys and values go around `group`; see `Attend`."""

    group: Group
    overlap: bool = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
        attention_bias: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        max_scores: MaxScores | None = None,
    ) -> Tensor:
        """Run one step per rank, overlapped with the message for the next step."""
        context = _context(seq_params)
        pairs = RingPairs(
            context.key_spans_by_group(1, **attention_range(scores, context)),
            dropped_weights_by_group(context, dropout_key, scores, 1),
            pair_biases_by_group(context, attention_bias, scores, 1),
            pair_masks_by_group(context, 1),
        )
        return ring_attention(
            q,
            k,
            v,
            self.group,
            pairs,
            scores,
            sinks,
            overlap=self.overlap,
            max_scores=count_queries(max_scores, seq_params.valid),
        )


@dataclass(frozen=True, slots=True)
class AllGatherAttend:
    """Attention to all-gathered keys and values of `group`; see `Attend`."""

    group: Group
    find: Callable[..., Tensor] = span_attention

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
        attention_bias: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        max_scores: MaxScores | None = None,
    ) -> Tensor:
        """Run one all-gather; backward reduce-scatters the gradients of keys and values."""
        context = _context(seq_params)
        everything = reorder(all_gather(torch.cat([k, v], -1), self.group), context.all_ranks)
        k, v = everything.split([k.shape[-1], v.shape[-1]], -1)
        spans = context.key_spans_to_all(**attention_range(scores, context))
        dropped = build_dropped_weights(dropout_key, scores)
        biases, pair_masks = (
            pair_biases_to_all(context, attention_bias, scores),
            pair_mask_to_all(context),
        )
        return self.find(
            q,
            k,
            v,
            spans,
            scores,
            sinks,
            dropped,
            biases,
            pair_masks,
            max_scores=count_queries(max_scores, seq_params.valid),
        )


@dataclass(frozen=True, slots=True)
class UlyssesAttend:
    """Ulysses: each rank of `group` computes all tokens of some heads; see `Attend`."""

    group: Group

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
        attention_bias: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        max_scores: MaxScores | None = None,
    ) -> Tensor:
        """Run one all-to-all before attention and one after."""
        context = _context(seq_params)
        q, k, v = exchange_tokens_for_heads(q, k, v, self.group, context.all_ranks)
        scores, sinks = (
            select_local_head_scores(scores, self.group, q.shape[1]),
            select_local_heads(sinks, self.group),
        )
        attention_bias = select_local_heads(attention_bias, self.group)
        if dropout_key is not None:
            dropout_key = dropout_key._replace(numbers=dropout_key.key_numbers)
        all_tokens = context.whole
        if max_scores is not None:
            max_scores = max_scores.select_heads(self.group.rank, self.group.size)
            all_tokens = replace(all_tokens, valid=valid_tokens(context))
        if scores.causal or context.slices.source is None:
            out = attention(
                q,
                k,
                v,
                all_tokens,
                scores,
                sinks,
                attention_bias=attention_bias,
                dropout_key=dropout_key,
                max_scores=max_scores,
            )
        else:  # documents end with padding, which must be masked
            spans, pair_masks = (
                context.key_spans_among_all(**attention_range(scores, context)),
                pair_mask_among_all(context),
            )
            biases = pair_biases_among_all(context, attention_bias, scores)
            dropped = build_dropped_weights(dropout_key, scores)
            out = span_attention(
                q,
                k,
                v,
                spans,
                scores,
                sinks,
                dropped,
                biases,
                pair_masks,
                max_scores=count_queries(max_scores, all_tokens.valid),
            )
        return exchange_heads_for_tokens(out, self.group, context.all_ranks)


@dataclass(frozen=True, slots=True)
class UlyssesRingAttend:
    """Ulysses inside `near`, where links are fast, and a ring over `ring`; see `Attend`."""

    near: Group
    ring: Group
    overlap: bool = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
        attention_bias: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        max_scores: MaxScores | None = None,
    ) -> Tensor:
        """Run Ulysses, then ring attention: the neighbors' chunks together are the two chunks of a
        coarser ring."""
        context = _context(seq_params)
        q, k, v = exchange_tokens_for_heads(q, k, v, self.near, context.neighbors)
        spans = context.key_spans_by_group(self.near.size, **attention_range(scores, context))
        scores, sinks = (
            select_local_head_scores(scores, self.near, q.shape[1]),
            select_local_heads(sinks, self.near),
        )
        local_bias = select_local_heads(attention_bias, self.near)
        pairs = RingPairs(
            spans,
            dropped_weights_by_group(context, dropout_key, scores, self.near.size),
            pair_biases_by_group(context, local_bias, scores, self.near.size),
            pair_masks_by_group(context, self.near.size),
        )
        if max_scores is not None:
            local_tokens = context.token_numbers_by_group(self.near.size)[
                context.rank // self.near.size
            ]
            max_scores = max_scores.select_heads(self.near.rank, self.near.size)
            max_scores = count_queries(max_scores, valid_tokens(context)[local_tokens])
        out = ring_attention(
            q,
            k,
            v,
            self.ring,
            pairs,
            scores,
            sinks,
            overlap=self.overlap,
            max_scores=max_scores,
        )
        return exchange_heads_for_tokens(out, self.near, context.neighbors)


def _context(seq_params: PackedSeqParams) -> ContextShard:
    assert seq_params.context is not None, "tokens were not sliced over cp: the loader does that"
    return seq_params.context


def count_queries(max_scores: MaxScores | None, valid: Tensor) -> MaxScores | None:
    """Return the record of the largest scores for queries of which `valid`, bool [t], count."""
    return None if max_scores is None else replace(max_scores, valid=valid)


def valid_tokens(context: ContextShard) -> Tensor:
    """Return which of all tokens, in natural order, are no padding: bool [t]."""
    valid, source = context.whole.valid, context.slices.source
    if source is not None and not valid.is_meta:
        valid = valid & torch.from_numpy(source >= 0).to(valid.device)
    keys = None if context.whole.visible is None else context.whole.visible.keys
    return valid if keys is None else valid & keys


class AttentionRange(TypedDict):
    """Range of earlier and later tokens of its document that a token attends to, as arguments of
    `Context`'s methods that return spans."""

    window: int | None
    right: int | None
    causal: bool
    chunked: bool


def attention_range(scores: Scores, context: ContextShard) -> AttentionRange:
    """Return the attention range of the scores, or of the attention masks that replace it."""
    visible = context.whole.visible
    scores = scores if visible is None else visible.scores(scores)
    return AttentionRange(
        window=scores.window, right=scores.right, causal=scores.causal, chunked=scores.chunked
    )


# --- attention masks: every rank has those of full documents, and uses the rows of its queries


def pair_masks_by_group(context: ContextShard, near: int) -> list[PairMask] | None:
    """Return which pairs of tokens attention masks let see, for queries of this rank's group of
    `near` neighbors and keys of each such group; None: all."""
    visible = context.whole.visible
    if visible is None:
        return None
    parts = context.token_numbers_by_group(near)
    return [PairMask(visible, parts[context.rank // near], keys) for keys in parts]


def pair_mask_to_all(context: ContextShard) -> PairMask | None:
    """Return which of all tokens, in natural order, attention masks let this rank's tokens see;
    None: all."""
    visible = context.whole.visible
    if visible is None:
        return None
    return PairMask(visible, context.token_numbers_by_group(1)[context.rank], _all_numbers(context))


def pair_mask_among_all(context: ContextShard) -> PairMask | None:
    """Return which pairs of all tokens, in natural order, attention masks let see; None: all."""
    visible = context.whole.visible
    return (
        None if visible is None else PairMask(visible, _all_numbers(context), _all_numbers(context))
    )


# --- attention dropout: the hash of a pair needs the numbers of both tokens, on any rank


def dropped_weights_by_group(
    context: ContextShard, dropout_key: DropoutKey | None, scores: Scores, near: int
) -> list[DroppedWeights] | None:
    """Return which attention weights dropout zeroes, for queries of this rank's group of `near`
    neighbors and keys of each such group; None: none."""
    if scores.dropout is None or dropout_key is None or dropout_key.numbers.is_meta:
        return None
    numbers, parts = dropout_key.key_numbers, context.slices.joined(near)
    each = [numbers[torch.from_numpy(part).to(numbers.device)] for part in parts]
    return [DroppedWeights(scores.dropout, each[context.rank // near], keys) for keys in each]


def select_local_head_scores(scores: Scores, group: Group, heads: int) -> Scores:
    """Return the scores for this rank's `heads` heads after an exchange over `group`."""
    if scores.dropout is None:
        return scores
    first = scores.dropout.first_head + group.rank * heads
    return replace(scores, dropout=scores.dropout._replace(first_head=first))


# --- position biases: distances in a document are differences of its tokens' numbers


def pair_biases_by_group(
    context: ContextShard, table: Tensor | None, scores: Scores, near: int
) -> list[PairBiases] | None:
    """Return the position biases of scores, for queries of this rank's group of `near` neighbors
    and keys of each such group; None: none."""
    values = _values(table, context, scores)
    if values is None:
        return None
    parts = context.token_numbers_by_group(near)
    queries, reach = parts[context.rank // near], values.shape[1] // 2
    return [PairBiases(values, Distances(queries, keys, reach)) for keys in parts]


def pair_biases_to_all(
    context: ContextShard, table: Tensor | None, scores: Scores
) -> PairBiases | None:
    """Return the position biases between this rank's tokens and all tokens, in natural order; None:
    none."""
    return _biases_to_all(table, context.token_numbers_by_group(1)[context.rank], context, scores)


def pair_biases_among_all(
    context: ContextShard, table: Tensor | None, scores: Scores
) -> PairBiases | None:
    """Return the position biases among all tokens, in natural order; None: none."""
    return _biases_to_all(table, _all_numbers(context), context, scores)


def _biases_to_all(
    table: Tensor | None, queries: Tensor, context: ContextShard, scores: Scores
) -> PairBiases | None:
    values = _values(table, context, scores)
    if values is None:
        return None
    return PairBiases(values, Distances(queries, _all_numbers(context), values.shape[1] // 2))


def _all_numbers(context: ContextShard) -> Tensor:
    return context.token_numbers_by_group(context.slices.ranks)[0]


def _values(table: Tensor | None, context: ContextShard, scores: Scores) -> Tensor | None:
    """Return the biases of all possible distances: [n, distances], differentiable."""
    if scores.relative is None:
        return None
    assert table is not None, "relative position biases need an attention_bias"
    reach = min(scores.relative, context.whole.max_seqlen_kv - 1)
    return biases_by_distance(table, reach, max_distance=scores.relative, causal=scores.causal)


# --- Ulysses


class Reorder(Function):
    """Permutation of rows; the inverse is given, so that backward need not scatter-add."""

    reference = staticmethod(lambda x, order, back: x.index_select(0, order))

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        y: Tensor = x.index_select(0, order)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dx: Tensor = dy.index_select(0, ctx.back)
        return dx, None, None


def reorder(x: Tensor, join: TokenPermutation) -> Tensor:
    """Reorder the ranks' concatenated parts to natural order: x [n, ...] -> [n, ...]."""
    y: Tensor = Reorder.apply(x, join.order, join.back)  # type: ignore[no-untyped-call]  # torch's own
    return y


def exchange_tokens_for_heads(
    q: Tensor, k: Tensor, v: Tensor, group: Group, join: TokenPermutation
) -> tuple[Tensor, Tensor, Tensor]:
    """All-to-all that exchanges tokens for heads: q [t, n, d] -> [t · ranks, n / ranks, d]; k, v
    alike.

    If there are more ranks than key/value heads, or the numbers do not divide, heads are sent to
    every rank that uses them.
    """
    if group.size == 1:
        return q, k, v
    copies = math.lcm(k.shape[1], group.size) // k.shape[1]
    tokens = q.shape[0]
    parts = [
        _by_rank(x, group.size) for x in (q, *(x.repeat_interleave(copies, dim=1) for x in (k, v)))
    ]
    message = torch.cat([part.flatten(2) for part in parts], dim=-1).flatten(0, 1)
    received = reorder(
        all_to_all(message, group, send=[tokens] * group.size, receive=[tokens] * group.size), join
    )
    local_heads = received.split([part.shape[2] * part.shape[3] for part in parts], dim=-1)
    q, k, v = (x.unflatten(-1, part.shape[2:]) for x, part in zip(local_heads, parts, strict=True))
    return q, k, v


def select_local_heads(weight: Tensor | None, group: Group) -> Tensor | None:
    """Select this rank's heads: [..., n] -> [..., n / ranks]. The gradient of the other heads is
    zero here; other ranks compute it."""
    return None if weight is None else weight.unflatten(-1, (group.size, -1))[..., group.rank, :]


def exchange_heads_for_tokens(out: Tensor, group: Group, join: TokenPermutation) -> Tensor:
    """Inverse all-to-all: [t · ranks, n / ranks, d] in natural order -> [t, n, d]."""
    if group.size == 1:
        return out
    tokens = out.shape[0] // group.size
    parts = reorder(out, TokenPermutation(join.back, join.order))
    received = all_to_all(parts, group, send=[tokens] * group.size, receive=[tokens] * group.size)
    y: Tensor = received.unflatten(0, (group.size, tokens)).transpose(0, 1).flatten(1, 2)
    return y


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """[t, n, d] -> [ranks, t, n / ranks, d]: the heads that each rank gets."""
    y: Tensor = x.unflatten(1, (ranks, -1)).transpose(0, 1)
    return y


# --- ring attention


@dataclass(frozen=True, slots=True)
class RingPairs:
    """What this rank's queries and the keys of each rank of a ring have in common, by the number of
    the rank that owns the keys."""

    spans: Sequence[KeySpans]
    """The range of keys that the queries see."""

    dropped: Sequence[DroppedWeights] | None = None
    """Attention weights that dropout zeroes."""

    biases: Sequence[PairBiases] | None = None
    """Position biases of the scores, from the same values for all ranks."""

    pair_masks: Sequence[PairMask] | None = None
    """The pairs that attention masks let see."""

    def terms(self, rank: int) -> tuple[DroppedWeights | None, PairBiases | None, PairMask | None]:
        """Return dropout, biases and masks of the pairs with the keys of one rank."""
        return (
            None if self.dropped is None else self.dropped[rank],
            None if self.biases is None else self.biases[rank],
            None if self.pair_masks is None else self.pair_masks[rank],
        )


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    pairs: RingPairs,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    *,
    overlap: bool = True,
    max_scores: MaxScores | None = None,
) -> Tensor:
    """Ring attention of this rank's tokens to those of all ranks of `group`: q [t, n, d], k [t, g,
    d], v [t, g, d_v] -> [t, n, d_v].

    sinks [n]. Without `overlap` every message is waited for before the computation; the results are
    the same. `max_scores` records the largest scores of this rank's queries.
    """
    if group.size == 1:
        return span_attention(
            q, k, v, pairs.spans[0], scores, sinks, *pairs.terms(0), max_scores=max_scores
        )
    values = None if pairs.biases is None else pairs.biases[0].values
    out: Tensor = RingAttention.apply(
        q, k, v, group, pairs, scores, sinks, values, overlap, max_scores
    )  # type: ignore[no-untyped-call]  # torch's own
    return out


class RingAttention(Function):
    """Autograd function of ring attention. Saves q, k, v, the output and its lse of this rank's
    tokens only.

    At most two more chunks of keys and values are alive: one in use, one being received. Backward
    sends them around the ring again, followed by their gradients, to which each rank adds until
    they reach the owner.
    """

    moves: ClassVar[Moves] = ("V", "V")

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: Group,
        pairs: RingPairs,
        scores: Scores,
        sinks: Tensor | None,
        values: Tensor | None,
        overlap: bool,
        max_scores: MaxScores | None,
    ) -> Tensor:
        heads, repeats, dtype = k.shape[1], pairs.spans[0].repeats, q.dtype
        widths = [k.shape[-1], v.shape[-1]]
        q, local_kv = (
            rows_by_head(q, heads, repeats),
            rows_by_head(torch.cat([k, v], -1), heads, repeats).squeeze(1),
        )
        result, kv = (
            init_attention_result(q, widths[1], sinks, off_by_one=scores.off_by_one),
            local_kv,
        )
        row_max = None if max_scores is None else init_row_max(q)
        for step in range(group.size):
            next_kv = (
                _maybe_wait(start_ring_exchange(kv, group), overlap)
                if step < group.size - 1
                else None
            )
            owner = _owner(group, step)
            ring_k, ring_v = _split_kv(kv, widths)
            terms = pairs.terms(owner)
            attend(q, ring_k, ring_v, pairs.spans[owner], result, scores, *terms, row_max)
            kv = kv if next_kv is None else next_kv.wait()
        if max_scores is not None and row_max is not None:
            max_scores.update(max_by_token(row_max, heads))
        out = by_token(result.out.to(dtype), heads)
        ctx.save_for_backward(q, local_kv, out, result.lse, sinks, values)
        ctx.group, ctx.kv_heads, ctx.widths = group, heads, widths
        ctx.scores, ctx.overlap = scores, overlap
        ctx.pairs = replace(pairs, biases=None)  # their values are saved tensors
        ctx.distances = [of_rank.distances for of_rank in pairs.biases or ()]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, local_kv, out, lse, sinks, values = ctx.saved_tensors
        group, heads, widths, overlap = ctx.group, ctx.kv_heads, ctx.widths, ctx.overlap
        biases = [PairBiases(values, distances) for distances in ctx.distances]
        pairs = replace(ctx.pairs, biases=biases or None)
        repeats = pairs.spans[0].repeats
        delta = rows_by_head(output_share(dout, out, lse.dtype), heads, repeats).squeeze(-1)
        dq, dvalues = torch.zeros_like(q, dtype=lse.dtype), zeros_for(values, lse.dtype)
        dout = rows_by_head(dout, heads, repeats)
        add_gradients = _BackwardStep(q, dout, lse, delta, widths, ctx.scores, dq, dvalues, pairs)
        first, last = _halves(pairs.spans[group.rank])
        next_kv, in_flight = _maybe_wait(start_ring_exchange(local_kv, group), overlap), None
        local_sums = add_gradients(
            local_kv, first, torch.zeros_like(local_kv, dtype=lse.dtype), group.rank
        )
        for step in range(1, group.size):
            kv = next_kv.wait()
            next_kv = (
                _maybe_wait(start_ring_exchange(kv, group), overlap)
                if step < group.size - 1
                else next_kv
            )
            owner = _owner(group, step)
            sums = add_gradients(kv, pairs.spans[owner], torch.zeros_like(local_sums), owner)
            in_flight = _maybe_wait(_return_gradients(sums, in_flight, group), overlap)
        local_sums = add_gradients(local_kv, last, local_sums, group.rank)
        assert in_flight is not None
        dkv = by_token(local_sums.add_(in_flight.wait()).to(q.dtype).unsqueeze(1), heads)
        dsinks = None if sinks is None else sink_gradient(sinks, lse, delta)
        dvalues = None if dvalues is None else dvalues.to(values.dtype)
        dq = by_token(dq.to(q.dtype), heads)
        return dq, *dkv.split(widths, -1), None, None, None, dsinks, dvalues, None, None


@dataclass(frozen=True, slots=True)
class _BackwardStep:
    """Backward of attention between this rank's queries and the keys and values of one rank."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    widths: Sequence[int]
    scores: Scores
    dq: Tensor
    """Accumulated gradient of the queries."""

    dvalues: Tensor | None
    """Accumulated gradient of the values of the position biases."""

    pairs: RingPairs

    def __call__(self, kv: Tensor, spans: KeySpans, sums: Tensor, owner: int) -> Tensor:
        """Add to `sums`, the gradient of a rank's kv [heads, keys, d + d_v], to dq and to the
        gradient of the biases."""
        into = AttentionGrads(self.dq, *_split_kv(sums, self.widths), self.dvalues)
        k, v = _split_kv(kv, self.widths)
        attend_backward(
            self.q,
            k,
            v,
            self.lse,
            self.dout,
            self.delta,
            spans,
            into,
            self.scores,
            *self.pairs.terms(owner),
        )
        return sums


def _split_kv(kv: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Split concatenated keys and values."""
    k, v = kv.split(widths, -1)
    return k, v


def _halves(spans: KeySpans) -> tuple[KeySpans, KeySpans]:
    """Split the work on this rank's own keys into two parts: one overlaps with the first message of
    keys, the other with the last message of gradients."""
    middle = (len(spans.tiles) + 1) // 2
    return replace(spans, tiles=spans.tiles[:middle]), replace(spans, tiles=spans.tiles[middle:])


def _owner(group: Group, step: int) -> int:
    """Return the rank whose keys and values this rank holds in a step."""
    return (group.rank - step) % group.size


def _maybe_wait(started: PendingCollective, overlap: bool) -> PendingCollective:
    """Return the message without waiting, or wait for it if not `overlap`."""
    return started if overlap else PendingCollective(started.wait())


def _return_gradients(
    sums: Tensor, in_flight: PendingCollective | None, group: Group
) -> PendingCollective:
    """Add the gradient sums of the previous ranks for the same keys and pass them on; the last step
    ends at the keys' owner."""
    return start_ring_exchange(sums if in_flight is None else sums.add_(in_flight.wait()), group)
