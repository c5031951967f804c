"""Attention masks that a user passes with the tokens: per-document masks and padding."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.errors import DataError
from megalith.kernels.attention.scores import Scores
from megalith.kernels.attention.sdpa import Mask
from megalith.kernels.packed import PackedSeqParams
from megalith.plan.context import KeySpans, KeyTile

# Attention masks in addition to those of a layer: per-document masks, and padding.
#
# Masks are stored in one tensor, row after row, so that a backend reads only the pairs that it
# processes: a document, or a tile of some queries of one rank with some keys of another.

NO_MASK = -(2**62)
"""Row start of a query whose document has no mask."""


@dataclass(frozen=True, slots=True, eq=False)  # tensors do not compare to one truth value
class AttentionMask:
    """Attention mask: the keys of its document that each of t queries may see."""

    keys: Tensor | None = None
    """bool [t_kv]: False for keys that no query sees (padding); None: no padding."""

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
        seen = self._between(queries[:, tile.start : tile.stop], keys[:, tile.first : tile.last])
        return seen.index_select(0, rows - first).unsqueeze(1)

    def of_row(self, row: int, rows: int) -> Tensor:
        """Return the mask of all pairs of one of `rows` equal rows: bool [queries or 1, keys]."""
        return self._between(*(x.view(rows, -1)[row : row + 1] for x in (self.queries, self.keys)))[
            0
        ]

    def _between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """int64 [rows, t_q] and [rows, t_k] -> bool [rows, t_q or 1, t_k]."""
        visible, keys = self.visible, keys.unsqueeze(1)
        seen = (
            torch.ones_like(keys, dtype=torch.bool) if visible.keys is None else visible.keys[keys]
        )
        if visible.pairs is None or visible.rows is None:
            return seen
        starts = visible.rows[queries].unsqueeze(-1)
        own = visible.pairs[(starts + keys).clamp_(0, len(visible.pairs) - 1)]
        return (own | (starts < NO_MASK // 2)) & seen


Lengths = Sequence[tuple[int, int]]
"""(queries, keys) of each document."""


def with_masks(
    tokens: PackedSeqParams, masks: Sequence[Tensor | None], *, alone: bool = False
) -> PackedSeqParams:
    """Return the tokens with an attention mask for each document: bool [queries, keys], True where
    a query may see a key; None: all.

    The masks apply in addition to causality and windows. With `alone` they replace causality (not
    windows), so that a causal layer sees later tokens where the mask allows it; then each document
    needs a mask. A query that may see nothing gives 0. Masks refer to documents as they were read
    and are the same on every rank: under context parallelism each rank uses its own part.

    Raises:
        DataError: the masks do not match the documents in number, shape, dtype or device.
    """
    document_lengths, device = _as_read(tokens), tokens.position_ids.device
    if len(masks) != len(document_lengths):
        raise DataError(
            f"masks: got {len(masks)} masks for {len(document_lengths)} documents. Pass one mask "
            "for each document, or None for a document without a mask."
        )
    for number, mask in enumerate(masks):
        if mask is not None:
            _check(mask, f"masks[{number}]", document_lengths[number], f"document {number}", device)
        elif alone:
            queries, keys = document_lengths[number]
            raise DataError(
                f"masks[{number}]=None with alone=True: the masks replace causality, so each "
                f"document needs one. For a causal mask pass torch.ones({queries}, {keys}, "
                f"dtype=torch.bool).tril({keys - queries})."
            )
    lengths = tokens.whole.lengths
    masks = [
        None if mask is None else _extended(mask, *whole)
        for mask, whole in zip(masks, lengths, strict=True)
    ]
    flat_masks = [mask.reshape(-1) for mask in masks if mask is not None]
    existing = replace(
        tokens.whole.visible or AttentionMask(), torch_masks={}
    )  # the cache belongs to the old masks
    if sum(map(len, flat_masks)) == 0:
        return _given(tokens, replace(existing, pairs=None, rows=None, starts=(), alone=False))
    starts, end = list[int | None](), 0
    for mask in masks:
        starts.append(None if mask is None else end)
        end += 0 if mask is None else mask.numel()
    rows = torch.from_numpy(rows_of(lengths, starts)).to(device)
    return _given(
        tokens,
        replace(
            existing, pairs=torch.cat(flat_masks), rows=rows, starts=tuple(starts), alone=alone
        ),
    )


def with_padding(tokens: PackedSeqParams, text: Tensor) -> PackedSeqParams:
    """Return the tokens with a padding mask: `text`, bool [t_kv], is False for padding, which no
    query sees.

    For documents without cached keys, padding is also not `valid`: it does not count for expert
    load balancing, and experts over capacity drop it first. `text` covers all keys as they were
    read, document after document, on every rank.

    Raises:
        DataError: `text` does not match the keys in length, dtype or device.
    """
    document_lengths, device = _as_read(tokens), tokens.position_ids.device
    _check(
        text,
        "text",
        (sum(keys for _, keys in document_lengths),),
        f"padding of {len(document_lengths)} documents",
        device,
    )
    whole, context = tokens.whole, tokens.context
    if context is not None and context.slices.source is not None:
        source = torch.from_numpy(context.slices.source).to(device)
        text = (source >= 0) & text[source.clamp(min=0)]
    existing = replace(whole.visible or AttentionMask(), torch_masks={})
    tokens = _given(
        tokens, replace(existing, keys=text if existing.keys is None else existing.keys & text)
    )
    if any(queries != keys for queries, keys in whole.lengths):
        return tokens
    local_text = text
    if context is not None:
        local_text = text[torch.from_numpy(context.slices.numbers[context.rank]).to(device)]
    return replace(tokens, valid=tokens.valid & local_text)


def for_one_pass(tokens: PackedSeqParams) -> PackedSeqParams:
    """Return the same tokens with an empty mask cache, so that masks over all pairs that are built
    in one forward and backward pass are freed after it; microbatches live for the whole step."""
    visible = tokens.whole.visible
    return tokens if visible is None else _given(tokens, replace(visible, torch_masks={}))


def rows_of(lengths: Lengths, starts: Sequence[int | None]) -> NDArray[np.int64]:
    """Return where each query's mask row would begin if it covered all keys, [t]; masks begin at
    `starts`.

    >>> rows_of([(2, 2), (1, 3), (1, 4)], [0, None, 4])[[0, 1, 3]].tolist()
    [0, 2, -1]
    """
    queries, keys = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
    document = np.repeat(np.arange(len(queries)), queries)
    place = np.arange(len(document)) - (np.cumsum(queries) - queries)[document]
    first = (np.cumsum(keys) - keys)[document]
    start = np.array([NO_MASK if start is None else start for start in starts], dtype=np.int64)[
        document
    ]
    return np.where(start == NO_MASK, NO_MASK, start + place * keys[document] - first)


def _as_read(tokens: PackedSeqParams) -> Lengths:
    """Return (queries, keys) of the microbatch's documents over all ranks, without context-parallel
    padding."""
    context = tokens.context
    if context is None or context.slices.source is None:
        return tokens.whole.lengths
    document = context.slices.document()[context.slices.source >= 0]
    counts = np.bincount(document, minlength=len(context.slices.lengths)).tolist()
    return [(count, count) for count in counts]


def _check(given: Tensor, name: str, shape: tuple[int, ...], of: str, device: torch.device) -> None:
    """Raise DataError unless the tensor is bool, of that shape and on that device."""
    if given.dtype != torch.bool:
        raise DataError(
            f"{name} is {given.dtype}: expected torch.bool, True where a query may see a key. Pass "
            f"{name}.bool(), or {name} == 0 if it is an additive mask."
        )
    if tuple(given.shape) != shape:
        what = f" ({shape[0]} queries, {shape[1]} keys)" if len(shape) == 2 else ""
        raise DataError(
            f"{name} has the shape {list(given.shape)}: {of} requires {list(shape)}{what}. Pass a "
            "tensor of that shape."
        )
    if given.device != device:
        raise DataError(
            f"{name} is on {given.device}, but the tokens are on {device}. Pass "
            f"{name}.to('{device}')."
        )


def _extended(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return a document's mask extended by padding, which sees nothing and is seen by no query."""
    if mask.shape == (queries, keys):
        return mask
    whole = mask.new_zeros(queries, keys)
    whole[: mask.shape[0], : mask.shape[1]] = mask
    return whole


def _given(tokens: PackedSeqParams, visible: AttentionMask) -> PackedSeqParams:
    """Return the tokens with these masks, or without any if they are empty; under context
    parallelism the masks are stored with all tokens."""
    masks = None if visible.pairs is None and visible.keys is None else visible
    if tokens.context is None:
        return replace(tokens, visible=masks)
    whole = replace(tokens.context.whole, visible=masks)
    return replace(tokens, context=replace(tokens.context, whole=whole))
