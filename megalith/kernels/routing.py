"""Expert routing on one rank: scores, top-k choice, weights, expert capacity (token
dropping), aux losses, and the permutation of tokens to experts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.moe import RouterConfig, RouterScore, TokenDropPolicy
from megalith.kernels.linear import Context

DROPPED_CHOICE = -1
"""Expert index of a choice that was dropped."""

SINKHORN_TOLERANCE, SINKHORN_ROUNDS = 1e-4, 200
SINKHORN_LOOKS = 20
"""Rounds between checks for convergence on the host, which synchronize with the GPU; most plans
converge within 20."""

SOFTPLUS_IS_EXP_BELOW = -40.0
"""Logit below which log(1 + exp(x)) equals exp(x), also in float64."""


class Choice(NamedTuple):
    """The experts chosen for each token, in the order of choice, and their weights."""

    experts: Tensor
    """int64 [t, k], distinct experts of each token; `DROPPED_CHOICE` for dropped choices."""

    weights: Tensor
    """[t, k]: weight of each expert's output; 0 where the choice was dropped."""


# --- choice


def choose_experts(
    logits: Tensor,
    router: RouterConfig,
    top_k: int,
    bias: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
) -> Choice:
    """Choose each token's `top_k` experts and their weights: logits [t, E] -> [t, k].

    Only the choice uses `bias` [E] (the expert bias), added to the scores, or `offsets` [E],
    subtracted from the logits. Of equal experts the one with the lower index is chosen. Weights
    have the dtype of the logits; intermediates are fp32 or float64.
    """
    scores = score_experts(logits, router.score)
    order = scores if bias is None else scores + bias
    order = order if offsets is None else logits.to(offsets.dtype) - offsets
    experts = top_k_indices(mask_other_groups(order.detach(), router, top_k), top_k)
    return Choice(experts, expert_weights(logits, scores, experts, router))


def expert_weights(logits: Tensor, scores: Tensor, experts: Tensor, router: RouterConfig) -> Tensor:
    """Return the weights of the outputs of `experts` [t, k]: logits and scores [t, E] -> [t, k]."""
    if router.norm_topk_prob and router.score == "softmax":
        chosen = logits.gather(1, experts).to(scores.dtype).softmax(1)
    else:
        chosen = scores.gather(1, experts)
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20) if router.norm_topk_prob else chosen
    return (
        chosen if router.routed_scaling_factor == 1.0 else chosen * router.routed_scaling_factor
    ).to(logits.dtype)


def score_experts(logits: Tensor, score: RouterScore) -> Tensor:
    """Return the scores [t, E] of logits [t, E], in fp32 or float64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if score == "sqrt_softplus":
        return log_scores(wide, score).exp()
    return wide.softmax(1) if score == "softmax" else wide.sigmoid()


def normalized_scores(logits: Tensor, score: RouterScore) -> Tensor:
    """Return the scores normalized to a sum of 1 per token for aux losses, also if all of them are
    tiny."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide if score == "softmax" else log_scores(wide, score)).softmax(1)


def log_scores(logits: Tensor, score: RouterScore) -> Tensor:
    """Return the logarithm of sigmoid or sqrt_softplus scores: [t, E] -> [t, E]."""
    if score == "sigmoid":
        return torch.nn.functional.logsigmoid(logits)
    log: Tensor = LogRootSoftplusFunction.apply(logits)  # type: ignore[no-untyped-call]  # torch's own
    return log


def reference_log_root_softplus(x: Tensor) -> Tensor:
    """Return log √log(1 + exp(x)); x / 2 where exp(x) and log(1 + exp(x)) round to the same
    value."""
    return (
        torch.where(
            x > SOFTPLUS_IS_EXP_BELOW,
            torch.nn.functional.softplus(x.clamp(min=SOFTPLUS_IS_EXP_BELOW)).log(),
            x,
        )
        / 2
    )


class LogRootSoftplusFunction(Function):
    """Autograd function of `reference_log_root_softplus`; saves x only."""

    reference = staticmethod(reference_log_root_softplus)

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """x, of any shape."""
        ctx.save_for_backward(x)
        return reference_log_root_softplus(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> Tensor:
        """dy * sigmoid(x) / softplus(x) / 2; the factor tends to 1/2 for small x."""
        (x,) = ctx.saved_tensors
        near = x.clamp(min=SOFTPLUS_IS_EXP_BELOW)
        return (
            dy
            * torch.where(
                x > SOFTPLUS_IS_EXP_BELOW, near.sigmoid() / torch.nn.functional.softplus(near), 1.0
            )
            / 2
        )


def top_k_indices(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest scores of each row, largest first: [t, E] -> int64
    [t, count].

    Of equal scores the first comes first; torch.topk does not guarantee an order.
    """
    # Contiguous, because backward saves the choices, and a view would keep the full order alive.
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()


def mask_other_groups(scores: Tensor, router: RouterConfig, top_k: int) -> Tensor:
    """Return scores [t, E] with -inf outside each token's best expert groups."""
    if router.num_groups is None or router.topk_groups is None:
        return scores
    grouped_scores = scores.view(len(scores), router.num_groups, -1)
    if router.group_score == "max":
        group_scores = grouped_scores.amax(2)
    else:
        group_scores = grouped_scores.topk(top_k // router.topk_groups, dim=2).values.sum(2)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(
        1, top_k_indices(group_scores, router.topk_groups), True
    )
    return grouped_scores.masked_fill(~chosen.unsqueeze(2), -math.inf).flatten(1)


def sinkhorn(logits: Tensor, total: Callable[[Tensor], Tensor], *, tokens: int) -> Tensor:
    """Return a transport plan [t, E] close to exp(logits) in which all experts have equal shares of
    all `tokens`.

    `total` sums over the ranks that share the tokens. Iterates until the experts' factors change by
    less than 1e-4 on average, or are NaN. Source: Sinkhorn and Knopp 1967; Clark et al. 2022,
    arXiv:2202.01169.
    """
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    # Subtracting each token's maximum scales its row, which does not change the result.
    plan = torch.exp(wide - wide.amax(1, keepdim=True))
    expert_factors, token_factors = plan.new_ones(plan.shape[1]), plan.new_ones(len(plan))
    is_active = torch.ones((), dtype=torch.bool, device=plan.device)
    for round_number in range(1, SINKHORN_ROUNDS + 1):
        new_token_factors = 1 / tokens / ((plan * expert_factors).sum(1) + 1e-8)
        new_expert_factors = (
            1 / plan.shape[1] / (total((plan * new_token_factors[:, None]).sum(0)) + 1e-8)
        )
        mean_change = (new_expert_factors - expert_factors).abs().mean()
        token_factors, expert_factors = (
            new_token_factors.where(is_active, token_factors),
            new_expert_factors.where(is_active, expert_factors),
        )
        is_active = is_active & (mean_change > SINKHORN_TOLERANCE)
        if round_number % SINKHORN_LOOKS == 0 and not is_active:
            break
    return plan * expert_factors * token_factors[:, None]


def balancing_offsets(logits: Tensor, offsets: Tensor, valid: Tensor, top_k: int) -> Tensor:
    """Return the offsets of the experts' logits that balance the load for these tokens: [t, E] ->
    [E].

    offsets [E]: the current ones. A token's demand for an expert is its logit minus the token's
    best logit that is not chosen; an expert's new offset is the demand that K n / E of the n
    `valid` tokens (bool [t]) exceed.
    """
    wide = logits.to(offsets.dtype)
    next_best = (wide - offsets).topk(top_k + 1, dim=1).values[:, -1:]
    demand = (
        (wide - next_best)
        .masked_fill(~valid.unsqueeze(1), -math.inf)
        .sort(dim=0, descending=True)
        .values
    )
    capacity = valid.sum() * top_k // logits.shape[1]
    return demand.index_select(0, capacity.view(1).clamp(max=len(demand) - 1)).squeeze(0)


# --- capacity


def select_within_capacity(
    choice: Choice,
    capacity: int,
    drop: TokenDropPolicy,
    *,
    num_experts: int,
    order: Tensor | None = None,
) -> Tensor:
    """Return which choices [t, k] remain under the expert capacity, bool: each expert keeps at most
    `capacity`.

    drop: choices of least weight are dropped, or those of the last tokens; `order` int64 [t] is
    each token's place, unless tokens are in order. Of weights that are equal up to rounding, the
    later token's is kept.
    """
    t, k = choice.experts.shape
    positions = torch.arange(t, device=choice.experts.device) if order is None else order
    order_of_choices = positions.repeat_interleave(k).argsort(stable=True)
    if drop == "least":
        order_of_choices = order_of_choices.flip(0)
        order_of_choices = order_of_choices[
            round_weights(choice.weights.detach())
            .flatten()[order_of_choices]
            .argsort(descending=True, stable=True)
        ]
    expert_by_order = choice.experts.flatten()[order_of_choices]
    by_expert = expert_by_order.argsort(stable=True)
    counts = (
        torch.zeros_like(expert_by_order[:1])
        .repeat(num_experts)
        .scatter_add_(0, expert_by_order, torch.ones_like(expert_by_order))
    )
    starts = counts.cumsum(0) - counts
    rank_in_expert = (
        torch.arange(t * k, device=positions.device) - starts[expert_by_order[by_expert]]
    )
    kept = torch.zeros(t * k, dtype=torch.bool, device=positions.device)
    kept[order_of_choices[by_expert]] = rank_in_expert < capacity
    return kept.view(t, k)


def round_weights(weights: Tensor) -> Tensor:
    """Round weights: float64 to fp32, fp32 to 16 significant bits, others unchanged.

    Tokens at equal document starts have equal weights, which parallel layouts round differently;
    the low digits must not decide which choice is dropped.
    """
    if weights.dtype == torch.float64:
        return weights.float()
    if weights.dtype != torch.float32:
        return weights
    return ((weights.view(torch.int32) + 128) >> 8 << 8).view(torch.float32)


def drop_choices(choice: Choice, kept: Tensor) -> Choice:
    """Return the choices with those dropped that are not `kept`, bool [t, k]; the other weights
    are not renormalized."""
    return Choice(choice.experts.where(kept, DROPPED_CHOICE), choice.weights * kept)


def expert_capacity(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """Return the expert capacity: the number of tokens that an expert processes of a microbatch, at
    most all."""
    # 1.1 · 100 is exactly 110
    return min(tokens, math.ceil(Fraction(str(factor)) * tokens * top_k / experts))


# --- auxiliary (aux) losses that balance the load of experts, and `attach_aux_loss`, which adds
# their gradients to the graph
#
# Token counts per expert have no gradient, so each rank computes the part of a loss of its own
# tokens from counts that were summed over ranks; no gradient is communicated.


def count_choices(
    experts: Tensor, sequence: Tensor, valid: Tensor, *, sequences: int, num_experts: int
) -> Tensor:
    """Count the tokens of each sequence that were routed to each expert: experts int64 [t, k] ->
    float64 [sequences, E].

    sequence [t]: the sequence of each token. Padding (valid [t] is False) and dropped choices do
    not count.
    """
    indices = sequence.long().unsqueeze(1) * num_experts + experts.clamp(min=0)
    ones = (valid.unsqueeze(1) & (experts >= 0)).double()
    counts = ones.new_zeros(sequences * num_experts).scatter_add_(
        0, indices.flatten(), ones.flatten()
    )
    return counts.view(sequences, num_experts)


def load_balancing_loss(
    shares: Tensor, counts: Tensor, sequence: Tensor, valid: Tensor, *, top_k: int
) -> Tensor:
    """Return the local tokens' part of the load-balancing loss E / (K n²) Σ_i f_i Σ_t s_ti,
    averaged over sequences: scores s [t, E] -> scalar.

    counts f [sequences, E]: summed over all ranks that share the sequences; n: tokens of a
    sequence. The loss is 1 for perfect balance. Source: Fedus et al. 2021, arXiv:2101.03961,
    section 2.2.
    """
    tokens = counts.sum(1, keepdim=True) / top_k
    num_sequences = (tokens > 0).sum()
    factors = (
        counts
        * (counts.shape[1] / top_k)
        / (tokens.clamp(min=1).square() * num_sequences.clamp(min=1))
    )
    return _weighted(shares, factors.to(shares.dtype)[sequence.long()], valid)


def global_load_balancing_loss(
    shares: Tensor, counts: Tensor, so_far: Tensor, valid: Tensor, *, top_k: int
) -> Tensor:
    """Return the local tokens' part of the load-balancing loss over the global batch so far: scores
    [t, E] -> scalar.

    counts [E]: of this microbatch; so_far [E]: of this and the earlier microbatches of the step;
    both over all ranks. Source: Qiu et al. 2025, arXiv:2501.11873.
    """
    tokens, seen = (total.sum().clamp(min=1) / top_k for total in (counts, so_far))
    factors = so_far * (len(counts) / top_k) / (tokens * seen)
    return _weighted(shares, factors.to(shares.dtype), valid)


def z_loss(logits: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
    """Return the local tokens' part of the router z-loss, the mean of (log Σ_i exp(logit_i))² over
    `tokens` (a scalar): logits [t, E] -> scalar.

    Source: Zoph et al. 2022, arXiv:2202.08906, section 3.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide.logsumexp(1).square() * valid).sum() / tokens.clamp(min=1)


def _weighted(shares: Tensor, factors: Tensor, valid: Tensor) -> Tensor:
    return ((shares * factors).sum(1) * valid).sum()


def attach_aux_loss(x: Tensor, loss: Tensor, weight: float) -> Tensor:
    """Return x; backward also flows into `loss` (a scalar), as if weight * loss had been added to
    the training loss."""
    y: Tensor = AttachAuxLossFunction.apply(x, loss, weight)  # type: ignore[no-untyped-call]  # torch's own
    return y


class AttachAuxLossFunction(Function):
    """Autograd function of `attach_aux_loss`."""

    reference = staticmethod(lambda x, loss, weight: x)

    @staticmethod
    def forward(ctx: Context, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        """x, unchanged."""
        ctx.weight, ctx.dtype, ctx.device = weight, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return dy, and the gradient of the loss."""
        return dy, torch.full((), ctx.weight, dtype=ctx.dtype, device=ctx.device), None


# --- permutation of tokens to rows sorted by expert, and back: index arithmetic first, then moves
# of tensors
#
# Rows are gathered, and a token's rows are added one after another in the order of its choices: the
# result does not depend on thread scheduling. The backward of either move is the other one.

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
    # Index t k, which is no choice, marks padding rows.
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


def _sum_rows_by_token(rows: Tensor, order: RowPermutation) -> Tensor:
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
        return _sum_rows_by_token(drows.contiguous(), ctx.order), None


class UnpermuteFunction(Function):
    """Autograd function of `unpermute`."""

    reference = staticmethod(reference_unpermute)

    @staticmethod
    def forward(ctx: Context, rows: Tensor, order: RowPermutation) -> Tensor:
        """rows [r, h] -> [t, h]."""
        ctx.order = order
        return _sum_rows_by_token(rows.contiguous(), order)

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

    >>> invert_chunk_order([5, 6, 7], [2, 0, 1])
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
