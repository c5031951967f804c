"""PackedSeqParams to the rows that experts work on, sorted by expert, and back: index arithmetic
first, then moves of tensors.

Rows are gathered, and a token's rows are added up one after another in the order of its choices:
nothing here depends on which thread comes first. The backward of either move is the other one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import Context

# --- which row is whose


@dataclass(frozen=True, slots=True)
class Order:
    """Which row is which choice of which token. Choice number `token * k + place` is a token's
    choice at `place`."""

    counts: Tensor
    """[e] int64: how many rows each expert has; they lie expert after expert, an expert's in the
    order of tokens."""

    choices: Tensor
    """[r] int64: the choice that each row is."""

    tokens: Tensor
    """[r] int64: the token that each row is of."""

    rows: Tensor
    """[m] int64: rows token after token, each token's in the order of its choices; m = r, or t k if
    padded."""

    starts: Tensor
    """[t] int64: where each token's begin in `rows`."""

    filler: Tensor | None = None
    """[r] bool, if padded: rows that are no token's. They are zeros, and nothing becomes of
    them."""

    missing: Tensor | None = None
    """[m] bool, if padded: entries of `rows` that are choices without a row."""


def order_choices(
    chosen: Tensor,
    experts: int,
    *,
    num_rows: int | None = None,
    sort: "SortedChoices | None" = None,
) -> Order:
    """The rows of all choices that are not dropped: chosen [t, k] int64, -1 for one that is.

    `num_rows`: how many are not, where that is known (t k if none is); unset: they are counted, and
    a GPU waited for. `sort`: of these choices, where they are sorted already.
    """
    t, k = chosen.shape
    num_rows = int((chosen >= 0).sum()) if num_rows is None else num_rows
    sort = sort_choices(chosen, experts) if sort is None else sort
    choices = sort.choices[:num_rows]
    if num_rows == t * k:
        rows = torch.empty_like(choices).scatter_(0, choices, _numbers(num_rows, chosen))
        return Order(sort.counts, choices, choices // k, rows, _numbers(t, chosen) * k)
    of_tokens = (chosen >= 0).sum(1)
    return Order(
        sort.counts, choices, choices // k, choices.argsort(), of_tokens.cumsum(0) - of_tokens
    )


def order_padded(chosen: Tensor, experts: int, *, capacity: int) -> Order:
    """The same with exactly `capacity` rows for every expert, whatever was chosen, so that no shape
    depends on it.

    chosen [t, k] int64, -1 for a dropped choice. An expert's rows beyond those that chose it are
    filler; of more than `capacity`, the last are dropped here.
    """
    t, k = chosen.shape
    sort = sort_choices(chosen, experts)
    place, first = _numbers(capacity, chosen), sort.counts.cumsum(0) - sort.counts
    filler = (place >= sort.counts.unsqueeze(1)).flatten()
    taken = (first.unsqueeze(1) + place).flatten().masked_fill_(filler, t * k)
    choices = torch.cat([sort.choices, sort.choices.new_full((1,), t * k)])[
        taken
    ]  # t k: that of filler
    rows = chosen.new_full((t * k + 1,), -1).scatter_(
        0, choices, _numbers(experts * capacity, chosen)
    )[:-1]
    choices = choices.masked_fill(filler, 0)
    counts = torch.full_like(sort.counts, capacity)
    return Order(
        counts, choices, choices // k, rows.clamp(min=0), _numbers(t, chosen) * k, filler, rows < 0
    )


class SortedChoices(NamedTuple):
    """All choices sorted by expert, dropped ones last, and how many each expert has."""

    choices: Tensor
    """[t k] int64."""

    counts: Tensor
    """[e] int64."""


def sort_choices(chosen: Tensor, experts: int) -> SortedChoices:
    """Choices [t, k] int64, -1 for a dropped one; nothing waits for a GPU."""
    flat = chosen.flatten()
    chosen_by, choices = torch.where(flat < 0, experts, flat).sort(stable=True)
    # Not torch.bincount: on a GPU it waits to know how many bins there are.
    ends = torch.searchsorted(chosen_by, _numbers(experts, chosen), right=True)
    return SortedChoices(choices, ends.diff(prepend=ends.new_zeros(1)))


def _numbers(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


# --- moves


def permute(x: Tensor, order: Order) -> Tensor:
    """Each row's token: x [t, h] -> [r, h]. Backward adds up the gradients of a token's rows, in
    fp32, rounded once."""
    if torch.compiler.is_compiling():
        return reference_permute(x, order)
    rows: Tensor = PermuteFunction.apply(x, order)  # type: ignore[no-untyped-call]  # torch's own
    return rows


def unpermute(rows: Tensor, order: Order) -> Tensor:
    """The sum of each token's rows: rows [r, h] -> [t, h], added in fp32, rounded once; 0 for a
    token without any."""
    if torch.compiler.is_compiling():
        return reference_unpermute(rows, order)
    y: Tensor = UnpermuteFunction.apply(rows, order)  # type: ignore[no-untyped-call]  # torch's own
    return y


def weights_of_rows(weights: Tensor, order: Order) -> Tensor:
    """What each row counts: the weights of all choices [t, k] -> [r], 0 for filler."""
    mine = weights.flatten().index_select(0, order.choices)
    return mine if order.filler is None else mine.masked_fill(order.filler, 0.0)


def gather_rows(x: Tensor, order: Order) -> Tensor:
    """What `permute` computes, for readers that rebuild its rows in their backward: x [t, h] -> [r,
    h]."""
    rows = x.index_select(0, order.tokens)
    return rows if order.filler is None else rows.masked_fill_(order.filler.unsqueeze(1), 0.0)


def _add_rows(rows: Tensor, order: Order) -> Tensor:
    """rows [r, h] -> [t, h]. A bag of embeddings is what a token's rows are; torch adds them in
    fp32 and in order."""
    if not len(rows) or not len(order.starts):
        return rows.new_zeros(len(order.starts), rows.shape[1])
    shares = None if order.missing is None else (~order.missing).to(rows.dtype)
    return torch.nn.functional.embedding_bag(
        order.rows, rows, order.starts, mode="sum", per_sample_weights=shares
    )


def reference_permute(x: Tensor, order: Order) -> Tensor:
    """What `permute` computes, in plain operations."""
    rows = x[order.tokens]
    return rows if order.filler is None else rows.masked_fill(order.filler.unsqueeze(1), 0.0)


def reference_unpermute(rows: Tensor, order: Order) -> Tensor:
    """What `unpermute` computes, in plain operations."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    wide = wide if order.filler is None else wide.masked_fill(order.filler.unsqueeze(1), 0.0)
    total = wide.new_zeros(len(order.starts), rows.shape[1])
    return total.index_add(0, order.tokens, wide).to(rows.dtype)


class PermuteFunction(Function):
    """`permute` as autograd sees it."""

    reference = staticmethod(reference_permute)

    @staticmethod
    def forward(ctx: Context, x: Tensor, order: Order) -> Tensor:
        """x [t, h] -> [r, h]."""
        ctx.order = order
        return gather_rows(x, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, drows: Tensor) -> tuple[Tensor, None]:
        """[r, h] -> [t, h]."""
        return _add_rows(drows.contiguous(), ctx.order), None


class UnpermuteFunction(Function):
    """`unpermute` as autograd sees it."""

    reference = staticmethod(reference_unpermute)

    @staticmethod
    def forward(ctx: Context, rows: Tensor, order: Order) -> Tensor:
        """rows [r, h] -> [t, h]."""
        ctx.order = order
        return _add_rows(rows.contiguous(), order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None]:
        """[t, h] -> [r, h]."""
        return gather_rows(dy, ctx.order), None


# --- chunks: rows that arrive from several ranks


def expert_major(ranks: int, experts: int) -> list[int]:
    """Chunks that lie rank after rank, each rank's one for every expert, in the order expert after
    expert.

    >>> expert_major(ranks=2, experts=3)  # chunk 4 is the second rank's for its second expert
    [0, 3, 1, 4, 2, 5]
    """
    return [rank * experts + expert for expert in range(experts) for rank in range(ranks)]


def undone(sizes: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """What brings sorted chunks back: their sizes as they lie then, and the order.

    >>> undone([5, 6, 7], [2, 0, 1])
    ([7, 5, 6], [1, 2, 0])
    """
    return [sizes[chunk] for chunk in order], sorted(
        range(len(order)), key=lambda place: order[place]
    )


def sort_chunks(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Chunk `order[0]` first, and so on: rows [r, ...] in chunks of `sizes`, which add up to r ->
    [r, ...]."""
    y: Tensor = SortChunksFunction.apply(rows, sizes, order)  # type: ignore[no-untyped-call]  # torch's own
    return y


def reference_sort_chunks(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """What `sort_chunks` computes, in plain operations."""
    chunks = rows.split(list(sizes))
    return torch.cat([chunks[number] for number in order])


class SortChunksFunction(Function):
    """`sort_chunks` as autograd sees it: nothing is kept."""

    reference = staticmethod(reference_sort_chunks)

    @staticmethod
    def forward(ctx: Context, rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
        """[r, ...] -> [r, ...]."""
        ctx.back = undone(sizes, order)
        return reference_sort_chunks(rows, sizes, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None, None]:
        """[r, ...] -> [r, ...]."""
        return reference_sort_chunks(dy, *ctx.back), None, None
