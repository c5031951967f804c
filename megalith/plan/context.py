"""Context parallelism: the tokens of each rank (load-balanced context parallel, zig-zag chunks),
and the keys that each query attends to.

Every rank keeps its tokens in their natural order. So the keys that a query attends to, the earlier
tokens of its document (or all of them without a causal mask), are one interval of any rank's
tokens: two numbers per query replace a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith.config.model import ModelConfig
from megalith.config.parallel import ContextConfig, ContextKind, ParallelConfig
from megalith.errors import PlanError, did_you_mean
from megalith.plan.grid import divisors
from megalith.plan.shards import split_heads

Numbers = NDArray[np.int64]

TILE_ROWS = 64
"""Queries of one head per tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """How the tokens of a microbatch are split over context-parallel ranks, and this rank."""

    ranks: int = 1
    rank: int = 0

    by: Literal["row", "document"] = "row"
    """Unit that is split into an early and a late chunk for each rank."""

    multiple: int = 1
    """Divisor of a rank's part of each document, beside its two chunks: tp with sequence
    parallelism."""

    near: int = 1
    """Size of the all-to-all group of heads inside a ring."""


WHOLE = Slicing()
"""No context parallelism."""


@dataclass(frozen=True, slots=True, eq=False)  # arrays do not compare to one truth value
class Slices:
    """The tokens of one microbatch on each rank.

    Token indices count the padding of slicing by document.
    """

    numbers: Numbers
    """[ranks, t / ranks]: token indices of each rank, ascending."""

    lengths: Numbers
    """[documents]: tokens of each document, padding included."""

    source: Numbers | None
    """[t]: index of the token in the unpadded microbatch, -1 for padding; None without padding."""

    repeats: int
    """Number of equal rows: the pattern of tokens on each rank repeats this often."""

    @property
    def ranks(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.numbers)

    @property
    def num_tokens(self) -> int:
        """t: tokens of all ranks together, padding included."""
        return int(self.numbers.size)

    def document(self) -> NDArray[np.int32]:
        """[t]: document index of each token."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)

    def starts(self) -> Numbers:
        """[t]: index of the first token of each token's document."""
        return np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)

    def ends(self) -> Numbers:
        """[t]: index after the last token of each token's document, without padding at its end."""
        real = np.ones(self.num_tokens, dtype=np.int64) if self.source is None else self.source >= 0
        counts = np.bincount(self.document(), weights=real, minlength=len(self.lengths)).astype(
            np.int64
        )
        return np.repeat(np.cumsum(self.lengths) - self.lengths + counts, self.lengths)

    def as_read(self, rank: int) -> Numbers:
        """[t / ranks]: indices of one rank's tokens in the unpadded microbatch; -1 is padding."""
        local_tokens: Numbers = self.numbers[rank]
        return local_tokens if self.source is None else self.source[local_tokens]

    def joined(self, near: int) -> Numbers:
        """[ranks / near, near · t / ranks]: token indices of each group of `near` neighbors,
        ascending."""
        return np.sort(self.numbers.reshape(self.ranks // near, -1), axis=1)


def zigzag(length: int, ranks: int) -> Numbers:
    """Return the zig-zag split of `length` tokens: rank r has chunks r and 2 · ranks - 1 - r.

    With a causal mask, symmetric pairs of chunks cost every rank the same. Source: Brandon et al.
    2023, arXiv:2311.09431, and Llama 3, arXiv:2407.21783, section 3.3.2.

    >>> zigzag(8, 2).tolist()
    [[0, 1, 6, 7], [2, 3, 4, 5]]

    Raises:
        PlanError: the tokens do not divide into two chunks for each rank.
    """
    if length % (2 * ranks):
        raise PlanError(
            f"length={length} does not divide into 2 * {ranks} chunks, two for each of cp={ranks} "
            f"ranks. Use {length + -length % (2 * ranks)}."
        )
    chunks = np.arange(length, dtype=np.int64).reshape(2 * ranks, length // (2 * ranks))
    return np.concatenate([chunks[:ranks], chunks[: ranks - 1 : -1]], axis=1)


def plan_slices(
    lengths: Sequence[int] | NDArray[np.integer], *, row: int, slicing: Slicing
) -> Slices:
    """Split documents of these lengths, packed in rows of `row` tokens, over the ranks.

    By row, documents may end anywhere. By document, each is padded at its end to a multiple.

    Raises:
        PlanError: rows do not divide over the ranks, or documents do not fill whole rows.
    """
    documents = np.asarray(lengths, dtype=np.int64)
    total = int(documents.sum())
    if total % row:
        raise PlanError(
            f"documents of {total} tokens do not fill rows of {row}. Pass documents of whole rows."
        )
    if slicing.by == "row":
        spans = [row] * (total // row)
        alike = len(documents) == len(spans) and bool((documents == row).all())
        return Slices(
            _token_indices(spans, slicing.ranks), documents, None, len(spans) if alike else 1
        )
    multiple = 2 * slicing.ranks * slicing.multiple
    padded = documents + -documents % multiple
    alike = len(set(padded.tolist())) == 1
    numbers = _token_indices(padded.tolist(), slicing.ranks)
    return Slices(
        numbers, padded, _unpadded_indices(documents, padded), len(padded) if alike else 1
    )


def _token_indices(spans: Sequence[int], ranks: int) -> Numbers:
    """Return each rank's token indices of consecutive spans."""
    cut = {length: zigzag(length, ranks) for length in set(spans)}
    starts = np.cumsum([0, *spans[:-1]])
    return np.concatenate([cut[length] + start for length, start in zip(spans, starts)], axis=1)


def _unpadded_indices(lengths: Numbers, padded: Numbers) -> Numbers | None:
    """Return for each padded token its index in the unpadded documents, or -1."""
    if (lengths == padded).all():
        return None
    place = np.arange(padded.sum()) - np.repeat(np.cumsum(padded) - padded, padded)
    real = place < np.repeat(lengths, padded)
    return np.where(real, np.cumsum(real) - 1, -1)


def restore_token_order(parts: NDArray[np.generic], slices: Slices) -> NDArray[np.generic]:
    """Return all ranks' values [ranks, t / ranks, ...] in the original order of tokens, without
    padding."""
    whole = np.empty((slices.num_tokens, *parts.shape[2:]), dtype=parts.dtype)
    whole[slices.numbers.reshape(-1)] = parts.reshape(-1, *parts.shape[2:])
    return whole if slices.source is None else whole[slices.source >= 0]


# --- attention intervals


class KeyTile(NamedTuple):
    """A tile of attention: some queries, and the range of keys that any of them attends to."""

    start: int
    """The queries from here ..."""
    stop: int
    first: int
    """... see keys from here on."""
    last: int
    visible: Numbers | None
    """[queries, 2]: first and end key of each query, relative to `first`; None: all queries see all
    keys."""


@dataclass(frozen=True, slots=True, eq=False)
class KeySpans:
    """The interval of keys that each query attends to, repeated for equal rows."""

    repeats: int
    """Number of rows; queries and keys are split evenly over them."""

    visible: Numbers
    """[queries of a row, 2]: first and end key of each query."""

    tiles: tuple[KeyTile, ...]
    """Tiles that cover all intervals; queries without keys are in none."""


def plan_spans(
    queries: Numbers,
    keys: Numbers,
    starts: Numbers,
    *,
    ends: Numbers | None = None,
    repeats: int = 1,
    window: int | None = None,
    right: int | None = None,
    chunked: bool = False,
) -> KeySpans:
    """Return the keys that queries (token indices) attend to, both ascending, with documents
    starting at `starts` [t].

    A query attends to itself and the earlier tokens of its document; without a causal mask, with
    document ends `ends` [t], also to later ones. `window`: at most so many tokens to each side,
    itself included, or `right` tokens after it; if `chunked`, only within chunks of `window`
    tokens.
    """
    queries, keys = queries[: len(queries) // repeats], keys[: len(keys) // repeats]
    lowest, end = starts[queries], queries + 1 if ends is None else ends[queries]
    if window is not None and chunked:
        lowest = queries - (queries - lowest) % window
        end = np.minimum(end, lowest + window)
    elif window is not None:
        after = window - 1 if right is None else right
        lowest, end = (
            np.maximum(lowest, queries - window + 1),
            np.minimum(end, queries + after + 1),
        )
    first, last = np.searchsorted(keys, lowest), np.searchsorted(keys, end)
    visible = np.stack([first, np.maximum(first, last)], axis=1)
    return KeySpans(repeats, visible, tuple(_tiles(visible, _run_boundaries(queries))))


@lru_cache(
    maxsize=16
)  # all layers of a forward ask the same, and pipeline stages have a few microbatches under way
def plan_length_spans(
    lengths: tuple[tuple[int, int], ...],
    window: int | None = None,
    *,
    causal: bool = True,
    right: int | None = None,
) -> KeySpans:
    """Return the attention intervals of consecutive documents of (queries, keys); queries are the
    last of their keys.

    >>> plan_length_spans(((2, 3), (1, 4)), 2).visible.tolist()
    [[0, 2], [1, 3], [5, 7]]
    """
    counts, keys = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
    ends = np.cumsum(keys)
    if not causal and window is None:
        return _plan_document_spans(counts, ends - keys, ends)
    numbers = np.arange(keys.sum()) - np.repeat(ends - keys, keys)
    queries = np.flatnonzero(numbers >= np.repeat(keys - counts, keys))
    repeats = len(lengths) if len(set(lengths)) == 1 else 1
    starts = np.repeat(ends - keys, keys)
    until = None if causal else np.repeat(ends, keys)
    return plan_spans(
        queries,
        np.arange(len(numbers)),
        starts,
        ends=until,
        repeats=repeats,
        window=window,
        right=right,
    )


def _plan_document_spans(counts: Numbers, first: Numbers, last: Numbers) -> KeySpans:
    """Return intervals in which each document's queries attend to all of its keys."""
    alike = len(set(zip(counts.tolist(), (last - first).tolist()))) == 1
    repeats = len(counts) if alike else 1
    visible = np.repeat(np.stack([first, last], axis=1), counts, axis=0)[: counts.sum() // repeats]
    borders = np.unique([0, *np.cumsum(counts)[: len(counts) // repeats]]).tolist()
    return KeySpans(repeats, visible, tuple(_tiles(visible, borders)))


def _run_boundaries(queries: Numbers) -> list[int]:
    """Return the start of each run of consecutive tokens, and the end."""
    return [0, *(np.flatnonzero(np.diff(queries) != 1) + 1).tolist(), len(queries)]


def _tiles(visible: Numbers, borders: Sequence[int]) -> list[KeyTile]:
    """Split the queries into tiles; also at the end of a run if the tile is at least half full or
    the next run attends to distant keys."""
    cuts = [0]
    for border, after in pairwise([*borders[1:], borders[-1]]):
        while border - cuts[-1] > TILE_ROWS:
            cuts.append(cuts[-1] + TILE_ROWS)
        if (
            border - cuts[-1] >= TILE_ROWS // 2
            or border == after
            or _keys_are_distant(visible, cuts[-1], border, after)
        ):
            cuts.append(border)
    return [
        tile for start, stop in pairwise(cuts) if (tile := _tile(visible, start, stop)) is not None
    ]


def _keys_are_distant(visible: Numbers, start: int, border: int, stop: int) -> bool:
    """Return whether one tile for two runs of queries would compute more than one tile of
    additional scores.

    This is the case for documents with a KV cache: a few queries each, and many keys.
    """
    stop = min(stop, start + TILE_ROWS)
    spent = _num_scores(visible, start, border) + _num_scores(visible, border, stop)
    return _num_scores(visible, start, stop) > spent + TILE_ROWS**2


def _num_scores(visible: Numbers, start: int, stop: int) -> int:
    """Return the scores of a tile with all keys between the first and the last of its queries."""
    return (stop - start) * int(visible[stop - 1, 1] - visible[start, 0])


def _tile(visible: Numbers, start: int, stop: int) -> KeyTile | None:
    rows = visible[start:stop]
    nonempty = rows[rows[:, 1] > rows[:, 0]]
    if not len(nonempty):
        return None
    first, last = int(nonempty[:, 0].min()), int(nonempty[:, 1].max())
    dense = len(nonempty) == len(rows) and bool(
        (nonempty[:, 0] == first).all() and (nonempty[:, 1] == last).all()
    )
    if dense:
        return KeyTile(start, stop, first, last, None)
    return KeyTile(start, stop, first, last, np.clip(rows - first, 0, last - first))


# --- rules

KINDS: tuple[ContextKind, ...] = ("ring", "gather", "a2a", "a2a+ring")


def layer_context_kind(context: ContextConfig, layer: int) -> ContextKind:
    """Return the kind of context parallelism of a layer, by its global number."""
    return context.layers[layer] if context.layers else context.kind


def context_problems(parallel: ParallelConfig, model: ModelConfig, *, seq_len: int) -> list[str]:
    """Return an error text for each broken rule of context parallelism with rows of `seq_len`
    tokens."""
    if parallel.cp <= 1:
        return []
    unknown = _unknown_kinds(parallel.context)
    return (
        unknown
        + _length_problems(parallel, seq_len)
        + ([] if unknown else _exchange_problems(parallel, model))
    )


def _unknown_kinds(context: ContextConfig) -> list[str]:
    given = {"parallel.context.kind": context.kind} | {
        f"parallel.context.layers[{n}]": kind for n, kind in enumerate(context.layers)
    }
    return [
        f"{name}={kind} is not a known kind of context parallelism.{did_you_mean(kind, KINDS)} "
        f"Use one of {', '.join(KINDS)}."
        for name, kind in given.items()
        if kind not in KINDS
    ]


def _length_problems(parallel: ParallelConfig, seq_len: int) -> list[str]:
    """Check that rows can be split; slicing by document pads instead."""
    tp = parallel.tp if parallel.sp else 1
    parts = 2 * parallel.cp * tp
    if parallel.context.slicing == "document" or seq_len % parts == 0:
        return []
    product = (
        f"2 * parallel.cp * parallel.tp = 2 * {parallel.cp} * {tp}"
        if tp > 1
        else f"2 * {parallel.cp}"
    )
    below, above = seq_len // parts * parts, seq_len + -seq_len % parts
    return [
        f"train.seq_len={seq_len} does not divide by {product} = {parts}: each of "
        f"parallel.cp={parallel.cp} ranks gets "
        "an early and a late chunk of every "
        f"row{', cut again over tp by parallel.sp' if tp > 1 else ''}. "
        f"Set train.seq_len to {above}{f' or {below}' if below else ''}, or "
        "parallel.context.slicing to document, "
        "which pads documents."
    ]


def _exchange_problems(parallel: ParallelConfig, model: ModelConfig) -> list[str]:
    """Check layers, all-to-all group sizes and heads."""
    context, cp = parallel.context, parallel.cp
    kinds = set(context.layers) or {context.kind}
    problems = []
    if context.layers and len(context.layers) != model.num_layers:
        problems.append(
            f"parallel.context.layers names {len(context.layers)} kinds for "
            f"model.num_layers={model.num_layers} "
            f"layers. Use one for each, or remove it to use parallel.context.kind={context.kind} "
            "for all."
        )
    if "a2a+ring" in kinds and context.kind != "a2a+ring":
        problems.append(
            f"parallel.context.layers has a2a+ring, but parallel.context.kind={context.kind} has "
            "no all-to-all groups of "
            "neighbors. Set parallel.context.kind to a2a+ring and parallel.context.a2a to one of "
            f"{_proper(cp)}."
        )
    elif context.kind == "a2a+ring" and (
        context.a2a is None or context.a2a < 1 or cp % context.a2a
    ):
        problems.append(
            f"parallel.context.a2a={context.a2a} does not divide parallel.cp={cp}: with a2a+ring "
            "this many neighbors "
            f"exchange heads. Set parallel.context.a2a to one of {_proper(cp)}."
        )
    elif context.kind != "a2a+ring" and context.a2a is not None:
        problems.append(
            f"parallel.context.a2a={context.a2a} is for parallel.context.kind=a2a+ring, which "
            f"{context.kind} is not. "
            f"Set the kind to a2a+ring, or remove parallel.context.a2a."
        )
    return problems or _head_problems(parallel, model, kinds)


def _head_problems(
    parallel: ParallelConfig, model: ModelConfig, kinds: set[ContextKind]
) -> list[str]:
    """Check that the all-to-all splits the query heads of each tensor-parallel rank evenly."""
    if model.num_heads % model.num_kv_heads or parallel.tp > model.num_heads:
        return []  # another rule reports this
    queries = split_heads(model.num_heads, model.num_kv_heads, parallel.tp).queries
    fits = [size for size in divisors(parallel.cp) if all(count % size == 0 for count in queries)]
    has = (
        f"model.num_heads={model.num_heads} over parallel.tp={parallel.tp} are "
        f"{_either(queries)} heads on a rank"
    )
    problems = []
    if "a2a" in kinds and parallel.cp not in fits:
        smaller = [size for size in fits if size > 1]
        mixed = f", a2a+ring with parallel.context.a2a in {smaller}" if smaller else ""
        problems.append(
            f"parallel.cp={parallel.cp} with a2a: {has}, which do not divide over it. "
            f"Set parallel.context.kind to ring or gather{mixed}, or model.num_heads to "
            f"{_multiple_of(model, parallel.tp * parallel.cp)}."
        )
    if "a2a+ring" in kinds and parallel.context.a2a not in fits:
        problems.append(
            f"parallel.context.a2a={parallel.context.a2a}: {has}, which do not divide over it. "
            f"Set parallel.context.a2a to one of {fits}, or parallel.context.kind to ring."
        )
    return problems


def _either(counts: Sequence[int]) -> str:
    return " or ".join(str(count) for count in sorted(set(counts)))


def _multiple_of(model: ModelConfig, parts: int) -> int:
    """Return the next number of heads that is divisible by `parts` ranks and by the KV heads."""
    step = lcm(parts, model.num_kv_heads)
    return model.num_heads + -model.num_heads % step


def _proper(number: int) -> list[int]:
    """Return group sizes that leave both an all-to-all group and a ring, if there are any."""
    return divisors(number)[1:-1] or divisors(number)
