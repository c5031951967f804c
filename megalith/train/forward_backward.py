"""Forward and backward of the microbatches of a step through this rank's model chunks, and the
training losses: sums over heads (LM, MTP, aux), normalized by the global number of labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalith.config.parallel import PipelineConfig
from megalith.config.train import TrainRun
from megalith.data.loader import Batch
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs
from megalith.kernels.packed import for_one_pass
from megalith.parallel.collectives import mark_partial
from megalith.parallel.group import all_reduce_max_
from megalith.parallel.mesh import Mesh
from megalith.parallel.p2p import PipelineGroups, Spec, Specs, Tensors
from megalith.parallel.pipeline import Boundary, DualBatchOverlap, Pipeline, WeightGradStore
from megalith.plan.p2p import with_transfers
from megalith.plan.schedule import (
    Schedule,
    build_schedule,
    effective_pipeline,
    pair_forward_backward,
    schedule_name,
)
from megalith.plan.stages import Stage, plan_stages, stage_boundary

# Training losses: LM and MTP losses of every head, normalized by the global number of labels.


@dataclass(frozen=True, slots=True)
class StepLogitStats:
    """Logit statistics of all heads in a step."""

    z: Tensor
    """float64 [1 + depths]: this rank's sums of z_loss * logsumexp^2; 0 where there is no loss."""

    largest: Tensor
    """float64 [1]: largest logit of the main head, over all ranks; -inf without labels."""


TakeLogitStats = Callable[[], tuple[Tensor | None, Tensor | None]]
"""Returns the z-loss and the largest logit of one head since the last call, and resets both."""


def collect_logit_stats(
    heads: Sequence[TakeLogitStats], mesh: Mesh, *, depths: int, device: torch.device
) -> StepLogitStats:
    """Return the logit statistics of this rank's heads (the main head first) and reset them.

    Collective: one small all-reduce.
    """
    z = torch.zeros(1 + depths, dtype=torch.float64, device=device)
    largest = torch.full((1,), float("-inf"), dtype=torch.float64, device=device)
    for number, take in enumerate(heads):
        z_loss, max_logit = take()
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


ScaleLossFn = Callable[[Sequence[Tensor]], Tensor]
"""The summed losses of a microbatch (next token, then MTP depths) -> the scaled loss that backward
starts from."""


class ModelChunk(Protocol):
    """Model chunk that the pipeline executes: a `Decoder` with the layers of one stage."""

    stage: Stage
    dtype: torch.dtype
    stream_dtype: torch.dtype

    def stage_inputs(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Return the outputs of the previous stage as keyword arguments of the other methods."""
        # Any: tensors, or tuples of them

    def __call__(
        self, ids: Tensor, inputs: LayerInputs, **received: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the outputs for the next stage."""

    def losses(
        self, ids: Tensor, labels: Tensor, inputs: LayerInputs, **received: Any
    ) -> tuple[Tensor, ...]:
        """Return the summed loss of the next token, then of each MTP depth."""

    def evaluate(self, ids: Tensor, labels: Tensor, inputs: LayerInputs, **received: Any) -> Tensor:
        """Return `losses` in float64, followed by the MTP acceptance rates."""


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """This rank's model chunks and their pipeline stages; without a pipeline, one chunk with the
    whole model."""

    run: TrainRun
    mesh: Mesh
    device: torch.device
    chunks: tuple[ModelChunk, ...]
    modules: nn.ModuleList
    """All chunks as one module."""

    handles: PipelineGroups | None
    logit_stats: tuple[TakeLogitStats, ...] | None = None
    """Logit statistics of this rank's heads, the main head first; None if the run logs none."""

    weights: tuple[WeightGradStore, ...] = ()
    """Stores of deferred weight gradients by chunk, for schedules that split backward."""

    dual_batch: DualBatchOverlap = field(default_factory=DualBatchOverlap)
    """Dual-batch overlap: switches between two microbatches while expert all-to-alls are in
    flight."""

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes losses."""
        return any(chunk.stage.loss for chunk in self.chunks)

    @property
    def boundary_split(self) -> int:
        """Number of ranks over which the tokens between stages are sharded."""
        return self.mesh.tp.size if self.run.parallel.sp else 1

    def forward_backward(
        self,
        batches: Sequence[Batch],
        scale_loss: ScaleLossFn,
        *,
        scale: float = 1.0,
        after_microbatch: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run forward and backward of all microbatches; return the summed losses, float64 [1 +
        depths].

        The sums are 0 on ranks without the loss. `scale`: the loss scale, for losses that
        `scale_loss` does not receive (aux losses). `after_microbatch`: called after the last
        backward of each microbatch on this rank.
        """
        return self._run(batches, scale_loss, scale, after_microbatch)

    def forward(self, batches: Sequence[Batch]) -> Tensor:
        """Run forward of all microbatches; return the sums of `Decoder.evaluate`, 0 on ranks
        without the loss."""
        with torch.no_grad():
            return self._run(batches, None)

    def _run(
        self,
        batches: Sequence[Batch],
        scale_loss: ScaleLossFn | None,
        scale: float = 1.0,
        after_microbatch: Callable[[int], None] | None = None,
    ) -> Tensor:
        p = self.run.parallel
        schedule = build_step_schedule(
            p.pipeline,
            self.mesh.pp.size,
            len(batches),
            overlap=p.overlap,
            forward_only=scale_loss is None,
            paired=p.overlap_experts and scale_loss is not None,
        )
        depths = self.run.model.mtp.num_layers
        measures = 1 + depths if scale_loss is not None or not depths else 2 + 2 * depths
        total = torch.zeros(measures, dtype=torch.float64, device=self.device)
        tags = self.handles is None or self.handles.tags
        pipeline = Pipeline(
            self.mesh.pp.rank,
            self.handles,
            self.device,
            self._boundary(batches) if self.mesh.pp.size > 1 else None,
            announce=p.check_collectives and tags,
            weights=self.weights,
            dual_batch=self.dual_batch,
            after_microbatch=after_microbatch,
        )
        weight = (
            None
            if scale_loss is None or self.run.model.moe is None
            else scale / (len(batches) * self.mesh.dp.size)
        )
        pipeline.run(
            schedule,
            [_ChunkStep(chunk, batches, scale_loss, total, weight) for chunk in self.chunks],
        )
        return total

    def _boundary(self, batches: Sequence[Batch]) -> Boundary:
        """Return the shapes of the tensors between stages; every rank of a pipeline reads the same
        rows."""
        model, p, chunk, parts = (
            self.run.model,
            self.run.parallel,
            self.chunks[0],
            self.boundary_split,
        )
        stages = plan_stages(
            p.pipeline, pp=p.pp, num_layers=model.num_layers, depths=model.mtp.num_layers
        )
        boundaries = [stage_boundary(model, stages, number) for number in range(len(stages))]

        def boundary_specs(stage: int, microbatch: int) -> Specs:
            batch, boundary = batches[microbatch], boundaries[stage]
            shape = len(batch.ids) // parts, model.hidden_size
            x = Spec(shape, chunk.dtype if boundary.normed else chunk.stream_dtype)
            return x, *[Spec(shape, chunk.dtype)] * (
                boundary.memory + min(boundary.num_mtp_hidden, len(batch.mtp_inputs))
            )

        return boundary_specs


@dataclass(frozen=True, slots=True)
class _ChunkStep:
    """One chunk and the microbatches of a step."""

    model: ModelChunk
    batches: Sequence[Batch]
    scale_loss: ScaleLossFn | None
    total: Tensor
    balance: float | None
    """Factor of the aux losses' mean over a microbatch; None without experts."""

    def __call__(self, microbatch: int, received: Tensors) -> Tensors:
        """Run one microbatch.

        Takes the tensors from the previous stage (none on the first) and returns those for the next
        stage, or the loss that backward starts from.
        """
        batch, from_stage = self.batches[microbatch], self.model.stage_inputs(received)
        aux_loss_scale = None
        if self.balance is not None:
            aux_loss_scale = AuxLossScale(
                microbatch, len(self.batches), self.balance * batch.part, batch.part
            )
        batch = replace(batch, seq_params=for_one_pass(batch.seq_params))
        inputs = batch.layer_inputs(aux_loss_scale)
        if not self.model.stage.loss:
            outputs = self.model(batch.ids, inputs, mtp_inputs=batch.mtp_inputs, **from_stage)
            return outputs if isinstance(outputs, tuple) else (outputs,)
        if self.scale_loss is None:
            self.total.add_(
                self.model.evaluate(
                    batch.ids, batch.labels, inputs, mtp_inputs=batch.mtp_inputs, **from_stage
                )
            )
            return ()
        losses = self.model.losses(
            batch.ids, batch.labels, inputs, mtp_inputs=batch.mtp_inputs, **from_stage
        )
        self.total[: len(losses)] += torch.stack([loss.detach() for loss in losses])
        return (self.scale_loss(losses),)


@lru_cache(maxsize=8)  # all steps use the same schedule, evaluation one or two others
def build_step_schedule(
    pipeline: PipelineConfig,
    pp: int,
    microbatches: int,
    *,
    overlap: bool,
    forward_only: bool = False,
    paired: bool = False,
) -> Schedule:
    """Return the pipeline schedule of a step; without a pipeline, one microbatch after the other.

    `paired`: two microbatches at a time.

    Raises:
        PlanError: the schedule does not support these counts.
    """
    used = effective_pipeline(pipeline, pp)
    schedule = build_schedule(
        schedule_name(used),
        num_ranks=pp,
        num_chunks=used.vpp,
        num_microbatches=microbatches,
        group=used.group,
        forward_only=forward_only,
    )
    return with_transfers(pair_forward_backward(schedule) if paired else schedule, overlap=overlap)
