"""What is minimized: the loss of every head; the one place where losses are scaled, and where
those of ranks are said to be parts of one sum."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial as with_arguments
from typing import Any

import torch
from torch import Tensor

from megalith.config.train import TrainRun
from megalith.kernels.cross_entropy import (
    linear_cross_entropy,
    measured_cross_entropy,
    recomputed_cross_entropy,
    recomputed_measures,
)
from megalith.kernels.watched_loss import LossWithLogitStats
from megalith.parallel.autograd import mark_partial
from megalith.parallel.group import all_reduce_max_
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import VocabHead


def compute_head_losses(run: TrainRun) -> Callable[..., Tensor]:
    """What a head minimizes. One that is to tell of its scores notes them in a record of its
    own."""
    train = run.train
    words: dict[str, Any] = (
        {"smoothing": train.label_smoothing} if train.label_smoothing else {}
    )  # Any: by name
    words |= {} if train.loss_chunk is None else {"chunk": train.loss_chunk}
    again = train.loss_backward == "recomputed"
    if logs_logit_stats(run):
        return LossWithLogitStats(
            with_arguments(recomputed_measures if again else measured_cross_entropy, **words),
            train.z_loss,
        )
    plain = recomputed_cross_entropy if again else linear_cross_entropy
    return with_arguments(plain, **words) if words else plain


def logs_logit_stats(run: TrainRun) -> bool:
    """Whether a run writes how large scores are."""
    return run.train.z_loss > 0 or run.observe.max_logit


@dataclass(frozen=True, slots=True)
class StepLogitStats:
    """What all heads saw in a step."""

    z: Tensor
    """float64 [1 + depths]: this rank's sums of z_loss * logsumexp^2; 0 where there is no loss."""

    largest: Tensor
    """float64 [1]: the largest score of the next token, over all ranks; -inf without labels."""


def collect_logit_stats(
    heads: Sequence[VocabHead], mesh: Mesh, *, depths: int, device: torch.device
) -> StepLogitStats:
    """What the heads of this rank, the model's first, saw since they were last asked. Collective;
    one small message."""
    z = torch.zeros(1 + depths, dtype=torch.float64, device=device)
    largest = torch.full((1,), float("-inf"), dtype=torch.float64, device=device)
    for number, head in enumerate(heads):
        assert isinstance(head.summed_loss, LossWithLogitStats)
        cost, most = head.summed_loss.seen.taken()
        if cost is not None and most is not None:
            z[number] = cost
            largest = most.unsqueeze(0) if number == 0 else largest
    return StepLogitStats(z, all_reduce_max_(largest, mesh.world))


def normalize_loss_by_labels(
    loss: Tensor, *, num_labels: int, mesh: Mesh, scale: float = 1.0
) -> Tensor:
    """My part of the mean loss over the global batch: what backward starts from.

    loss: the sum over the labels of my microbatch; num_labels: those that count in the global
    batch, over all ranks. The parts of all microbatches and of all dp and cp ranks add up to the
    mean, so gradients are summed over those ranks and never averaged. scale: of fp16, which the
    gradients are divided by before they are used.
    """
    share = loss / max(1, num_labels)
    return mark_partial(share if scale == 1.0 else share * scale, mesh.dp_cp)


def normalize_losses_by_labels(
    losses: Sequence[Tensor],
    *,
    num_labels: Sequence[int],
    weight: float,
    mesh: Mesh,
    scale: float = 1.0,
) -> Tensor:
    """The same where losses of MTP depths follow: the mean of their means counts `weight`
    times.

    losses, num_labels: of the next token, then of each depth, which has labels of its own to be
    divided by.
    """
    own, *mtp_inputs = losses
    mean = own / max(1, num_labels[0])
    for loss, count in zip(mtp_inputs, num_labels[1:], strict=True):
        mean = mean + loss * (weight / len(mtp_inputs) / max(1, count))
    return normalize_loss_by_labels(mean, num_labels=1, mesh=mesh, scale=scale)
