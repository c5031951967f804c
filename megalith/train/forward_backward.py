"""Forward and backward of the microbatches of a step through this rank's model chunks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.parallel import PipelineConfig
from megalith.config.train import TrainRun
from megalith.data.loader import Batch
from megalith.kernels.attention.scores import ScoreRecord
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import for_one_pass
from megalith.observe.timers import Timers
from megalith.parallel.group import all_reduce_max_
from megalith.parallel.mesh import Mesh
from megalith.parallel.p2p import PipelineGroups, Spec, Specs, Tensors
from megalith.parallel.pipeline import DualBatchOverlap, Pipeline, WeightGradStore
from megalith.plan.schedule import (
    Schedule,
    build_schedule,
    effective_pipeline,
    pair_forward_backward,
    schedule_name,
    with_transfers,
)
from megalith.plan.stages import Stage, StageBoundary, plan_stages, stage_boundary
from megalith.train.objective import (
    LossNormalizer,
    ModelOutputs,
    MTPInputs,
    Objective,
    check_losses,
    sum_document_losses,
    sum_eval_losses,
)


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


class ModelChunk(Protocol):
    """Model chunk that the pipeline executes: a `Decoder` with the layers of one stage."""

    stage: Stage
    dtype: torch.dtype
    stream_dtype: torch.dtype

    def __call__(
        self,
        ids: Tensor,
        inputs: LayerInputs,
        *,
        received: Mapping[str, Tensor],
        mtp_inputs: MTPInputs,
    ) -> Mapping[str, Tensor]:
        """Return the named tensors for the next stage; `received`: those of the previous one."""

    def outputs(
        self,
        ids: Tensor,
        inputs: LayerInputs,
        *,
        received: Mapping[str, Tensor],
        mtp_inputs: MTPInputs,
    ) -> ModelOutputs:
        """Return what the losses are computed from, on the stage with the output head."""


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
    objective: Objective
    """Training losses, computed on the rank with the output head."""

    logit_stats: tuple[TakeLogitStats, ...] | None = None
    """Logit statistics of this rank's heads, the main head first; None if the run logs none."""

    weights: tuple[WeightGradStore, ...] = ()
    """Stores of deferred weight gradients by chunk, for schedules that split backward."""

    dual_batch: DualBatchOverlap = field(default_factory=DualBatchOverlap)
    """Dual-batch overlap: switches between two microbatches while expert all-to-alls are in
    flight."""

    timers: Timers = field(default_factory=Timers)
    """Timers of this rank's steps; an evaluation has no sections of its own."""

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
        normalizer: LossNormalizer,
        *,
        after_microbatch: Callable[[int], None] | None = None,
        score_record: ScoreRecord | None = None,
    ) -> Tensor:
        """Run forward and backward of all microbatches; return the summed losses in the order of
        the objective: float64 [losses], 0 on ranks without the output head.

        `after_microbatch`: called after the last backward of each microbatch on this rank.
        `score_record`: records the largest attention scores.
        """
        total = torch.zeros(len(normalizer.terms), dtype=torch.float64, device=self.device)
        self._run(batches, total, normalizer, after_microbatch, score_record=score_record)
        return total

    def forward(self, batches: Sequence[Batch]) -> Tensor:
        """Run forward of all microbatches; return the sums of `sum_eval_losses` of each: float64
        [microbatches, sums], 0 on ranks without the output head."""
        depths = self.run.model.mtp.num_layers
        return self._evaluate(batches, _sum_batch_losses, num_sums=2 + 2 * depths if depths else 1)

    def document_losses(self, batches: Sequence[Batch]) -> Tensor:
        """Run forward of all microbatches; return the sum of -log p(label) of each document, over
        the tokens of this rank: float64 [microbatches, documents], 0 past the last document of a
        microbatch and on ranks without the output head."""
        num_documents = max(len(batch.seq_params.lengths) for batch in batches)
        sum_losses = partial(sum_document_losses, num_documents=num_documents)
        return self._evaluate(batches, sum_losses, num_sums=num_documents)

    def _evaluate(
        self,
        batches: Sequence[Batch],
        sum_losses: Callable[[ModelOutputs, Batch], Tensor],
        *,
        num_sums: int,
    ) -> Tensor:
        """Run forward of all microbatches; return the sums of each."""
        sums = torch.zeros(len(batches), num_sums, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            self._run(batches, sums, None, sum_losses=sum_losses)
        return sums

    def _run(
        self,
        batches: Sequence[Batch],
        total: Tensor,
        normalizer: LossNormalizer | None,
        after_microbatch: Callable[[int], None] | None = None,
        *,
        sum_losses: Callable[[ModelOutputs, Batch], Tensor] | None = None,
        score_record: ScoreRecord | None = None,
    ) -> None:
        p = self.run.parallel
        schedule = build_step_schedule(
            p.pipeline,
            self.mesh.pp.size,
            len(batches),
            overlap=p.overlap,
            forward_only=normalizer is None,
            paired=p.overlap_experts and normalizer is not None,
        )
        tags = self.handles is None or self.handles.tags
        boundaries = self._boundaries(batches)
        pipeline = Pipeline(
            self.mesh.pp.rank,
            self.handles,
            self.device,
            boundaries.specs if self.mesh.pp.size > 1 else None,
            announce=p.check_collectives and tags,
            weights=self.weights,
            dual_batch=self.dual_batch,
            after_microbatch=after_microbatch,
            timers=self.timers if normalizer is not None else Timers(),
        )
        steps = [
            _ChunkStep(
                chunk,
                schedule.stages[self.mesh.pp.rank][number],
                boundaries,
                self.objective,
                normalizer,
                total,
                sum_losses,
                score_record,
            )
            for number, chunk in enumerate(self.chunks)
        ]
        pipeline.run(schedule, steps)

    def _boundaries(self, batches: Sequence[Batch]) -> "StageBoundaries":
        """Return the tensors between stages; every rank of a pipeline reads the same rows."""
        model, p, chunk = self.run.model, self.run.parallel, self.chunks[0]
        depths = model.mtp.num_layers
        stages = (
            plan_stages(p.pipeline, pp=p.pp, num_layers=model.num_layers, depths=depths)
            if p.pp * len(self.chunks) > 1
            else ()
        )
        dtypes = {"residual": chunk.stream_dtype, "model": chunk.dtype}
        return StageBoundaries(model, stages, batches, self.boundary_split, dtypes)


@dataclass(frozen=True, slots=True)
class StageBoundaries:
    """Tensors between the pipeline stages of a step."""

    model: ModelConfig
    stages: Sequence[Stage]
    """All stages; empty without a pipeline."""

    batches: Sequence[Batch]
    split: int
    """Number of ranks over which the tokens between stages are sharded."""

    dtypes: Mapping[str, torch.dtype]
    """Dtype of the residual stream and of the parameters."""

    def tensors(self, stage: int, microbatch: int) -> StageBoundary:
        """Return the description of what is sent across the boundary before a stage."""
        if not self.stages:
            return ()
        depths = len(self.batches[microbatch].mtp_inputs)
        return stage_boundary(self.model, self.stages, stage, depths=depths)

    def specs(self, stage: int, microbatch: int) -> Specs:
        """Return the shapes and dtypes of these messages."""
        t, h = len(self.batches[microbatch].ids) // self.split, self.model.hidden_size
        return tuple(
            Spec(
                tensor.sizes(num_tokens=t, hidden_size=h),
                self.dtypes[tensor.dtype],
                tensor.requires_grad,
            )
            for tensor in self.tensors(stage, microbatch)
        )


@dataclass(frozen=True, slots=True)
class _ChunkStep:
    """One chunk and the microbatches of a step."""

    model: ModelChunk
    stage: int
    boundaries: StageBoundaries
    objective: Objective
    normalizer: LossNormalizer | None
    """None in evaluation."""

    total: Tensor
    """float64: the sums of the losses, which each microbatch adds to; in evaluation each microbatch
    has a row of its own."""

    sum_losses: Callable[[ModelOutputs, Batch], Tensor] | None
    """Returns the sums of a microbatch; only in evaluation."""

    score_record: ScoreRecord | None = None
    """Records the largest attention scores; None: they are not computed."""

    def __call__(self, microbatch: int, received: Tensors) -> Tensors:
        """Run one microbatch.

        Takes the tensors from the previous stage (none on the first) and returns those for the next
        stage, or the loss that backward starts from.
        """
        batches, normalizer = self.boundaries.batches, self.normalizer
        batch, aux_loss_scale = batches[microbatch], None
        if normalizer is not None and self.boundaries.model.moe is not None:
            aux_loss_scale = normalizer.aux_loss_scale(microbatch, len(batches), batch.part)
        if batch.seq_params.visible is not None or batch.seq_params.context is not None:
            batch = replace(batch, seq_params=for_one_pass(batch.seq_params))
        inputs, boundary = batch.layer_inputs(aux_loss_scale), self.boundaries.tensors
        if self.score_record is not None:
            inputs = replace(inputs, score_record=self.score_record)
        named = (tensor.name for tensor in boundary(self.stage, microbatch))
        arguments: dict[str, Any] = {  # Any: keyword arguments
            "received": dict(zip(named, received, strict=True)),
            "mtp_inputs": batch.mtp_inputs,
        }
        if not self.model.stage.loss:
            tensors = self.model(batch.ids, inputs, **arguments)
            sent = [tensor.name for tensor in boundary(self.stage + 1, microbatch)]
            assert set(sent) == set(tensors), (sent, list(tensors))
            return tuple(tensors[name] for name in sent)
        outputs = self.model.outputs(batch.ids, inputs, **arguments)
        if normalizer is None:
            assert self.sum_losses is not None, "evaluation sums losses"
            self.total[microbatch].copy_(self.sum_losses(outputs, batch))
            return ()
        named_losses = self.objective(outputs, batch)
        check_losses(named_losses, normalizer.terms)
        self.total.add_(torch.stack([named_losses[name].detach() for name in normalizer.terms]))
        return (normalizer.scale_loss(named_losses),)


def _sum_batch_losses(outputs: ModelOutputs, batch: Batch) -> Tensor:
    """Return the sums of `sum_eval_losses` of a microbatch."""
    return sum_eval_losses(outputs, batch.labels, batch.mtp_inputs)


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
