"""Which experts a token goes to, and with what weight: scores, choices, capacities. Plain
arithmetic on one rank."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.moe import Drop, RouterConfig, Score
from megalith.kernels.linear import (
    Context,
    GradAccumulator,
    SavedInputPlan,
    plan_saved_input,
    save,
    saved_input,
)
from megalith.kernels.rebuilt import LayerInput, output_tensor

NOWHERE = -1
"""The number of an expert that a token would have gone to, but was refused by."""

SINKHORN_TOLERANCE, SINKHORN_ROUNDS = 1e-4, 200
SINKHORN_LOOKS = 20
"""Rounds after which a host asks whether a plan has settled, and waits for a GPU; most do within
20."""

SMALL = -40.0
"""A logit from which on log(1 + exp(x)) is exp(x), in float64, too."""


class Choice(NamedTuple):
    """The experts that each token goes to: those chosen first stand first."""

    experts: Tensor
    """int64 [t, k], each expert of a token once; `NOWHERE` where it was refused."""

    weights: Tensor
    """[t, k]: what the expert's answer counts; 0 where it was refused."""


# --- logits


def gate(
    x: LayerInput,
    weight: Tensor,
    *,
    dtype: torch.dtype,
    grad_accumulator: GradAccumulator | None = None,
) -> Tensor:
    """How much each expert suits each token: x [t, h], weight [E, h] -> logits [t, E], computed in
    `dtype`.

    Backward keeps x and the weight as they are, and widens them once more.
    """
    logits: Tensor = GateFunction.apply(
        output_tensor(x), plan_saved_input(x, [weight]), grad_accumulator, dtype, weight
    )  # type: ignore[no-untyped-call]  # torch's own
    return logits


class GateFunction(Function):
    """`gate` as autograd sees it."""

    reference = staticmethod(
        lambda x, kept, grad_accumulator, dtype, weight: x.to(dtype) @ weight.to(dtype).t()
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        kept: SavedInputPlan,
        grad_accumulator: GradAccumulator | None,
        dtype: torch.dtype,
        weight: Tensor,
    ) -> Tensor:
        """x [t, h] -> [t, E]."""
        save(ctx, kept, x, [weight])
        ctx.grad_accumulator, ctx.dtype = grad_accumulator, dtype
        return x.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, E] -> dx [t, h], and the weight's gradient to the sink or to the weight."""
        weight, *inputs = ctx.saved_tensors
        dx = (dy @ weight.to(ctx.dtype)).to(weight.dtype) if ctx.needs_input_grad[0] else None
        x = saved_input(ctx, ctx.needs_input_grad[4:], tuple(inputs))
        if x is None:
            return dx, None, None, None, None
        dw = dy.t() @ x.to(ctx.dtype)
        if ctx.grad_accumulator is None:
            return dx, None, None, None, dw.to(weight.dtype)
        ctx.grad_accumulator.gradient(dw)
        return dx, None, None, None, None


# --- choice


def choose_experts(
    logits: Tensor,
    router: RouterConfig,
    top_k: int,
    bias: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
) -> Choice:
    """Each token's best `top_k` experts and their weights: logits [t, E] -> [t, k].

    For the choice alone `bias` [E] is added to scores, or logits less `offsets` [E] stand for them.
    Of equal experts the one of the lower number is chosen. Weights have the dtype of the logits;
    what lies between is fp32 or float64.
    """
    scores = score_experts(logits, router.score)
    order = scores if bias is None else scores + bias
    order = order if offsets is None else logits.to(offsets.dtype) - offsets
    experts = best(among_groups(order.detach(), router, top_k), top_k)
    return Choice(experts, weigh(logits, scores, experts, router))


def weigh(logits: Tensor, scores: Tensor, experts: Tensor, router: RouterConfig) -> Tensor:
    """What the answers of `experts` [t, k] count, whoever chose them: logits and scores [t, E] ->
    [t, k]."""
    if router.norm_topk_prob and router.score == "softmax":
        chosen = logits.gather(1, experts).to(scores.dtype).softmax(1)
    else:
        chosen = scores.gather(1, experts)
        chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20) if router.norm_topk_prob else chosen
    return (
        chosen if router.routed_scaling_factor == 1.0 else chosen * router.routed_scaling_factor
    ).to(logits.dtype)


def score_experts(logits: Tensor, score: Score) -> Tensor:
    """Scores [t, E] of logits [t, E], in fp32 or float64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if score == "sqrt_softplus":
        return log_of_scores(wide, score).exp()
    return wide.softmax(1) if score == "softmax" else wide.sigmoid()


def shares_of_one(logits: Tensor, score: Score) -> Tensor:
    """The same for balancing: scores that add up to 1 for each token, however small all of them
    are."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide if score == "softmax" else log_of_scores(wide, score)).softmax(1)


def log_of_scores(logits: Tensor, score: Score) -> Tensor:
    """Logarithms of scores that do not depend on one another: [t, E] -> [t, E]."""
    if score == "sigmoid":
        return torch.nn.functional.logsigmoid(logits)
    log: Tensor = LogRootSoftplusFunction.apply(logits)  # type: ignore[no-untyped-call]  # torch's own
    return log


def reference_log_root_softplus(x: Tensor) -> Tensor:
    """log √log(1 + exp(x)): half of x, where exp(x) is too small to be told from log(1 +
    exp(x))."""
    return torch.where(x > SMALL, torch.nn.functional.softplus(x.clamp(min=SMALL)).log(), x) / 2


class LogRootSoftplusFunction(Function):
    """`reference_log_root_softplus`, of which backward keeps x alone."""

    reference = staticmethod(reference_log_root_softplus)

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        """x, of any shape."""
        ctx.save_for_backward(x)
        return reference_log_root_softplus(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> Tensor:
        """Half of sigmoid(x) / softplus(x) each, which goes to 1/2 for small x."""
        (x,) = ctx.saved_tensors
        near = x.clamp(min=SMALL)
        return (
            dy
            * torch.where(x > SMALL, near.sigmoid() / torch.nn.functional.softplus(near), 1.0)
            / 2
        )


def best(scores: Tensor, count: int) -> Tensor:
    """The places of the largest `count` scores of each row, largest first: [t, E] -> int64 [t,
    count].

    Of equal ones the first stands first; top-k of torch promises no order among them.
    """
    # Contiguous, because backward keeps choices, and with a part of the order the whole of it.
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count].contiguous()


def among_groups(scores: Tensor, router: RouterConfig, top_k: int) -> Tensor:
    """Scores [t, E] with -inf outside each token's best groups."""
    if router.num_groups is None or router.topk_groups is None:
        return scores
    inside = scores.view(len(scores), router.num_groups, -1)
    if router.group_score == "max":
        of_groups = inside.amax(2)
    else:
        of_groups = inside.topk(top_k // router.topk_groups, dim=2).values.sum(2)
    chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(
        1, best(of_groups, router.topk_groups), True
    )
    return inside.masked_fill(~chosen.unsqueeze(2), -math.inf).flatten(1)


def sinkhorn(logits: Tensor, total: Callable[[Tensor], Tensor], *, tokens: int) -> Tensor:
    """A plan [t, E] near exp(logits) by which all experts get equally much of all `tokens`.

    `total` adds what ranks have that share the tokens. Stays as it is once the experts' factors
    move by less than 1e-4 on average, or are no numbers. Source: Sinkhorn and Knopp 1967; Clark et
    al. 2022, arXiv:2202.01169.
    """
    wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    plan = torch.exp(wide - wide.amax(1, keepdim=True))  # a factor per token changes nothing
    of_experts, of_tokens = plan.new_ones(plan.shape[1]), plan.new_ones(len(plan))
    going_on = torch.ones((), dtype=torch.bool, device=plan.device)
    for number in range(1, SINKHORN_ROUNDS + 1):
        fresh = 1 / tokens / ((plan * of_experts).sum(1) + 1e-8)
        settled = 1 / plan.shape[1] / (total((plan * fresh[:, None]).sum(0)) + 1e-8)
        moved = (settled - of_experts).abs().mean()
        of_tokens, of_experts = (
            fresh.where(going_on, of_tokens),
            settled.where(going_on, of_experts),
        )
        going_on = going_on & (moved > SINKHORN_TOLERANCE)
        if number % SINKHORN_LOOKS == 0 and not going_on:
            break
    return plan * of_experts * of_tokens[:, None]


def balancing_offsets(logits: Tensor, offsets: Tensor, valid: Tensor, top_k: int) -> Tensor:
    """What to take from the logits of each expert, so that all get equally many of these tokens:
    [t, E] -> [E].

    offsets [E]: those of now. A token wants an expert by how far its logit lies above the token's
    best that is not chosen; the new offset of an expert is what K n / E of the n `valid` tokens
    (bool [t]) want it by more than.
    """
    wide = logits.to(offsets.dtype)
    next_best = (wide - offsets).topk(top_k + 1, dim=1).values[:, -1:]
    wants = (
        (wide - next_best)
        .masked_fill(~valid.unsqueeze(1), -math.inf)
        .sort(dim=0, descending=True)
        .values
    )
    seats = valid.sum() * top_k // logits.shape[1]
    return wants.index_select(0, seats.view(1).clamp(max=len(wants) - 1)).squeeze(0)


# --- capacity


def refuse_surplus(
    choice: Choice, capacity: int, drop: Drop, *, num_experts: int, order: Tensor | None = None
) -> Tensor:
    """Which choices [t, k] their experts take, bool: no expert takes more than `capacity`.

    drop: those of least weight are refused, or those of the last tokens; `order` int64 [t] is each
    token's place then, unless they stand in order. Of weights that are equal, but for roundings,
    the later token is taken.
    """
    t, k = choice.experts.shape
    places = torch.arange(t, device=choice.experts.device) if order is None else order
    first = places.repeat_interleave(k).argsort(stable=True)
    if drop == "least":
        first = first.flip(0)
        first = first[
            coarse(choice.weights.detach()).flatten()[first].argsort(descending=True, stable=True)
        ]
    of_expert = choice.experts.flatten()[first]
    by_expert = of_expert.argsort(stable=True)
    counts = (
        torch.zeros_like(of_expert[:1])
        .repeat(num_experts)
        .scatter_add_(0, of_expert, torch.ones_like(of_expert))
    )
    starts = counts.cumsum(0) - counts
    seats = torch.arange(t * k, device=places.device) - starts[of_expert[by_expert]]
    taken = torch.zeros(t * k, dtype=torch.bool, device=places.device)
    taken[first[by_expert]] = seats < capacity
    return taken.view(t, k)


def coarse(weights: Tensor) -> Tensor:
    """Weights with fewer digits: float64 as fp32, fp32 with 16 significant bits, others as they
    are.

    PackedSeqParams that begin documents alike weigh alike, and layouts round them differently:
    these digits must not say who gets the last seat.
    """
    if weights.dtype == torch.float64:
        return weights.float()
    if weights.dtype != torch.float32:
        return weights
    return ((weights.view(torch.int32) + 128) >> 8 << 8).view(torch.float32)


def without(choice: Choice, taken: Tensor) -> Choice:
    """The choices that are `taken`, bool [t, k]; the weights of those left are not made larger."""
    return Choice(choice.experts.where(taken, NOWHERE), choice.weights * taken)


def capacity_of(factor: float, tokens: int, top_k: int, experts: int) -> int:
    """PackedSeqParams that an expert takes of a microbatch: at most all of them."""
    return min(
        tokens, math.ceil(Fraction(str(factor)) * tokens * top_k / experts)
    )  # 1.1 · 100 is 110, not a bit more
