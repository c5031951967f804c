"""One optimizer update: microbatches forward and backward, gradients summed, clipped, applied."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalith.data.loader import StepBatches
from megalith.errors import DataError
from megalith.optim.clip import clip_factor, counted, num_zeros, sum_of_squares
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.parallel.engine import ShardedParam
from megalith.parallel.group import all_reduce_, gather_objects
from megalith.parallel.tensor import heads_of
from megalith.train.build import Trainer
from megalith.train.experts import move_balancing_biases, move_balancing_offsets
from megalith.train.loss import (
    StepLogitStats,
    collect_logit_stats,
    logs_logit_stats,
    normalize_losses_by_labels,
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What happened in one step, the same on every rank."""

    loss: float
    """Mean of -log p(label) over the global batch, before the update."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping, without the loss scale."""

    updated: bool
    """False when the norm was not finite, or no label counted: nothing changed."""

    stop: bool
    """Some rank was asked to stop."""

    num_zeros: int | None = None
    """Elements of the gradient that were zero; None unless optim.count_zeros."""

    mtp_losses: tuple[float, ...] = ()
    """The mean of every MTP depth."""

    z_loss: float | None = None
    """Mean over labels of train.z_loss * logsumexp^2, which is no part of `loss`; None unless
    scores are told of."""

    max_logit: float | None = None
    """The largest score of a labeled token; None unless scores are told of."""

    empty: bool = False
    """No label of the global batch counts, so that there was nothing to learn from."""


def train_step(
    trainer: Trainer,
    batches: StepBatches,
    *,
    lr: float,
    weight_decay: float,
    stop: bool = False,
    groups: Mapping[str, GroupRates] = NO_GROUPS,
) -> StepResult:
    """Run one step. Collective over the whole mesh; the host waits for the device once, at the end.
    `groups`: rates and decay of `optim.groups`.

    Raises:
        DataError: the gradient norm is not finite and optim.nonfinite_grad is `raise`.
    """
    data, mesh = trainer.data, trainer.mesh
    scale = 1.0 if trainer.loss_scale is None else trainer.loss_scale.scale
    data.begin_step(len(batches.microbatches))
    counts = (batches.num_labels, *batches.num_mtp_labels)
    weight = trainer.run.model.mtp.loss_weight
    scale_loss = partial(
        normalize_losses_by_labels, num_labels=counts, weight=weight, mesh=mesh, scale=scale
    )
    total = trainer.pipeline_model.forward_backward(batches.microbatches, scale_loss, scale=scale)
    local_params = data.finish()
    seen = _collect_logit_stats(trainer)
    step_stats = reduce_step_stats(
        trainer,
        local_params,
        total if seen is None else torch.cat([total - seen.z, seen.z[:1]]),
        stop,
    )
    stopping, squares, zeros, *sums = (
        step_stats if seen is None else torch.cat([step_stats, seen.largest])
    ).tolist()
    grad_norm = math.sqrt(squares) / scale
    finite = math.isfinite(grad_norm)
    empty = not any(
        counts
    )  # momentum and weight decay would still move the weights, and zeros overflow at no scale
    if trainer.loss_scale is not None and not empty:
        trainer.loss_scale.update(overflow=not finite)
    if finite and not empty:
        trainer.optimizer.step(
            [o.gradient for o in local_params],
            lr=lr,
            weight_decay=weight_decay,
            groups=groups,
            scale=_gradient_multiplier(
                step_stats[1].sqrt() / scale, trainer.run.optim.clip_grad, scale
            ),
        )
        move_balancing_biases(trainer.pipeline_model.modules, mesh)
        move_balancing_offsets(trainer.pipeline_model.modules, mesh)
        data.all_gather_params()
    elif not finite and trainer.run.optim.nonfinite_grad == "raise":
        raise DataError(
            f"gradient norm {grad_norm}: not finite in {where_not_finite(trainer)}. Reduce "
            "schedule.lr, check the "
            f"data, or set optim.nonfinite_grad=skip."
        )
    loss, *mtp_inputs = (total / max(1, count) for total, count in zip(sums, counts, strict=False))
    z, largest = (None, None) if seen is None else (sums[-2] / max(1, counts[0]), sums[-1])
    return StepResult(
        loss,
        grad_norm,
        finite and not empty,
        stopping > 0,
        int(zeros) if trainer.run.optim.count_zeros else None,
        tuple(mtp_inputs),
        z,
        largest,
        empty,
    )


def reduce_step_stats(
    trainer: Trainer, local_params: Sequence[ShardedParam], losses: Tensor, stop: bool
) -> Tensor:
    """What all ranks must know, in one message: ranks that stop, sum of squares and zeros of the
    gradient, losses."""
    mesh = trainer.mesh
    mine = counted([(o.shard, o.gradient) for o in local_params], mesh)
    zeros = (
        num_zeros(mine, trainer.device) if trainer.run.optim.count_zeros else losses.new_zeros(())
    )
    # Losses are the same on every tensor-parallel rank, so the first speaks for all; and 0 before
    # the last stage.
    part = losses if mesh.tp.rank == 0 else torch.zeros_like(losses)
    step_stats = torch.stack(
        [losses.new_tensor(float(stop)), sum_of_squares(mine, trainer.device), zeros]
    )
    return all_reduce_(torch.cat([step_stats, part]), mesh.world)


def _collect_logit_stats(trainer: Trainer) -> StepLogitStats | None:
    """What heads noted in this step, where they do. Collective then."""
    if not logs_logit_stats(trainer.run):
        return None
    heads, depths = list(heads_of(trainer.pipeline_model.chunks)), trainer.run.model.mtp.num_layers
    return collect_logit_stats(heads, trainer.mesh, depths=depths, device=trainer.device)


def _gradient_multiplier(norm: Tensor, limit: float, scale: float) -> Tensor | None:
    """What gradients are multiplied by: it clips them and takes the loss scale out; None when they
    stay."""
    factor = clip_factor(norm, limit)
    if scale == 1.0:
        return factor
    return (torch.ones_like(norm) if factor is None else factor) / scale


def where_not_finite(trainer: Trainer) -> str:
    """The first few parameters whose gradient is not finite, and the ranks: the same text on every
    rank, collective.

    Where the engine watched, those that were not finite before any other rank's gradient was added
    to them.
    """
    after = [
        o.shard.name
        for o in trainer.data.local_params
        if not bool(torch.isfinite(o.gradient).all())
    ]
    ranks = trainer.mesh.world.ranks
    before = gather_objects(trainer.data.nonfinite(), trainer.mesh.world)
    blamed = {
        rank: names
        for rank, names in zip(ranks, before, strict=True)
        if isinstance(names, list) and names
    }
    if not blamed:
        found = gather_objects(after, trainer.mesh.world)
        blamed = {
            rank: names
            for rank, names in zip(ranks, found, strict=True)
            if isinstance(names, list) and names
        }
    texts = [f"{', '.join(names[:5])} on rank {rank}" for rank, names in list(blamed.items())[:5]]
    return "; ".join(texts) or "no single gradient, only their sum of squares"
