"""One training step: gradient accumulation over microbatches, gradient clipping, optimizer
update."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.errors import DataError
from megalith.optim.gradients import (
    LossScale,
    clip_factor,
    first_replica_gradients,
    num_zeros,
    sum_of_squares,
)
from megalith.optim.optimizers import Optimizer
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.parallel.grad_sync import GradSync, ShardedParam
from megalith.parallel.group import all_reduce_, gather_objects
from megalith.parallel.mesh import Mesh
from megalith.train.forward_backward import (
    PipelineModel,
    StepLogitStats,
    collect_logit_stats,
    normalize_losses_by_labels,
)

WeightUpdate = Callable[[nn.ModuleList, Mesh], None]
"""Changes weights of this rank's model chunks after the optimizer's step, before updated parameters
are all-gathered; collective over the mesh."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """Model, gradient synchronization, optimizer and loss scale of one rank."""

    run: TrainRun
    mesh: Mesh
    device: torch.device
    pipeline_model: PipelineModel
    data: GradSync
    optimizer: Optimizer
    loss_scale: LossScale | None
    """Loss scaling state; None unless the run is in fp16."""
    weight_updates: Sequence[WeightUpdate] = ()
    """Applied in this order after each optimizer step, such as the update of the expert bias."""

    @property
    def model(self) -> nn.Module:
        """The model, if this rank has only one model chunk."""
        (model,) = self.pipeline_model.modules
        return model


StepStats = Tensor
"""float64 [3 + losses]: requests of all ranks, sum of squares and zeros of the gradients,
losses."""


class StepRequest(enum.Flag):
    """What the loop is asked to do after a step; requests of several kinds are combined with |."""

    NONE = 0
    EVALUATE = enum.auto()
    SAVE = enum.auto()
    STOP = enum.auto()
    """Save, unless the step is divergent, and end the run."""


AfterBackward = Callable[[Sequence[ShardedParam]], StepRequest]
"""Called after backward with this rank's summed gradients before clipping; returns the requests of
this rank."""


def request_nothing(local_params: Sequence[ShardedParam]) -> StepRequest:
    """Return no request, for a step without callbacks."""
    return StepRequest.NONE


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step, the same on every rank."""

    loss: float
    """Mean of -log p(label) over the global batch, before the update."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping, without the loss scale."""

    updated: bool
    """False if the gradient norm was not finite or there were no labels; then nothing changed."""

    requests: StepRequest
    """Requests of all ranks."""

    num_zeros: int | None = None
    """Number of gradient elements that are zero; None unless optim.count_zeros."""

    mtp_losses: tuple[float, ...] = ()
    """Mean loss of every MTP depth."""

    z_loss: float | None = None
    """Mean over labels of train.z_loss * logsumexp^2, not included in `loss`; None if logit
    statistics are off."""

    max_logit: float | None = None
    """Largest logit of a labeled token; None if logit statistics are off."""

    empty: bool = False
    """Whether the global batch has no labels."""


def train_step(
    trainer: Trainer,
    batches: StepBatches,
    *,
    lr: float,
    weight_decay: float,
    after_backward: AfterBackward = request_nothing,
    groups: Mapping[str, GroupRates] = NO_GROUPS,
) -> StepResult:
    """Run one step. Collective over the whole mesh; the host waits for the device once, at the end.

    `groups`: learning rate and weight decay of `optim.groups`.

    Raises:
        DataError: the gradient norm is not finite and optim.nonfinite_grad is `raise`.
    """
    data, mesh = trainer.data, trainer.mesh
    scale = 1.0 if trainer.loss_scale is None else trainer.loss_scale.scale
    data.begin_step(len(batches.microbatches))
    counts = batches.num_labels, *batches.num_mtp_labels
    weight = trainer.run.model.mtp.loss_weight
    scale_loss = partial(
        normalize_losses_by_labels, num_labels=counts, weight=weight, mesh=mesh, scale=scale
    )
    total = trainer.pipeline_model.forward_backward(batches.microbatches, scale_loss, scale=scale)
    local_params = data.finish()
    logit_stats = _collect_logit_stats(trainer)
    step_stats = reduce_step_stats(
        trainer,
        local_params,
        total if logit_stats is None else torch.cat([total - logit_stats.z, logit_stats.z[:1]]),
        after_backward(local_params),
    )
    requests, squares, zeros, *sums = (
        step_stats if logit_stats is None else torch.cat([step_stats, logit_stats.largest])
    ).tolist()
    grad_norm = math.sqrt(squares) / scale
    finite = math.isfinite(grad_norm)
    # momentum and weight decay would still change the weights, and zeros never overflow
    empty = not any(counts)
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
        for update_weights in trainer.weight_updates:
            update_weights(trainer.pipeline_model.modules, mesh)
        data.all_gather_params()
    elif not finite and trainer.run.optim.nonfinite_grad == "raise":
        raise DataError(
            f"gradient norm {grad_norm}: not finite in {describe_nonfinite_gradients(trainer)}. "
            "Reduce schedule.lr, check the data, or set optim.nonfinite_grad=skip."
        )
    loss, *mtp_losses = (total / max(1, count) for total, count in zip(sums, counts, strict=False))
    z_loss, max_logit = (
        (None, None) if logit_stats is None else (sums[-2] / max(1, counts[0]), sums[-1])
    )
    return StepResult(
        loss,
        grad_norm,
        finite and not empty,
        _decode_requests(requests, mesh.world.size),
        int(zeros) if trainer.run.optim.count_zeros else None,
        tuple(mtp_losses),
        z_loss,
        max_logit,
        empty,
    )


def reduce_step_stats(
    trainer: Trainer,
    local_params: Sequence[ShardedParam],
    losses: Tensor,
    requests: StepRequest = StepRequest.NONE,
) -> StepStats:
    """All-reduce the statistics of a step in one message. Collective over the mesh."""
    mesh = trainer.mesh
    local_gradients = first_replica_gradients([(o.shard, o.gradient) for o in local_params], mesh)
    zeros = (
        num_zeros(local_gradients, trainer.device)
        if trainer.run.optim.count_zeros
        else losses.new_zeros(())
    )
    # Losses are equal on all tensor-parallel ranks, so only the first contributes; they are 0
    # before the last stage.
    local_losses = losses if mesh.tp.rank == 0 else torch.zeros_like(losses)
    step_stats = torch.stack(
        [
            losses.new_tensor(_encode_requests(requests, mesh.world.size)),
            sum_of_squares(local_gradients, trainer.device),
            zeros,
        ]
    )
    return all_reduce_(torch.cat([step_stats, local_losses]), mesh.world)


def _encode_requests(requests: StepRequest, world_size: int) -> float:
    """Return a rank's requests as a number; the sum over ranks holds the count of each kind.

    The counts are digits to the base `world_size + 1`. With three kinds, their sum is exact in
    float64 for up to 200,000 ranks.
    """
    return float(
        sum((world_size + 1) ** digit for digit, kind in enumerate(StepRequest) if kind in requests)
    )


def _decode_requests(total: float, world_size: int) -> StepRequest:
    """Return the requests of all ranks from the sum of their `_encode_requests`."""
    requests, digits = StepRequest.NONE, int(total)
    for kind in StepRequest:
        digits, count = divmod(digits, world_size + 1)
        if count:
            requests |= kind
    return requests


def _collect_logit_stats(trainer: Trainer) -> StepLogitStats | None:
    """Return the logit statistics of the heads, if the run logs them. Collective in that case."""
    heads = trainer.pipeline_model.logit_stats
    if heads is None:
        return None
    depths = trainer.run.model.mtp.num_layers
    return collect_logit_stats(heads, trainer.mesh, depths=depths, device=trainer.device)


def _gradient_multiplier(norm: Tensor, limit: float, scale: float) -> Tensor | None:
    """Return the factor that clips the gradients and removes the loss scale; None if it is 1."""
    factor = clip_factor(norm, limit)
    if scale == 1.0:
        return factor
    return (torch.ones_like(norm) if factor is None else factor) / scale


def describe_nonfinite_gradients(trainer: Trainer) -> str:
    """Describe the first parameters with non-finite gradients and their ranks. Collective; equal on
    all ranks.

    If gradients were checked before their reduction, names the ranks where they were not finite
    first.
    """
    nonfinite_names = [
        o.shard.name
        for o in trainer.data.local_params
        if not bool(torch.isfinite(o.gradient).all())
    ]
    ranks = trainer.mesh.world.ranks
    nonfinite_before_reduction = gather_objects(trainer.data.nonfinite(), trainer.mesh.world)
    nonfinite_gradients = {
        rank: names
        for rank, names in zip(ranks, nonfinite_before_reduction, strict=True)
        if isinstance(names, list) and names
    }
    if not nonfinite_gradients:
        gathered = gather_objects(nonfinite_names, trainer.mesh.world)
        nonfinite_gradients = {
            rank: names
            for rank, names in zip(ranks, gathered, strict=True)
            if isinstance(names, list) and names
        }
    texts = [
        f"{', '.join(names[:5])} on rank {rank}"
        for rank, names in list(nonfinite_gradients.items())[:5]
    ]
    return "; ".join(texts) or "no single gradient, only their sum of squares"
