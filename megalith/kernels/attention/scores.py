"""Attention scores: scale, soft cap, sinks, relative position bias, visible keys and dropout
settings, the reference attention that uses them; the largest score of each head; attention masks of
documents, and padding.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.plan.context import KeySpans, KeyTile


class WeightDropout(NamedTuple):
    """Dropout of attention weights in training: see kernels/dropout.py."""

    p: float
    key: int
    """63 bits for this place and layer."""

    first_head: int
    """Index of the first local query head among all heads of the model."""


@dataclass(frozen=True, slots=True)
class Scores:
    """How attention scores q · k become weights. By default they are scaled by 1 / sqrt(d), and
    attention is causal."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(d)."""

    window: int | None = None
    """Sliding window: a token sees itself and the window - 1 tokens before it, and, if not causal,
    after it; None: no window."""

    chunked: bool = False
    """Chunked attention: a token sees its chunk of `window` tokens, counted from the start of its
    document, instead of a sliding window."""

    softcap: float | None = None
    """Soft cap: scores s become softcap · tanh(s / softcap); None: no cap."""

    causal: bool = True
    """Whether a token attends to no later tokens."""

    right: int | None = None
    """With a window, and not causal: number of later tokens in the window; None: as many as earlier
    ones."""

    off_by_one: bool = False
    """Softmax with an additional score of 0 that has no key: weights are exp(s) / (1 + sum of
    exp(s)). Source: Miller 2023, "Attention is off by one"."""

    relative: int | None = None
    """Relative position bias: scores gain a bias by distance from the table `attention_bias`;
    distances of at least this many tokens are equal. None: no bias."""

    dropout: WeightDropout | None = None
    """Attention dropout, after softmax; None: no dropout."""

    @property
    def after(self) -> int | None:
        """Number of later tokens that a token attends to; None: all of its document."""
        if self.causal:
            return 0
        if self.window is None:
            return None
        return self.window - 1 if self.right is None else self.right

    def hides(self, longest: int) -> bool:
        """Return whether the window hides any token of documents of at most `longest` tokens."""
        if self.window is None:
            return False
        return self.window < longest or (not self.causal and (self.after or 0) < longest - 1)

    def factor(self, head_dim: int) -> float:
        """Return the factor of q · k for this head dim."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale


PLAIN = Scores()


@dataclass(frozen=True, slots=True, eq=False)
class MaxScores:
    """Largest attention score of each query head over the visible pairs of one or more calls:
    scaled, before soft cap, position bias, sinks and softmax."""

    largest: Tensor
    """[n], fp32 or float64; -inf: no visible pair yet. Calls update it in place."""

    valid: Tensor | None = None
    """bool [t]: queries that count, which are not padding; None: all."""

    @torch.no_grad()
    def update(self, row_max: Tensor) -> None:
        """Include the largest scores of the queries of a call, row_max [t, n]."""
        if row_max.is_meta or not len(row_max):
            return
        if self.valid is not None:
            row_max = row_max.masked_fill(~self.valid.unsqueeze(1), -math.inf)
        torch.maximum(self.largest, row_max.amax(0).to(self.largest.dtype), out=self.largest)

    def select_heads(self, rank: int, ranks: int) -> "MaxScores":
        """Return the heads of one of `ranks` ranks, in the same memory."""
        return replace(self, largest=self.largest.unflatten(0, (ranks, -1))[rank])


class LocalMaxScores(NamedTuple):
    """Largest scores of the local heads of one attention module."""

    first_head: int
    """Index of the first local query head among all heads of the model."""

    largest: Tensor
    """[n_tp], fp32 or float64: see `MaxScores`."""


@dataclass(frozen=True, slots=True)
class ScoreRecord:
    """Largest attention scores of a step on this rank, over its microbatches, by the name of the
    attention module."""

    by_attention: dict[str, LocalMaxScores] = field(default_factory=dict)

    regions: tuple[set[str], ...] = ()
    """Names that are recorded already, for each part of the model around that backward recomputes:
    recomputation does not record again."""

    def start(self, name: str, first_head: int, q: Tensor) -> MaxScores | None:
        """Return the record of an attention module for queries q [t, n_tp, d]; None if this is a
        recomputation."""
        if any(name in names for names in self.regions):
            return None
        for names in self.regions:
            names.add(name)
        if name not in self.by_attention:
            dtype = torch.promote_types(q.dtype, torch.float32)
            largest = q.new_full((q.shape[1],), float("-inf"), dtype=dtype)
            self.by_attention[name] = LocalMaxScores(first_head, largest)
        return MaxScores(self.by_attention[name].largest)

    def for_recomputation(self) -> "ScoreRecord":
        """Return the record for a part of the model that backward recomputes."""
        return replace(self, regions=(*self.regions, set()))


def record_scores(
    record: ScoreRecord | None, name: str, first_head: int, q: Tensor
) -> MaxScores | None:
    """Return what attention module `name` records its largest scores with, for queries
    q [t, n_tp, d]; None: nothing."""
    return None if record is None else record.start(name, first_head, q)


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Reference implementation of attention in plain PyTorch operations: q [q, n, d], k [kv, g, d],
    v [kv, g, d_v] -> [q, n, d_v].

    `visible`, bool [q, kv], is the attention mask; None: all keys are visible; window, causality
    and dropout of `scores` are ignored. `sinks` [n] are scores that take part in softmax without a
    key (Xiao et al. 2023, arXiv:2309.17453; learned: OpenAI 2025, arXiv:2508.10925). Scores and
    softmax are fp32 or float64. A query without visible keys gives 0. `bias` [n, q, kv] is added to
    the scores; `factors` [n, q, kv] multiply the weights after softmax.
    """
    shared, dtype = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    s = torch.einsum("qnd,knd->nqk", q.to(dtype), k.to(dtype)) * scores.factor(q.shape[2])
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    s = s if bias is None else s + bias.to(dtype)
    weights = _softmax(s, visible, _sinks(s, scores, sinks))
    weights = (weights if factors is None else weights * factors).to(q.dtype)
    return torch.einsum("nqk,knd->qnd", weights, v)


def _sinks(s: Tensor, scores: Scores, sinks: Tensor | None) -> Tensor | None:
    """Return the scores of sinks for s [n, q, kv]: [n, q, 1], or None."""
    if scores.off_by_one:
        return torch.zeros_like(s[..., :1])
    return None if sinks is None else sinks.to(s.dtype)[:, None, None].expand(-1, s.shape[1], 1)


def _softmax(s: Tensor, visible: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Return the weights [n, q, kv]; 0 for hidden keys. With sinks the weights of a query sum to
    less than 1."""
    keys = s.shape[-1]
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks], dim=-1)
    if visible is None:
        return s.softmax(-1)[..., :keys]
    # softmax of nothing but -inf is NaN, and so are its gradients
    sees_nothing = ~visible.any(-1, keepdim=True)
    return s.masked_fill(sees_nothing, 0).softmax(-1)[..., :keys].masked_fill(sees_nothing, 0)


def build_scores_mask(
    queries: int, keys: int, scores: Scores, *, device: torch.device
) -> Tensor | None:
    """Return the attention mask of `scores`, bool [queries, keys], query i being token keys -
    queries + i; None: all keys are visible."""
    if scores.chunked and scores.window is not None:
        chunks = torch.arange(keys, device=device) // scores.window
        same_chunk = chunks[keys - queries :, None] == chunks
        return (
            same_chunk & causal_mask(queries, keys, device=device) if scores.causal else same_chunk
        )
    if scores.causal:
        return causal_mask(queries, keys, window=scores.window, device=device)
    if scores.window is None or not scores.hides(keys):
        return None
    everything = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return everything.triu(keys - queries - scores.window + 1).tril(
        keys - queries + (scores.after or 0)
    )


def causal_mask(
    queries: int, keys: int, *, window: int | None = None, device: torch.device
) -> Tensor:
    """Return a causal attention mask, bool [queries, keys]: query i, which is token keys - queries
    + i, sees itself and earlier keys.

    With a `window` it attends to itself and the window - 1 tokens before it.
    """
    before = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return before if window is None else before.triu(keys - queries - window + 1)


# Relative position bias of attention scores: a learned number for each bucket of distances and
# each head.
#
# Short distances have a bucket each; longer ones share buckets that widen with the logarithm of the
# distance. Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.


def distance_buckets(
    distances: Tensor, *, num_buckets: int, max_distance: int, causal: bool
) -> Tensor:
    """Return the bucket of each distance, key minus query: int64, any shape -> int64.

    Unless `causal`, later keys use the second half of the buckets. Distances of at least
    `max_distance` share the last bucket; at bucket boundaries the logarithm is computed in fp32, as
    in transformers.
    """
    first = torch.zeros_like(distances)
    if causal:
        far = distances.clamp(max=0).neg()
    else:
        num_buckets //= 2
        first, far = (distances > 0).long() * num_buckets, distances.abs()
    exact = num_buckets // 2
    steps = (
        torch.log(far.clamp(min=1).float() / exact)
        / math.log(max_distance / exact)
        * (num_buckets - exact)
    )
    shared = (exact + steps.long()).clamp(max=num_buckets - 1)
    return first + torch.where(far < exact, far, shared)


def distance_biases(
    table: Tensor, queries: int, keys: int, *, max_distance: int, causal: bool
) -> Tensor:
    """Return the bias of each score of a document: table [buckets, n] -> [n, queries, keys].

    Query i is token keys - queries + i. A pair's bias depends on its distance only, so queries +
    keys - 1 values are looked up, and each query uses a slice of them.
    """
    if table.is_meta:
        # meta tensors have no values to look up; any sum over the table has the right types
        return table.sum(0).view(-1, 1, 1).expand(-1, queries, keys)
    if queries == 0 or keys == 0:
        return table.new_zeros(table.shape[1], queries, keys)
    distances = torch.arange(1 - keys, queries, device=table.device)
    buckets = distance_buckets(
        distances, num_buckets=len(table), max_distance=max_distance, causal=causal
    )
    return table[buckets].T.unfold(1, keys, 1).flip(1)


def biases_by_distance(table: Tensor, reach: int, *, max_distance: int, causal: bool) -> Tensor:
    """Return the bias at each distance, key minus query, from -reach to reach: table [buckets, n]
    -> [n, 2 reach + 1]."""
    if table.is_meta:
        return table.sum(0).view(-1, 1).expand(-1, 2 * reach + 1)
    distances = torch.arange(-reach, reach + 1, device=table.device)
    buckets = distance_buckets(
        distances, num_buckets=len(table), max_distance=max_distance, causal=causal
    )
    return table[buckets].T.contiguous()


@dataclass(frozen=True, slots=True)
class Distances:
    """Distances between queries and keys at arbitrary places of their documents."""

    queries: Tensor
    """int64 [t_q]: position of each query among all tokens, documents one after the other."""

    keys: Tensor
    """int64 [t_k]: position of each key among all tokens."""

    reach: int
    """The largest distance with its own index; longer ones are clamped to it."""

    def of_row(self, rows: int) -> Tensor:
        """Return the distances plus reach of all pairs of one of `rows` equal rows: int64 [queries,
        keys]."""
        return self._distances(*(x[: len(x) // rows] for x in (self.queries, self.keys)))

    def of_tile(self, tile: KeyTile) -> Tensor:
        """Return the distances plus reach of a tile's pairs; with several equal rows, of the first:
        int64 [queries, keys]."""
        return self._distances(
            self.queries[tile.start : tile.stop], self.keys[tile.first : tile.last]
        )

    def _distances(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the clamped distances plus reach of int64 [t_q] and [t_k]: int64 [t_q, t_k]."""
        return (keys - queries.unsqueeze(1)).clamp_(-self.reach, self.reach).add_(self.reach)


@dataclass(frozen=True, slots=True)
class PairBiases:
    """Relative position bias of queries and keys in the layout of kernels/attention/split_kv.py."""

    values: Tensor
    """[n, 2 reach + 1], see `biases_by_distance`."""

    distances: Distances

    def of_tile(self, tile: KeyTile, heads: Tensor, shared: int) -> Tensor:
        """Return the bias of a tile's scores: [heads, shared * rows, keys]; heads: key/value heads,
        each shared by `shared` query heads."""
        values = self.values.unflatten(0, (-1, shared))[heads]
        return values[:, :, self.distances.of_tile(tile)].flatten(1, 2)

    def add_gradient(
        self, into: Tensor, dscores: Tensor, tile: KeyTile, heads: Tensor, shared: int
    ) -> None:
        """Add the contribution of a tile's dscores [heads, shared * rows, keys] to `into`, the
        gradient of `values`."""
        dscores = dscores.view(len(heads), shared, -1)
        indices = self.distances.of_tile(tile).view(1, 1, -1).expand_as(dscores)
        tile_grad = into.new_zeros(len(heads), shared, into.shape[1]).scatter_add_(
            2, indices, dscores
        )
        into.view(-1, shared, into.shape[1]).index_add_(0, heads, tile_grad)

    def of_row(self, rows: int) -> Tensor:
        """Return the bias of all pairs of one of `rows` equal rows: [n, queries, keys]."""
        if self.values.is_meta:
            return self.values.sum(1).view(-1, 1, 1)
        return self.values[:, self.distances.of_row(rows)]


def reference_biases(
    table: Tensor, queries: int, keys: int, *, max_distance: int, causal: bool
) -> Tensor:
    """Reference implementation of `distance_biases`, pair by pair."""
    places = torch.arange(keys, device=table.device)
    distances = places - places[keys - queries :, None]
    buckets = distance_buckets(
        distances, num_buckets=len(table), max_distance=max_distance, causal=causal
    )
    return table[buckets].permute(2, 0, 1)


# --- attention masks in addition to those of a layer: per-document masks, and padding
#
# Masks are stored in one tensor, row after row, so that a backend reads only the pairs that it
# processes: a document, or a tile of some queries of one rank with some keys of another.

NO_MASK = -(2**62)
"""Row start of a query whose document has no mask."""


class Mask(NamedTuple):
    """An additive attention mask for SDPA; from a bool mask each call would build, and save, its
    own."""

    added: Tensor
    """[q or 1, kv], or [rows, q or 1, kv]: 0 or -inf, added to the scores; all 0 for queries that
    see nothing."""

    blind: Tensor
    """bool [q or 1, 1] or [rows, q or 1, 1]: queries without visible keys."""


def mask_for_torch(mask: Tensor, dtype: torch.dtype) -> Mask:
    """Return the additive mask of a bool mask, for queries in `dtype`."""
    seen, blind = unmask_blind_queries(mask)
    return Mask(torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -math.inf), blind)


def unmask_blind_queries(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mask with queries that see nothing seeing all, since torch's kernels disagree on
    their output and gradient; and which queries these are."""
    blind = ~mask.any(-1, keepdim=True)
    return mask | blind, blind


@dataclass(frozen=True, slots=True, eq=False)  # tensors do not compare to one truth value
class AttentionMask:
    """Attention mask: the keys of its document that each of t queries may see."""

    keys: Tensor | None = None
    """bool [t_kv]: False for keys that no query attends to (padding); None: no padding."""

    pairs: Tensor | None = None
    """bool: the masks [queries, keys] of documents that have one, row after row; None: no masks."""

    rows: Tensor | None = None
    """int64 [t]: where each query's row in `pairs` would begin if it covered all keys; or
    `NO_MASK`."""

    starts: tuple[int | None, ...] = ()
    """Start of each document's mask in `pairs`, on the host; None: no mask."""

    alone: bool = False
    """Whether masks replace causality; then every document has one."""

    torch_masks: dict[Hashable, list[Mask | None]] = field(default_factory=dict, repr=False)
    """Cache of SDPA masks, which all layers share."""

    def scores(self, scores: Scores) -> Scores:
        """Return the scores without causality if masks replace it.

        A window hides the same keys as before: that of a causal layer ends at the token itself.
        Chunks hide keys outside.
        """
        if not self.alone or not scores.causal:
            return scores
        right = 0 if scores.window is not None and not scores.chunked else None
        return replace(scores, causal=False, right=right)

    def of_documents(
        self, lengths: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]]
    ) -> list[Tensor | None]:
        """Return the mask of each document with (queries, keys) of which the last keys are kept:
        bool [queries or 1, keys left], or None."""
        masks, ends = [], accumulate(keys for _, keys in lengths)
        for n, ((queries, keys), end, (_, left)) in enumerate(
            zip(lengths, ends, kept, strict=True)
        ):
            mask, start = None, self.starts[n] if self.starts else None
            if self.pairs is not None and start is not None:
                mask = self.pairs[start : start + queries * keys].view(queries, keys)[
                    :, keys - left :
                ]
            if self.keys is not None:
                seen = self.keys[end - left : end].unsqueeze(0)
                mask = seen if mask is None else mask & seen
            masks.append(mask)
        return masks


@dataclass(frozen=True, slots=True, eq=False)
class PairMask:
    """The attention mask of some queries and some keys, in the layout of
    kernels/attention/split_kv.py."""

    visible: AttentionMask

    queries: Tensor
    """int64 [t_q]: indices among all queries."""

    keys: Tensor
    """int64 [t_k]: indices among all keys."""

    def of_tile(self, spans: KeySpans, tile: KeyTile, heads: slice, q: Tensor) -> Tensor:
        """Return the mask of a tile's scores: bool [heads of the tile, 1, rows or 1, keys].

        q [heads, shared, length, d]: key/value heads of row after row. Entries of pairs of two
        documents are arbitrary: the tile hides them.
        """
        count = q.shape[0] // spans.repeats
        rows = torch.arange(*heads.indices(q.shape[0]), device=q.device) // count
        first, last = (
            heads.indices(q.shape[0])[0] // count,
            (heads.indices(q.shape[0])[1] - 1) // count,
        )
        queries, keys = (
            x.view(spans.repeats, -1)[first : last + 1] for x in (self.queries, self.keys)
        )
        seen = self._visible_pairs(
            queries[:, tile.start : tile.stop], keys[:, tile.first : tile.last]
        )
        return seen.index_select(0, rows - first).unsqueeze(1)

    def of_row(self, row: int, rows: int) -> Tensor:
        """Return the mask of all pairs of one of `rows` equal rows: bool [queries or 1, keys]."""
        return self._visible_pairs(
            *(x.view(rows, -1)[row : row + 1] for x in (self.queries, self.keys))
        )[0]

    def _visible_pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the mask of int64 [rows, t_q] and [rows, t_k]: bool [rows, t_q or 1, t_k]."""
        visible, keys = self.visible, keys.unsqueeze(1)
        seen = (
            torch.ones_like(keys, dtype=torch.bool) if visible.keys is None else visible.keys[keys]
        )
        if visible.pairs is None or visible.rows is None:
            return seen
        starts = visible.rows[queries].unsqueeze(-1)
        own = visible.pairs[(starts + keys).clamp_(0, len(visible.pairs) - 1)]
        return (own | (starts < NO_MASK // 2)) & seen
