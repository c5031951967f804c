"""Context parallelism: attention when the tokens of each row are shared by several ranks.

Each rank has an early and a late chunk of every row (or document), so that causal attention costs
all the same; every other operation works on its own tokens alone. Four ways to see the keys and
values of the others:

- ring: keys and values go round, one rank further with each step, and what a step finds is merged
  into the rest;
- gather: every rank gets all keys and values, and its queries see what is theirs to see;
- a2a: ranks exchange tokens for heads, and each computes all tokens of some heads;
- a2a+ring: an exchange of heads among neighbors, and a ring across the groups of neighbors.

Sources: ring: Liu et al. 2023, arXiv:2310.01889; a2a: Jacobs et al. 2023, arXiv:2309.14509; both:
Fang and Zhao 2024, arXiv:2405.07719; gather: Llama 3, arXiv:2407.21783, section 3.3.2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.context import ContextConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.attention import attention, dropped_between
from megalith.kernels.dropout import DroppedWeights
from megalith.kernels.relative_bias import Distances, PairBiases, biases_by_distance
from megalith.kernels.scores import PLAIN, Scores
from megalith.kernels.span_attention import (
    Gradients,
    attend,
    attend_backward,
    nothing_found,
    output_share,
    rows_by_head,
    sink_gradient,
    span_attention,
    zeros_for,
)
from megalith.kernels.tiled_attention import by_token
from megalith.kernels.tokens import Context, Join, PackedSeqParams
from megalith.kernels.visible import VisiblePairs
from megalith.parallel.autograd import Moves, all_gather, all_to_all
from megalith.parallel.group import Group
from megalith.parallel.mesh import Mesh
from megalith.parallel.rings import Started, start_passing
from megalith.plan.context import KeySpans, Slicing, kind_of_layer

Pair = TypeVar("Pair", DroppedWeights, PairBiases, VisiblePairs)


class Attend(Protocol):
    """Softmax attention inside each document, of my tokens to all that they may see, wherever it
    is."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [t, n, d], k [t, g, d], v [t, g, d_v], of my tokens -> [t, n, d_v].

        sinks [n], the same on all ranks that share tokens; each finds a part of their gradient, as
        of every weight.
        """


def build_attend(context: ContextConfig, layer: int, mesh: Mesh, *, overlap: bool = True) -> Attend:
    """How a layer of the model, numbered over all stages, attends to the tokens of other ranks.

    `overlap`: what goes round a ring travels while a rank computes.
    """
    if mesh.cp.size == 1:
        return attention
    match kind_of_layer(context, layer):
        case "ring":
            return Ring(mesh.cp, overlap=overlap)
        case "gather":
            return AllGatherAttend(mesh.cp)
        case "a2a":
            return HeadExchange(mesh.cp)
        case "a2a+ring":
            return HeadsThenRing(mesh.over("cp_a2a"), mesh.over("cp_ring"), overlap=overlap)


def my_slicing(parallel: ParallelConfig, mesh: Mesh) -> Slicing:
    """Which tokens this rank gets."""
    return Slicing(
        ranks=mesh.cp.size,
        rank=mesh.cp.rank,
        by=parallel.context.slicing,
        multiple=mesh.tp.size if parallel.sp else 1,
        near=mesh.over("cp_a2a").size if parallel.context.kind == "a2a+ring" else 1,
    )


@dataclass(frozen=True, slots=True)
class Ring:
    """Keys and values go round `group`: see `Attend`."""

    group: Group
    overlap: bool = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One step for each rank; the next rank's keys and values travel meanwhile."""
        context = _context(tokens)
        spans = context.spans_of_groups(1, **sight(scores, context))
        dropped, biases = dropped_of_groups(tokens, scores, 1), biases_of_groups(tokens, scores, 1)
        seen = seen_of_groups(context, 1)
        return ring_attention(
            q, k, v, self.group, spans, scores, sinks, dropped, biases, seen, overlap=self.overlap
        )


@dataclass(frozen=True, slots=True)
class AllGatherAttend:
    """Every rank of `group` gets all keys and values: see `Attend`."""

    group: Group
    find: Callable[..., Tensor] = span_attention

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One all-gather; backward sums what ranks found for the same keys and hands each its
        own."""
        context = _context(tokens)
        everything = reorder(all_gather(torch.cat([k, v], -1), self.group), context.everyone)
        k, v = everything.split([k.shape[-1], v.shape[-1]], -1)
        spans, dropped = context.spans_of_all(**sight(scores, context)), None
        if scores.dropout is not None and tokens.dropout is not None:
            dropped = DroppedWeights(
                scores.dropout, tokens.dropout.numbers, _numbers_of_all(context)
            )
        seen = seen_of_all(context)
        return self.find(
            q, k, v, spans, scores, sinks, dropped, biases_of_all(tokens, scores), seen
        )


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Each rank of `group` computes all tokens of some heads: see `Attend`."""

    group: Group

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One all-to-all before, one after."""
        context = _context(tokens)
        q, k, v = heads_for_tokens(q, k, v, self.group, context.everyone)
        scores, sinks = (
            scores_of_my_heads(scores, self.group, q.shape[1]),
            of_my_heads(sinks, self.group),
        )
        whole = replace(context.whole, biases=of_my_heads(tokens.biases, self.group))
        if scores.causal or context.slices.source is None:
            out = attention(q, k, v, whole, scores, sinks)
        else:  # documents end with padding, which nobody may see
            spans, seen = context.spans_of_whole(**sight(scores, context)), seen_of_whole(context)
            biases = biases_of_whole(whole, context, scores)
            out = span_attention(
                q, k, v, spans, scores, sinks, dropped_between(whole, scores), biases, seen
            )
        return tokens_for_heads(out, self.group, context.everyone)


@dataclass(frozen=True, slots=True)
class HeadsThenRing:
    """An exchange of heads inside `near`, where links are fast, and a ring over `ring`: see
    `Attend`."""

    near: Group
    ring: Group
    overlap: bool = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: PackedSeqParams,
        *,
        scores: Scores = PLAIN,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The neighbors' chunks together are the two chunks of a coarser ring."""
        context = _context(tokens)
        q, k, v = heads_for_tokens(q, k, v, self.near, context.neighbors)
        spans = context.spans_of_groups(self.near.size, **sight(scores, context))
        scores, sinks = (
            scores_of_my_heads(scores, self.near, q.shape[1]),
            of_my_heads(sinks, self.near),
        )
        mine = replace(tokens, biases=of_my_heads(tokens.biases, self.near))
        dropped = dropped_of_groups(tokens, scores, self.near.size)
        biases, seen = (
            biases_of_groups(mine, scores, self.near.size),
            seen_of_groups(context, self.near.size),
        )
        out = ring_attention(
            q, k, v, self.ring, spans, scores, sinks, dropped, biases, seen, overlap=self.overlap
        )
        return tokens_for_heads(out, self.near, context.neighbors)


def _context(tokens: PackedSeqParams) -> Context:
    assert tokens.context is not None, "tokens were not sliced over cp: the loader does that"
    return tokens.context


class AttentionRange(TypedDict):
    """Which earlier and later tokens of its document a token sees, as `Context` is asked for
    spans."""

    window: int | None
    right: int | None
    causal: bool
    chunked: bool


def sight(scores: Scores, context: Context) -> AttentionRange:
    """What scores say of it, but for what masks say in their place."""
    visible = context.whole.visible
    scores = scores if visible is None else visible.scores(scores)
    return AttentionRange(
        window=scores.window, right=scores.right, causal=scores.causal, chunked=scores.chunked
    )


# --- masks: every rank has those of whole documents, and looks at its own queries' rows


def seen_of_groups(context: Context, near: int) -> list[VisiblePairs] | None:
    """Which pairs of my group of `near` neighbors' tokens with those of every such group masks let
    see; None: all."""
    visible = context.whole.visible
    if visible is None:
        return None
    parts = context.numbers_of_groups(near)
    return [VisiblePairs(visible, parts[context.rank // near], keys) for keys in parts]


def seen_of_all(context: Context) -> VisiblePairs | None:
    """The same of my tokens with all tokens, in natural order."""
    visible = context.whole.visible
    if visible is None:
        return None
    return VisiblePairs(visible, context.numbers_of_groups(1)[context.rank], _every_number(context))


def seen_of_whole(context: Context) -> VisiblePairs | None:
    """The same of all tokens among themselves, in natural order."""
    visible = context.whole.visible
    return (
        None
        if visible is None
        else VisiblePairs(visible, _every_number(context), _every_number(context))
    )


# --- dropped weights: the hash of a pair needs the numbers of both tokens, wherever they are


def dropped_of_groups(
    tokens: PackedSeqParams, scores: Scores, near: int
) -> list[DroppedWeights] | None:
    """Which weights of my group of `near` neighbors' tokens with those of every such group are
    dropped; None: none."""
    if scores.dropout is None or tokens.dropout is None or tokens.dropout.numbers.is_meta:
        return None
    context = _context(tokens)
    numbers, parts = _numbers_of_all(context), context.slices.joined(near)
    each = [numbers[torch.from_numpy(part).to(numbers.device)] for part in parts]
    return [DroppedWeights(scores.dropout, each[context.rank // near], keys) for keys in each]


def _numbers_of_all(context: Context) -> Tensor:
    """int64 [t]: which tokens of the run those of the microbatch are, in natural order."""
    assert context.whole.dropout is not None, (
        "the loader numbers all tokens of a microbatch that ranks share"
    )
    return context.whole.dropout.numbers


def scores_of_my_heads(scores: Scores, group: Group, heads: int) -> Scores:
    """The same scores for those of `heads` of each rank of `group` that are mine after an
    exchange."""
    if scores.dropout is None:
        return scores
    first = scores.dropout.first_head + group.rank * heads
    return replace(scores, dropout=scores.dropout._replace(first_head=first))


# --- biases by distance: distances in a document are those of its tokens' numbers, wherever they
# are


def biases_of_groups(tokens: PackedSeqParams, scores: Scores, near: int) -> list[PairBiases] | None:
    """What scores of my group of `near` neighbors' tokens with those of every such group gain;
    None: nothing."""
    context = _context(tokens)
    values = _values(tokens.biases, context, scores)
    if values is None:
        return None
    parts = context.numbers_of_groups(near)
    mine, reach = parts[context.rank // near], values.shape[1] // 2
    return [PairBiases(values, Distances(mine, keys, reach)) for keys in parts]


def biases_of_all(tokens: PackedSeqParams, scores: Scores) -> PairBiases | None:
    """What scores of my tokens with all tokens, in natural order, gain; None: nothing."""
    context = _context(tokens)
    return _with_everyone(
        tokens.biases, context.numbers_of_groups(1)[context.rank], context, scores
    )


def biases_of_whole(whole: PackedSeqParams, context: Context, scores: Scores) -> PairBiases | None:
    """What scores of all tokens among themselves, in natural order, gain; None: nothing."""
    return _with_everyone(whole.biases, _every_number(context), context, scores)


def _with_everyone(
    table: Tensor | None, queries: Tensor, context: Context, scores: Scores
) -> PairBiases | None:
    values = _values(table, context, scores)
    if values is None:
        return None
    return PairBiases(values, Distances(queries, _every_number(context), values.shape[1] // 2))


def _every_number(context: Context) -> Tensor:
    return context.numbers_of_groups(context.slices.ranks)[0]


def _values(table: Tensor | None, context: Context, scores: Scores) -> Tensor | None:
    """Biases of all distances that there can be: [n, distances], differentiable."""
    if scores.relative is None:
        return None
    assert table is not None, "the model gives its table of biases to the tokens"
    reach = min(scores.relative, context.whole.max_seqlen_kv - 1)
    return biases_by_distance(table, reach, max_distance=scores.relative, causal=scores.causal)


# --- tokens for heads


class Reorder(Function):
    """Rows in another order; the rows' way back is known, so that backward need not add."""

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


def reorder(x: Tensor, join: Join) -> Tensor:
    """The ranks' parts, one after the other, in natural order: x [n, ...] -> [n, ...]."""
    y: Tensor = Reorder.apply(x, join.order, join.back)  # type: ignore[no-untyped-call]  # torch's own
    return y


def heads_for_tokens(
    q: Tensor, k: Tensor, v: Tensor, group: Group, join: Join
) -> tuple[Tensor, Tensor, Tensor]:
    """Give away the heads of others and get their tokens of mine: q [t, n, d] -> [t · ranks, n /
    ranks, d]; k, v alike.

    Where there are more ranks than key/value heads, or they do not divide, heads are sent to every
    rank that uses them.
    """
    if group.size == 1:
        return q, k, v
    copies = math.lcm(k.shape[1], group.size) // k.shape[1]
    tokens = q.shape[0]
    parts = [
        _by_rank(x, group.size) for x in (q, *(x.repeat_interleave(copies, dim=1) for x in (k, v)))
    ]
    message = torch.cat([part.flatten(2) for part in parts], dim=-1).flatten(0, 1)
    whole = reorder(
        all_to_all(message, group, send=[tokens] * group.size, receive=[tokens] * group.size), join
    )
    mine = whole.split([part.shape[2] * part.shape[3] for part in parts], dim=-1)
    q, k, v = (x.unflatten(-1, part.shape[2:]) for x, part in zip(mine, parts, strict=True))
    return q, k, v


def of_my_heads(weight: Tensor | None, group: Group) -> Tensor | None:
    """[..., n] -> [..., n / ranks]: of the heads that I get. The gradient is zero for all
    others, which other ranks find."""
    return None if weight is None else weight.unflatten(-1, (group.size, -1))[..., group.rank, :]


def tokens_for_heads(out: Tensor, group: Group, join: Join) -> Tensor:
    """The way back: [t · ranks, n / ranks, d] in natural order -> [t, n, d]."""
    if group.size == 1:
        return out
    tokens = out.shape[0] // group.size
    parts = reorder(out, Join(join.back, join.order))
    mine = all_to_all(parts, group, send=[tokens] * group.size, receive=[tokens] * group.size)
    y: Tensor = mine.unflatten(0, (group.size, tokens)).transpose(0, 1).flatten(1, 2)
    return y


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """[t, n, d] -> [ranks, t, n / ranks, d]: the heads that each rank gets."""
    y: Tensor = x.unflatten(1, (ranks, -1)).transpose(0, 1)
    return y


# --- the ring


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    spans: Sequence[KeySpans],
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    dropped: Sequence[DroppedWeights] | None = None,
    biases: Sequence[PairBiases] | None = None,
    seen: Sequence[VisiblePairs] | None = None,
    *,
    overlap: bool = True,
) -> Tensor:
    """Attention of my tokens to those of all ranks of `group`: q [t, n, d], k [t, g, d], v [t, g,
    d_v] -> [t, n, d_v].

    spans[r]: what my queries see of the keys of rank number r, and so what `scores` hide;
    dropped[r]: which of their weights are zero; biases[r]: what their scores gain, from the same
    values for all; seen[r]: which pairs masks let see. sinks [n]. Without `overlap` every message
    is waited for before anything else is done; the numbers are the same.
    """
    if group.size == 1:
        return span_attention(
            q,
            k,
            v,
            spans[0],
            scores,
            sinks,
            _of_rank(dropped, 0),
            _of_rank(biases, 0),
            _of_rank(seen, 0),
        )
    values = None if biases is None else biases[0].values
    out: Tensor = RingAttention.apply(
        q, k, v, group, spans, scores, sinks, dropped, values, biases, seen, overlap
    )  # type: ignore[no-untyped-call]  # torch's own
    return out


class RingAttention(Function):
    """Keys and values visit every rank. Keeps q, k, v, the output and its lse: of my own tokens
    only.

    Beside them at most two chunks of keys and values are alive: one in use, one arriving. Backward
    sends them round again, and behind them their gradients, which each rank adds to and which so
    come home to their owner.
    """

    moves: ClassVar[Moves] = ("V", "V")

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: Group,
        spans: Sequence[KeySpans],
        scores: Scores,
        sinks: Tensor | None,
        dropped: Sequence[DroppedWeights] | None,
        values: Tensor | None,
        biases: Sequence[PairBiases] | None,
        seen: Sequence[VisiblePairs] | None,
        overlap: bool,
    ) -> Tensor:
        heads, repeats, dtype = k.shape[1], spans[0].repeats, q.dtype
        widths = [k.shape[-1], v.shape[-1]]
        q, own = (
            rows_by_head(q, heads, repeats),
            rows_by_head(torch.cat([k, v], -1), heads, repeats).squeeze(1),
        )
        result, held = nothing_found(q, widths[1], sinks, off_by_one=scores.off_by_one), own
        for step in range(group.size):
            coming = (
                _while_computing(start_passing(held, group), overlap)
                if step < group.size - 1
                else None
            )
            owner = _owner(group, step)
            attend(
                q,
                *_both(held, widths),
                spans[owner],
                result,
                scores,
                _of_rank(dropped, owner),
                _of_rank(biases, owner),
                _of_rank(seen, owner),
            )
            held = held if coming is None else coming.wait()
        out = by_token(result.out.to(dtype), heads)
        ctx.save_for_backward(q, own, out, result.lse, sinks, values)
        ctx.group, ctx.spans, ctx.kv_heads, ctx.widths, ctx.scores = (
            group,
            spans,
            heads,
            widths,
            scores,
        )
        ctx.overlap, ctx.dropped, ctx.seen = overlap, dropped, seen
        ctx.distances = None if biases is None else [of_rank.distances for of_rank in biases]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, own, out, lse, sinks, values = ctx.saved_tensors
        group, spans, heads, widths, overlap = (
            ctx.group,
            ctx.spans,
            ctx.kv_heads,
            ctx.widths,
            ctx.overlap,
        )
        repeats = spans[0].repeats
        delta = rows_by_head(output_share(dout, out, lse.dtype), heads, repeats).squeeze(-1)
        dq, dvalues = torch.zeros_like(q, dtype=lse.dtype), zeros_for(values, lse.dtype)
        pairs = _Pairs(ctx.dropped, values, ctx.distances, dvalues, ctx.seen)
        find = _Finder(
            q, rows_by_head(dout, heads, repeats), lse, delta, widths, ctx.scores, dq, pairs
        )
        first, last = _halves(spans[group.rank])
        coming, travelling = _while_computing(start_passing(own, group), overlap), None
        mine = find(own, first, torch.zeros_like(own, dtype=lse.dtype), group.rank)
        for step in range(1, group.size):
            held = coming.wait()
            coming = (
                _while_computing(start_passing(held, group), overlap)
                if step < group.size - 1
                else coming
            )
            owner = _owner(group, step)
            sums = find(held, spans[owner], torch.zeros_like(mine), owner)
            travelling = _while_computing(_send_home(sums, travelling, group), overlap)
        mine = find(own, last, mine, group.rank)
        assert travelling is not None
        dkv = by_token(mine.add_(travelling.wait()).to(q.dtype).unsqueeze(1), heads)
        dsinks = None if sinks is None else sink_gradient(sinks, lse, delta)
        dvalues = None if dvalues is None else dvalues.to(values.dtype)
        dq = by_token(dq.to(q.dtype), heads)
        return dq, *dkv.split(widths, -1), None, None, None, dsinks, None, dvalues, None, None, None


def _of_rank(each: Sequence[Pair] | None, rank: int) -> Pair | None:
    return None if each is None else each[rank]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """What is known of single pairs of my queries with the keys of every rank."""

    dropped: Sequence[DroppedWeights] | None
    values: Tensor | None
    distances: Sequence[Distances] | None
    dvalues: Tensor | None
    """The gradient of the values: the sum so far."""

    seen: Sequence[VisiblePairs] | None

    def biases(self, rank: int) -> PairBiases | None:
        """With the keys of one rank."""
        return (
            None
            if self.values is None or self.distances is None
            else PairBiases(self.values, self.distances[rank])
        )


@dataclass(frozen=True, slots=True)
class _Finder:
    """What my queries contribute to the gradients of some keys and values, and those to theirs."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    widths: Sequence[int]
    scores: Scores
    dq: Tensor
    """The sum so far."""

    pairs: _Pairs

    def __call__(self, kv: Tensor, spans: KeySpans, sums: Tensor, owner: int) -> Tensor:
        """Add it to `sums`, the gradient of the kv [heads, keys, d + d_v] of a rank, to dq and to
        that of biases."""
        into = Gradients(self.dq, *_both(sums, self.widths), self.pairs.dvalues)
        attend_backward(
            self.q,
            *_both(kv, self.widths),
            self.lse,
            self.dout,
            self.delta,
            spans,
            into,
            self.scores,
            _of_rank(self.pairs.dropped, owner),
            self.pairs.biases(owner),
            _of_rank(self.pairs.seen, owner),
        )
        return sums


def _both(kv: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values, which lie side by side."""
    k, v = kv.split(widths, -1)
    return k, v


def _halves(spans: KeySpans) -> tuple[KeySpans, KeySpans]:
    """The work of my own keys in two parts: the keys' first journey hides behind one, their
    gradients' last behind the other."""
    middle = (len(spans.tiles) + 1) // 2
    return replace(spans, tiles=spans.tiles[:middle]), replace(spans, tiles=spans.tiles[middle:])


def _owner(group: Group, step: int) -> int:
    """Whose keys and values I hold in a step."""
    return (group.rank - step) % group.size


def _while_computing(started: Started, overlap: bool) -> Started:
    """Let a message travel on while something is computed, or wait for it here."""
    return started if overlap else Started(started.wait())


def _send_home(sums: Tensor, travelling: Started | None, group: Group) -> Started:
    """Add what the ranks before me found for the same keys, and send it on; the last step ends at
    the keys' owner."""
    return start_passing(sums if travelling is None else sums.add_(travelling.wait()), group)
