"""One optimizer update: microbatches forward and backward, gradients summed, clipped, applied."""

import math
from dataclasses import dataclass

import torch

from megalith.data.loader import StepBatches
from megalith.errors import DataError
from megalith.optim.clip import clip_factor, global_norm
from megalith.parallel.group import all_reduce_
from megalith.train.build import Trainer
from megalith.train.loss import share_of_mean


@dataclass(frozen=True, slots=True)
class StepResult:
    """What happened in one step, the same on every rank."""

    loss: float
    """Mean of -log p(label) over the global batch, before the update."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping."""

    updated: bool
    """False when the norm was not finite: nothing changed."""

    stop: bool
    """Some rank was asked to stop."""


def train_step(
    trainer: Trainer, batches: StepBatches, *, lr: float, weight_decay: float, stop: bool = False
) -> StepResult:
    """Run one step. Collective over the whole mesh; the host waits for the device once, at the end.

    Raises:
        DataError: the gradient norm is not finite and optim.nonfinite_grad is `raise`.
    """
    data, mesh = trainer.data, trainer.mesh
    data.begin_step(len(batches.microbatches))
    total = torch.zeros((), dtype=torch.float64, device=trainer.device)
    for batch in batches.microbatches:
        loss = trainer.model.loss(batch.ids, batch.labels, batch.tokens)
        share_of_mean(loss, num_labels=batches.num_labels, mesh=mesh).backward()
        total += loss.detach()
    owned = data.finish()
    norm = global_norm([(o.shard, o.gradient) for o in owned], mesh)
    # The loss is the same on every tensor-parallel rank, so the first of them speaks for all.
    news = torch.stack([total if mesh.tp.rank == 0 else torch.zeros_like(total), total.new_tensor(float(stop)), norm])
    all_reduce_(news[:2], mesh.world)
    loss_sum, stopping, grad_norm = news.tolist()
    finite = math.isfinite(grad_norm)
    if finite:
        trainer.optimizer.step(
            [o.gradient for o in owned], lr=lr, weight_decay=weight_decay,
            scale=clip_factor(norm, trainer.run.optim.clip_grad),
        )  # fmt: skip
        data.publish()
    elif trainer.run.optim.nonfinite_grad == "raise":
        raise DataError(
            f"gradient norm {grad_norm}: not finite in {nonfinite_names(trainer)} on rank {mesh.rank}. Reduce "
            f"schedule.lr, check the data, or set optim.nonfinite_grad=skip."
        )
    return StepResult(loss_sum / max(1, batches.num_labels), grad_norm, finite, stopping > 0)


def nonfinite_names(trainer: Trainer) -> str:
    """The first few parameters of this rank whose gradient is not finite."""
    bad = [o.shard.name for o in trainer.data.owned if not bool(torch.isfinite(o.gradient).all())]
    return ", ".join(bad[:5]) or "another rank's slices, none"
