"""Training losses: LM and MTP losses of every head, normalized by the global number of labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalith.config.train import TrainRun
from megalith.kernels.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    recomputed_cross_entropy,
    recomputed_cross_entropy_with_stats,
)
from megalith.kernels.logit_stats import LossWithLogitStats
from megalith.parallel.autograd import mark_partial
from megalith.parallel.group import all_reduce_max_
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import VocabParallelHead


def compute_head_losses(run: TrainRun) -> Callable[..., Tensor]:
    """Return the loss function of the heads; it records logit statistics if the run logs them."""
    train = run.train
    loss_kwargs: dict[str, Any] = (
        {"smoothing": train.label_smoothing} if train.label_smoothing else {}
    )  # Any: keyword arguments
    loss_kwargs |= {} if train.loss_chunk is None else {"chunk": train.loss_chunk}
    recomputes = train.loss_backward == "recomputed"
    if logs_logit_stats(run):
        return LossWithLogitStats(
            partial(
                recomputed_cross_entropy_with_stats
                if recomputes
                else linear_cross_entropy_with_stats,
                **loss_kwargs,
            ),
            train.z_loss,
        )
    loss_fn = recomputed_cross_entropy if recomputes else linear_cross_entropy
    return partial(loss_fn, **loss_kwargs) if loss_kwargs else loss_fn


def logs_logit_stats(run: TrainRun) -> bool:
    """Return whether the run logs the z-loss and the largest logit."""
    return run.train.z_loss > 0 or run.observe.max_logit


@dataclass(frozen=True, slots=True)
class StepLogitStats:
    """Logit statistics of all heads in a step."""

    z: Tensor
    """float64 [1 + depths]: this rank's sums of z_loss * logsumexp^2; 0 where there is no loss."""

    largest: Tensor
    """float64 [1]: largest logit of the main head, over all ranks; -inf without labels."""


def collect_logit_stats(
    heads: Sequence[VocabParallelHead], mesh: Mesh, *, depths: int, device: torch.device
) -> StepLogitStats:
    """Return the logit statistics of this rank's heads (the main head first) and reset them.

    Collective: one small all-reduce.
    """
    z = torch.zeros(1 + depths, dtype=torch.float64, device=device)
    largest = torch.full((1,), float("-inf"), dtype=torch.float64, device=device)
    for number, head in enumerate(heads):
        assert isinstance(head.summed_loss, LossWithLogitStats)
        z_loss, max_logit = head.summed_loss.seen.taken()
        if z_loss is not None and max_logit is not None:
            z[number] = z_loss
            largest = max_logit.unsqueeze(0) if number == 0 else largest
    return StepLogitStats(z, all_reduce_max_(largest, mesh.world))


def normalize_loss_by_labels(
    loss: Tensor, *, num_labels: int, mesh: Mesh, scale: float = 1.0
) -> Tensor:
    """Return this microbatch's part of the mean loss over the global batch, which backward starts
    from.

    loss: sum over the labels of the microbatch. num_labels: labels of the global batch, over all
    ranks. The parts of all microbatches and of all dp and cp ranks sum to the mean, so gradients
    are summed over these ranks, not averaged. scale: the loss scale of fp16; the gradients are
    divided by it before use.
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
    """Return the same with the MTP losses: the mean of the depths' means is multiplied by `weight`.

    losses, num_labels: of the next token, then of each MTP depth, which is divided by its own
    labels.
    """
    main_loss, *mtp_losses = losses
    mean = main_loss / max(1, num_labels[0])
    for loss, count in zip(mtp_losses, num_labels[1:], strict=True):
        mean = mean + loss * (weight / len(mtp_losses) / max(1, count))
    return normalize_loss_by_labels(mean, num_labels=1, mesh=mesh, scale=scale)
