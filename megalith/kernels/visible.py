"""Which keys each query may see at most, beside what a layer hides: masks of single documents, and
padding.

Masks lie in one piece of memory, row after row. So whatever computes attention asks for no more
than the pairs that it is at: a whole document, or a tile of some queries of one rank with some keys
of another.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from megalith.kernels.scores import Scores
from megalith.kernels.sdpa import Mask
from megalith.plan.context import KeySpans, KeyTile

FREE = -(2**62)
"""Where the row of a query begins whose document has no mask."""


@dataclass(frozen=True, slots=True, eq=False)  # tensors do not compare to one truth value
class Visible:
    """Which keys of its document each of t queries may see at most."""

    keys: Tensor | None = None
    """bool [t_kv]: False for keys that no query sees, as padding; None: none is hidden from all."""

    pairs: Tensor | None = None
    """bool: the masks [queries, keys] of the documents that have one, row after row; None: none has
    one."""

    rows: Tensor | None = None
    """int64 [t]: where in `pairs` each query would find the first of all keys, were its row that
    long; or `FREE`."""

    starts: tuple[int | None, ...] = ()
    """Where the mask of each document begins in `pairs`, on the host; None: it has none."""

    alone: bool = False
    """Whether masks take the place of causality; then every document has one."""

    found: dict[Hashable, list[Mask | None]] = field(default_factory=dict, repr=False)
    """What torch's kernel has been given so far, since all layers ask the same: one mask is kept
    for all of them."""

    def scores(self, scores: Scores) -> Scores:
        """What hides keys beside the masks: as before, but for causality where masks stand alone.

        A window hides what it hid: that of a causal layer ends at the token itself. Chunks hide
        what is outside.
        """
        if not self.alone or not scores.causal:
            return scores
        right = 0 if scores.window is not None and not scores.chunked else None
        return replace(scores, causal=False, right=right)

    def of_documents(
        self, lengths: Sequence[tuple[int, int]], kept: Sequence[tuple[int, int]]
    ) -> list[Tensor | None]:
        """For each document of (queries, keys), of whose keys the last are left: bool [queries or
        1, keys left]."""
        found, ends = [], accumulate(keys for _, keys in lengths)
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
            found.append(mask)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class VisiblePairs:
    """The same of some queries and some keys, as span attention orders them."""

    visible: Visible

    queries: Tensor
    """int64 [t_q]: which of all queries these are."""

    keys: Tensor
    """int64 [t_k]: which of all keys these are."""

    def of_tile(self, spans: KeySpans, tile: KeyTile, heads: slice, q: Tensor) -> Tensor:
        """For a tile's scores: bool [its heads, 1, rows or 1, keys].

        q [heads, shared, length, d], as span attention orders it: key/value heads of row after row.
        Pairs of tokens of two documents are as they may be: the tile hides them.
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
        """For all pairs of one of equal rows: bool [queries or 1, keys]."""
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
        return (own | (starts < FREE // 2)) & seen
