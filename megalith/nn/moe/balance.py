"""Load balancing of experts: aux losses, and records of routing statistics per step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.config.moe import MoEConfig
from megalith.kernels.balance import (
    attach_aux_loss,
    count_choices,
    global_load_balancing_loss,
    load_balancing_loss,
    z_loss,
)
from megalith.kernels.routing import Choice, normalized_scores, top_k_indices
from megalith.kernels.tokens import AuxLossScale, PackedSeqParams
from megalith.parallel.group import all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import TPComm

LOSSES = ("sequence", "batch", "global_batch", "z")
"""The aux losses of a router: load-balancing losses over a sequence, a microbatch and the global
batch; z-loss."""

LOSS_COEFFS = ("sequence_coeff", "batch_coeff", "global_batch_coeff", "z_loss_coeff")
"""Fields of `AuxLossConfig`, in the order of `LOSSES`."""


@dataclass(slots=True)
class RoutingStats:
    """Routing statistics of a layer in a step, by microbatch. Recomputation overwrites them with
    equal values; evaluation does not change them."""

    counts: Tensor
    """float64 [microbatches, E]: local tokens routed to each expert, without padding and dropped
    choices."""

    chosen: Tensor
    """float64 [microbatches, E]: choices that the global-batch loss counts, over all ranks."""

    refused: Tensor
    """float64 [microbatches]: local choices that were dropped."""

    losses: Tensor
    """float64 [microbatches, kinds of loss]: the local part of each aux loss, without its
    coefficient."""

    offsets: Tensor
    """float64 [microbatches, E + 1]: logit offsets that would have balanced the experts, and 1 if
    there were tokens."""


class LoadBalancing:
    """Attaches the aux losses to the router weights and records routing statistics."""

    def __init__(self, moe: MoEConfig, tp_comm: TPComm, mesh: Mesh) -> None:
        self.moe, self.tp_comm = moe, tp_comm
        self.sharing, self.everyone = mesh.over("cp", "tp"), mesh.over("dp", "cp", "tp")
        self.weights = tuple(getattr(moe.aux_loss, name) for name in LOSS_COEFFS)
        self.record: RoutingStats | None = None

    def __call__(
        self, choice: Choice, asked: Tensor, logits: Tensor, tokens: PackedSeqParams
    ) -> Choice:
        """Return the choice with the aux losses attached to its weights. Collective over the ranks
        that share tokens.

        asked: int64 [t, k], the experts before token dropping.
        """
        share = tokens.balance
        if share is None:
            return choice
        record = self.stats_of_step(share, logits)
        valid, sequence = (
            self.tp_comm.select_local(tokens.valid),
            self.tp_comm.select_local(tokens.document_ids),
        )
        one, experts = torch.zeros_like(sequence), self.moe.num_experts
        with torch.no_grad():
            used = count_choices(choice.experts, one, valid, sequences=1, num_experts=experts)
            record.counts[share.microbatch] = used[0]
            record.refused[share.microbatch] = (valid.unsqueeze(1) & (choice.experts < 0)).sum()
        weights = choice.weights
        for kind, loss in self.losses(asked, logits, valid, sequence, tokens, record):
            with torch.no_grad():
                record.losses[share.microbatch, kind] = loss * share.part
            weights = attach_aux_loss(weights, loss, share.weight * self.weights[kind])
        return Choice(choice.experts, weights)

    def losses(
        self,
        asked: Tensor,
        logits: Tensor,
        valid: Tensor,
        sequence: Tensor,
        tokens: PackedSeqParams,
        record: RoutingStats,
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the index and the local part of every aux loss with a coefficient."""
        if not any(self.weights):
            return
        moe, by_sequence, by_batch, by_step, has_z_loss = (
            self.moe,
            *(weight > 0 for weight in self.weights),
        )
        shares = normalized_scores(logits, moe.router.score)
        counted = asked if moe.aux_loss.of_choices else top_k_indices(shares.detach(), moe.top_k)
        sequences = len(tokens.lengths)
        counts = count_choices(
            counted, sequence, valid, sequences=sequences, num_experts=moe.num_experts
        )
        counts = all_reduce_(counts, self.sharing)
        batch_counts = counts.sum(0, keepdim=True)
        if by_sequence:
            yield 0, load_balancing_loss(shares, counts, sequence, valid, top_k=moe.top_k)
        if by_batch:
            yield (
                1,
                load_balancing_loss(
                    shares, batch_counts, torch.zeros_like(sequence), valid, top_k=moe.top_k
                ),
            )
        if by_step:
            yield 2, self.global_loss(shares, batch_counts[0], valid, tokens, record)
        if has_z_loss:
            yield 3, z_loss(logits, batch_counts.sum() / moe.top_k, valid)

    def global_loss(
        self,
        shares: Tensor,
        counts: Tensor,
        valid: Tensor,
        tokens: PackedSeqParams,
        record: RoutingStats,
    ) -> Tensor:
        """Return the load-balancing loss over the step's microbatches up to this one, on all
        ranks."""
        assert tokens.balance is not None
        number = tokens.balance.microbatch
        global_counts = all_reduce_(
            counts / self.sharing.size, self.everyone
        )  # the ranks that share tokens have equal counts
        with torch.no_grad():
            record.chosen[number] = global_counts
        so_far = record.chosen[: number + 1].sum(0)
        return global_load_balancing_loss(shares, counts, so_far, valid, top_k=self.moe.top_k)

    def stats_of_step(self, share: AuxLossScale, like: Tensor) -> RoutingStats:
        """Return the record of this step's microbatches."""
        m, e = share.microbatches, self.moe.num_experts
        if (
            self.record is None
            or len(self.record.counts) != m
            or self.record.counts.device != like.device
        ):
            shapes = (m, e), (m, e), (m,), (m, len(LOSSES)), (m, e + 1)
            self.record = RoutingStats(
                *(torch.zeros(s, dtype=torch.float64, device=like.device) for s in shapes)
            )
        return self.record
