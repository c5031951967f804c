"""Losses that keep experts equally busy, and how they enter a graph: beside the activations, not
through the end.

Counts of tokens per expert carry no gradient; so each rank computes its own tokens' part of a loss
from counts that were summed over ranks, and no gradient crosses between them.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import Context


def count_choices(
    experts: Tensor, sequence: Tensor, valid: Tensor, *, sequences: int, num_experts: int
) -> Tensor:
    """How many tokens of each sequence go to each expert: experts int64 [t, k] -> float64
    [sequences, E].

    sequence [t]: which one a token belongs to. Padding (valid [t] is False) and refused choices do
    not count.
    """
    places = sequence.long().unsqueeze(1) * num_experts + experts.clamp(min=0)
    ones = (valid.unsqueeze(1) & (experts >= 0)).double()
    counts = ones.new_zeros(sequences * num_experts).scatter_add_(
        0, places.flatten(), ones.flatten()
    )
    return counts.view(sequences, num_experts)


def balance_loss(
    shares: Tensor, counts: Tensor, sequence: Tensor, valid: Tensor, *, top_k: int
) -> Tensor:
    """My tokens' part of E / (K n²) Σ_i f_i Σ_t s_ti, meant over the sequences: shares s [t, E] ->
    scalar.

    counts f [sequences, E]: over all ranks that share the sequences; n: tokens of a sequence. 1
    when experts are equally busy. Source: Fedus et al. 2021, arXiv:2101.03961, section 2.2.
    """
    tokens = counts.sum(1, keepdim=True) / top_k
    there = (tokens > 0).sum()
    factors = (
        counts * (counts.shape[1] / top_k) / (tokens.clamp(min=1).square() * there.clamp(min=1))
    )
    return _weighted(shares, factors.to(shares.dtype)[sequence.long()], valid)


def global_balance_loss(
    shares: Tensor, counts: Tensor, so_far: Tensor, valid: Tensor, *, top_k: int
) -> Tensor:
    """The same with f of the step so far: counts [E] of this microbatch, so_far [E] with those
    before it, of all ranks.

    Source: Qiu et al. 2025, arXiv:2501.11873.
    """
    tokens, seen = (total.sum().clamp(min=1) / top_k for total in (counts, so_far))
    factors = so_far * (len(counts) / top_k) / (tokens * seen)
    return _weighted(shares, factors.to(shares.dtype), valid)


def z_loss(logits: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
    """My tokens' part of the mean of (log Σ_i exp(logit_i))² over `tokens`, a scalar: logits [t, E]
    -> scalar.

    Source: Zoph et al. 2022, arXiv:2202.08906, section 3.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (wide.logsumexp(1).square() * valid).sum() / tokens.clamp(min=1)


def _weighted(shares: Tensor, factors: Tensor, valid: Tensor) -> Tensor:
    return ((shares * factors).sum(1) * valid).sum()


def attach(x: Tensor, loss: Tensor, weight: float) -> Tensor:
    """x as it is; backward goes into `loss` (a scalar) as well, as if weight * loss had been added
    at the end."""
    y: Tensor = Attach.apply(x, loss, weight)  # type: ignore[no-untyped-call]  # torch's own
    return y


class Attach(Function):
    """`attach` as autograd sees it."""

    reference = staticmethod(lambda x, loss, weight: x)

    @staticmethod
    def forward(ctx: Context, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        """x, unchanged."""
        ctx.weight, ctx.dtype, ctx.device = weight, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """dy, and what the loss gets."""
        return dy, torch.full((), ctx.weight, dtype=ctx.dtype, device=ctx.device), None
