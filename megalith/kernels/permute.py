"""Permutation of tokens to rows sorted by expert, and back: index arithmetic first, then moves of
tensors.

Rows are gathered, and a token's rows are added one after another in the order of its choices: the
result does not depend on thread scheduling. The backward of either move is the other one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import Context

# --- permutations


@dataclass(frozen=True, slots=True)
class RowPermutation:
    """Permutation between routing choices and rows sorted by expert. Choice `token * k + place` is
    a token's choice at `place`."""

    counts: Tensor
    """[e] int64: number of rows of each expert; rows are sorted by expert, and an expert's rows by
    token."""

    choices: Tensor
    """[r] int64: the choice of each row."""

    tokens: Tensor
    """[r] int64: the token of each row."""

    rows: Tensor
    """[m] int64: rows sorted by token, each token's in the order of its choices; m = r, or t k if
    padded."""

    starts: Tensor
    """[t] int64: where each token's rows begin in `rows`."""

    filler: Tensor | None = None
    """[r] bool, if padded: rows of padding, which are zeros and do not contribute to the output."""

    missing: Tensor | None = None
    """[m] bool, if padded: entries of `rows` whose choice has no row (dropped)."""


def permute_choices(
    chosen: Tensor,
    experts: int,
    *,
    num_rows: int | None = None,
    sort: "SortedChoices | None" = None,
) -> RowPermutation:
    """Return the permutation of all choices that are not dropped: chosen [t, k] int64, -1 for a
    dropped choice.

    `num_rows`: number of choices that are not dropped, if known (t k if none is); unset: they are
    counted, which synchronizes with the GPU. `sort`: the sorted choices, if available.
    """
    t, k = chosen.shape
    num_rows = int((chosen >= 0).sum()) if num_rows is None else num_rows
    sort = sort_choices(chosen, experts) if sort is None else sort
    choices = sort.choices[:num_rows]
    if num_rows == t * k:
        rows = torch.empty_like(choices).scatter_(0, choices, _numbers(num_rows, chosen))
        return RowPermutation(sort.counts, choices, choices // k, rows, _numbers(t, chosen) * k)
    rows_per_token = (chosen >= 0).sum(1)
    return RowPermutation(
        sort.counts,
        choices,
        choices // k,
        choices.argsort(),
        rows_per_token.cumsum(0) - rows_per_token,
    )


def permute_choices_padded(chosen: Tensor, experts: int, *, capacity: int) -> RowPermutation:
    """Return the permutation with exactly `capacity` rows for every expert, so that no shape
    depends on the routing.

    chosen [t, k] int64, -1 for a dropped choice. An expert with fewer choices gets padding rows; of
    more than `capacity` choices, the last are dropped.
    """
    t, k = chosen.shape
    sort = sort_choices(chosen, experts)
    place, first = _numbers(capacity, chosen), sort.counts.cumsum(0) - sort.counts
    filler = (place >= sort.counts.unsqueeze(1)).flatten()
    taken = (first.unsqueeze(1) + place).flatten().masked_fill_(filler, t * k)
    # t k stands for padding
    choices = torch.cat([sort.choices, sort.choices.new_full((1,), t * k)])[taken]
    rows = chosen.new_full((t * k + 1,), -1).scatter_(
        0, choices, _numbers(experts * capacity, chosen)
    )[:-1]
    choices = choices.masked_fill(filler, 0)
    counts = torch.full_like(sort.counts, capacity)
    return RowPermutation(
        counts, choices, choices // k, rows.clamp(min=0), _numbers(t, chosen) * k, filler, rows < 0
    )


class SortedChoices(NamedTuple):
    """All choices sorted by expert, dropped ones last, and the number of choices of each expert."""

    choices: Tensor
    """[t k] int64."""

    counts: Tensor
    """[e] int64."""


def sort_choices(chosen: Tensor, experts: int) -> SortedChoices:
    """Sort choices [t, k] int64 by expert, -1 for a dropped one; without GPU synchronization."""
    flat = chosen.flatten()
    sorted_experts, choices = torch.where(flat < 0, experts, flat).sort(stable=True)
    # Not torch.bincount, which synchronizes with the GPU to learn the number of bins.
    ends = torch.searchsorted(sorted_experts, _numbers(experts, chosen), right=True)
    return SortedChoices(choices, ends.diff(prepend=ends.new_zeros(1)))


def _numbers(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


# --- moves


def permute(x: Tensor, order: RowPermutation) -> Tensor:
    """Gather the token of each row: x [t, h] -> [r, h]. Backward sums the gradients of a token's
    rows in fp32, rounded once."""
    if torch.compiler.is_compiling():
        return reference_permute(x, order)
    rows: Tensor = PermuteFunction.apply(x, order)  # type: ignore[no-untyped-call]  # torch's own
    return rows


def unpermute(rows: Tensor, order: RowPermutation) -> Tensor:
    """Sum each token's rows: rows [r, h] -> [t, h], in fp32, rounded once; 0 for a token without
    rows."""
    if torch.compiler.is_compiling():
        return reference_unpermute(rows, order)
    y: Tensor = UnpermuteFunction.apply(rows, order)  # type: ignore[no-untyped-call]  # torch's own
    return y


def gather_row_weights(weights: Tensor, order: RowPermutation) -> Tensor:
    """Return the router weight of each row: the weights of all choices [t, k] -> [r], 0 for
    padding."""
    row_weights = weights.flatten().index_select(0, order.choices)
    return row_weights if order.filler is None else row_weights.masked_fill(order.filler, 0.0)


def gather_rows(x: Tensor, order: RowPermutation) -> Tensor:
    """Compute `permute` outside autograd, for layers that recompute its output in backward: x [t,
    h] -> [r, h]."""
    rows = x.index_select(0, order.tokens)
    return rows if order.filler is None else rows.masked_fill_(order.filler.unsqueeze(1), 0.0)


def _add_rows(rows: Tensor, order: RowPermutation) -> Tensor:
    """Sum the rows of each token: rows [r, h] -> [t, h], by torch's embedding_bag, which sums in
    fp32 and in order."""
    if not len(rows) or not len(order.starts):
        return rows.new_zeros(len(order.starts), rows.shape[1])
    shares = None if order.missing is None else (~order.missing).to(rows.dtype)
    return torch.nn.functional.embedding_bag(
        order.rows, rows, order.starts, mode="sum", per_sample_weights=shares
    )


def reference_permute(x: Tensor, order: RowPermutation) -> Tensor:
    """Reference implementation of `permute` in plain PyTorch operations."""
    rows = x[order.tokens]
    return rows if order.filler is None else rows.masked_fill(order.filler.unsqueeze(1), 0.0)


def reference_unpermute(rows: Tensor, order: RowPermutation) -> Tensor:
    """Reference implementation of `unpermute` in plain PyTorch operations."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    wide = wide if order.filler is None else wide.masked_fill(order.filler.unsqueeze(1), 0.0)
    total = wide.new_zeros(len(order.starts), rows.shape[1])
    return total.index_add(0, order.tokens, wide).to(rows.dtype)


class PermuteFunction(Function):
    """Autograd function of `permute`."""

    reference = staticmethod(reference_permute)

    @staticmethod
    def forward(ctx: Context, x: Tensor, order: RowPermutation) -> Tensor:
        """x [t, h] -> [r, h]."""
        ctx.order = order
        return gather_rows(x, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, drows: Tensor) -> tuple[Tensor, None]:
        """[r, h] -> [t, h]."""
        return _add_rows(drows.contiguous(), ctx.order), None


class UnpermuteFunction(Function):
    """Autograd function of `unpermute`."""

    reference = staticmethod(reference_unpermute)

    @staticmethod
    def forward(ctx: Context, rows: Tensor, order: RowPermutation) -> Tensor:
        """rows [r, h] -> [t, h]."""
        ctx.order = order
        return _add_rows(rows.contiguous(), order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None]:
        """[t, h] -> [r, h]."""
        return gather_rows(dy, ctx.order), None


# --- chunks: rows from several ranks


def expert_major(ranks: int, experts: int) -> list[int]:
    """Return the order that sorts chunks by expert, for chunks that are sorted by rank and then by
    expert.

    >>> expert_major(ranks=2, experts=3)  # chunk 4 is the second rank's for its second expert
    [0, 3, 1, 4, 2, 5]
    """
    return [rank * experts + expert for expert in range(experts) for rank in range(ranks)]


def invert_chunk_order(sizes: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the inverse of `sort_chunks`: the sizes of the sorted chunks, and the order that
    restores the original.

    >>> undone([5, 6, 7], [2, 0, 1])
    ([7, 5, 6], [1, 2, 0])
    """
    return [sizes[chunk] for chunk in order], sorted(
        range(len(order)), key=lambda place: order[place]
    )


def sort_chunks(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Reorder chunks, `order[0]` first: rows [r, ...] in chunks of `sizes`, which sum to r -> [r,
    ...]."""
    y: Tensor = SortChunksFunction.apply(rows, sizes, order)  # type: ignore[no-untyped-call]  # torch's own
    return y


def reference_sort_chunks(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Reference implementation of `sort_chunks` in plain PyTorch operations."""
    chunks = rows.split(list(sizes))
    return torch.cat([chunks[number] for number in order])


class SortChunksFunction(Function):
    """Autograd function of `sort_chunks`; saves no tensors."""

    reference = staticmethod(reference_sort_chunks)

    @staticmethod
    def forward(ctx: Context, rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
        """[r, ...] -> [r, ...]."""
        ctx.back = invert_chunk_order(sizes, order)
        return reference_sort_chunks(rows, sizes, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None, None]:
        """[r, ...] -> [r, ...]."""
        return reference_sort_chunks(dy, *ctx.back), None, None
