"""Attention masks in addition to those of a layer: per-document masks, and padding.

Masks are stored in one tensor, row after row, so that a backend reads only the pairs that it
processes: a document, or a tile of some queries of one rank with some keys of another.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from megalith.kernels.attention.scores import Scores
from megalith.kernels.attention.sdpa import Mask
from megalith.plan.context import KeySpans, KeyTile

NO_MASK = -(2**62)
"""Row start of a query whose document has no mask."""


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
