"""Auxiliary (aux) losses that balance the load of experts, and `attach_aux_loss`, which adds their
gradients to the graph.

Token counts per expert have no gradient, so each rank computes the part of a loss of its own tokens
from counts that were summed over ranks; no gradient is communicated.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import Context


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
