"""This rank's model chunks, and forward and backward of microbatches through the pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from megalith.config.pipeline import PipelineConfig
from megalith.config.train import TrainRun
from megalith.data.loader import Batch
from megalith.errors import raise_all
from megalith.kernels.engine import unavailable_backends
from megalith.kernels.masks import for_one_pass
from megalith.kernels.tokens import AuxLossScale
from megalith.models.decoder import Decoder, build_chunks
from megalith.nn.frozen import freeze
from megalith.nn.kernels import use_kernels
from megalith.nn.lora import attach_adapters
from megalith.nn.moe.layer import MoE
from megalith.parallel.dual_batch import DualBatchOverlap
from megalith.parallel.link import (
    PipelineGroups,
    Spec,
    Specs,
    Tensors,
    create_pipeline_groups,
    open_channels,
)
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline import Boundary, Pipeline
from megalith.parallel.symm_mem import choose_collective_matmul
from megalith.parallel.tensor import TensorParallel, set_training_losses
from megalith.parallel.tensor_overlap import RING_EXCHANGE
from megalith.parallel.watch import backend_timeout
from megalith.parallel.weight_grad_store import WeightGradStore
from megalith.plan.kernels import explicit_backend_problems
from megalith.plan.pairs import pair_forward_backward
from megalith.plan.schedule import (
    SPLIT_SCHEDULES,
    Schedule,
    build_schedule,
    effective_pipeline,
    schedule_name,
)
from megalith.plan.stages import plan_stages, stage_boundary
from megalith.plan.transfers import channels, with_transfers
from megalith.train.loss import compute_head_losses

ScaleLossFn = Callable[[Sequence[Tensor]], Tensor]
"""The summed losses of a microbatch (next token, then MTP depths) -> the scaled loss that backward
starts from."""


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """This rank's model chunks and their pipeline stages; without a pipeline, one chunk with the
    whole model."""

    run: TrainRun
    mesh: Mesh
    device: torch.device
    chunks: tuple[Decoder, ...]
    handles: PipelineGroups | None
    weights: tuple[WeightGradStore, ...] = ()
    """Stores of deferred weight gradients by chunk, for schedules that split backward."""

    dual_batch: DualBatchOverlap = field(default_factory=DualBatchOverlap)
    """Dual-batch overlap: switches between two microbatches while expert all-to-alls are in
    flight."""

    @property
    def modules(self) -> nn.ModuleList:
        """All chunks as one module."""
        return nn.ModuleList(self.chunks)

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes losses."""
        return any(chunk.stage.loss for chunk in self.chunks)

    @property
    def boundary_split(self) -> int:
        """Number of ranks over which the tokens between stages are sharded."""
        return self.mesh.tp.size if self.run.parallel.sp else 1

    def forward_backward(
        self, batches: Sequence[Batch], scale_loss: ScaleLossFn, *, scale: float = 1.0
    ) -> Tensor:
        """Run forward and backward of all microbatches; return the summed losses, float64 [1 +
        depths].

        The sums are 0 on ranks without the loss. `scale`: the loss scale, for losses that
        `scale_loss` does not receive (aux losses).
        """
        return self._run(batches, scale_loss, scale)

    def forward(self, batches: Sequence[Batch]) -> Tensor:
        """Run forward of all microbatches; return the sums of `Decoder.evaluate`, 0 on ranks
        without the loss."""
        with torch.no_grad():
            return self._run(batches, None)

    def _run(
        self, batches: Sequence[Batch], scale_loss: ScaleLossFn | None, scale: float = 1.0
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
            self._boundary(batches),
            announce=p.check_collectives and tags,
            weights=self.weights,
            dual_batch=self.dual_batch,
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

    model: Decoder
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
        batch, inputs = self.batches[microbatch], self.model.stage_inputs(received)
        batch = replace(batch, tokens=for_one_pass(batch.tokens))
        if self.balance is not None:
            share = AuxLossScale(
                microbatch, len(self.batches), self.balance * batch.part, batch.part
            )
            batch = replace(batch, tokens=replace(batch.tokens, balance=share))
        if not self.model.stage.loss:
            outputs = self.model(batch.ids, batch.tokens, mtp_inputs=batch.mtp_inputs, **inputs)
            return outputs if isinstance(outputs, tuple) else (outputs,)
        if self.scale_loss is None:
            self.total.add_(
                self.model.evaluate(
                    batch.ids, batch.labels, batch.tokens, mtp_inputs=batch.mtp_inputs, **inputs
                )
            )
            return ()
        losses = self.model.losses(
            batch.ids, batch.labels, batch.tokens, mtp_inputs=batch.mtp_inputs, **inputs
        )
        self.total[: len(losses)] += torch.stack([loss.detach() for loss in losses])
        return (self.scale_loss(losses),)


def build_pipeline_model(
    run: TrainRun, mesh: Mesh, device: torch.device, *, dtype: torch.dtype
) -> PipelineModel:
    """Build this rank's chunks, without allocating weights, and their communication channels.
    Collective."""
    products = (
        choose_collective_matmul(run.parallel.collective_matmul, mesh.tp, device)
        if run.parallel.tp_comm_overlap
        else RING_EXCHANGE
    )
    chunks = build_chunks(
        run.model,
        mesh,
        run.parallel,
        dtype=dtype,
        recompute=run.recompute,
        offload=run.offload,
        products=products,
    )
    attach_adapters(chunks, run.model, run.lora)
    freeze(chunks, run.model, run.optim)
    set_training_losses(chunks, partial(compute_head_losses, run))
    raise_all(explicit_backend_problems(run, device.type, unavailable_backends()))
    use_kernels(chunks, run.kernels, mesh)
    handles = create_pipeline_groups(
        mesh.pp,
        tags=device.type == "cpu",
        timeout_seconds=backend_timeout(run.parallel.timeout_seconds),
    )
    if handles is not None and not handles.tags:
        step = build_step_schedule(
            run.parallel.pipeline, mesh.pp.size, 1, overlap=run.parallel.overlap, forward_only=True
        )
        open_channels(handles, channels(step), device)
    dual_batch = DualBatchOverlap()
    if run.parallel.overlap_experts:
        overlap_token_exchanges(chunks, dual_batch)
    return PipelineModel(run, mesh, device, tuple(chunks), handles, dual_batch=dual_batch)


def overlap_token_exchanges(chunks: Sequence[nn.Module], dual_batch: DualBatchOverlap) -> None:
    """Let token dispatch and combine switch to the other of two microbatches while they wait."""
    for mixture in (
        module for chunk in chunks for module in chunk.modules() if isinstance(module, MoE)
    ):
        mixture.overlap_fn(dual_batch)


def add_weight_grad_stores(pipeline_model: PipelineModel) -> PipelineModel:
    """Add stores of deferred weight gradients if the schedule needs them.

    The gradient accumulators of the layers must exist already.
    """
    if not splits_backward(pipeline_model.run.parallel.pipeline, pipeline_model.mesh.pp.size):
        return pipeline_model
    layers = (
        [m for m in chunk.modules() if isinstance(m, TensorParallel)]
        for chunk in pipeline_model.chunks
    )
    return replace(pipeline_model, weights=tuple(WeightGradStore(each) for each in layers))


def splits_backward(pipeline: PipelineConfig, pp: int) -> bool:
    """Return whether the schedule computes weight gradients separately from the rest of
    backward."""
    return schedule_name(effective_pipeline(pipeline, pp)) in SPLIT_SCHEDULES


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
