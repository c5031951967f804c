"""Forward and backward of the microbatches of a step through this rank's model chunks, and the
training losses: sums over heads (LM, MTP, aux), normalized by the global number of labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.parallel import PipelineConfig
from megalith.config.train import TrainRun
from megalith.data.loader import Batch
from megalith.errors import raise_all
from megalith.kernels.backend import Backends, select_backends, unavailable_backends
from megalith.kernels.packed import for_one_pass
from megalith.launch.watchdog import backend_timeout
from megalith.models.decoder import Decoder, build_chunks
from megalith.nn.build import BuildContext, build_context
from megalith.parallel.collectives import no_overlap
from megalith.parallel.cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    recomputed_cross_entropy,
    recomputed_cross_entropy_with_stats,
)
from megalith.parallel.group import all_reduce_max_
from megalith.parallel.logits import LossWithLogitStats
from megalith.parallel.mesh import Mesh
from megalith.parallel.p2p import (
    PipelineGroups,
    Spec,
    Specs,
    Tensors,
    create_pipeline_groups,
    open_channels,
)
from megalith.parallel.pipeline import DualBatchOverlap, Pipeline, WeightGradStore
from megalith.parallel.symm_mem import choose_collective_matmul
from megalith.parallel.tensor import VocabParallelHead
from megalith.parallel.tensor_overlap import RING_EXCHANGE
from megalith.plan.kernels import explicit_backend_problems
from megalith.plan.p2p import channels, with_transfers
from megalith.plan.schedule import (
    SPLIT_SCHEDULES,
    Schedule,
    build_schedule,
    effective_pipeline,
    pair_forward_backward,
    schedule_name,
)
from megalith.plan.stages import Stage, StageBoundary, plan_stages, stage_boundary
from megalith.train.objective import (
    LossNormalizer,
    Objective,
    build_objective,
    check_loss_names,
    sum_eval_losses,
)

# Losses of the output heads.


def build_head_loss(run: TrainRun, backends: Backends) -> Callable[..., Tensor]:
    """Return the loss function of one output head; it records logit statistics if the run logs
    them."""
    train = run.train
    loss_kwargs: dict[str, Any] = (
        {"smoothing": train.label_smoothing} if train.label_smoothing else {}
    )  # Any: keyword arguments
    loss_kwargs |= {} if train.loss_chunk is None else {"chunk": train.loss_chunk}
    recomputes = train.loss_backward == "recomputed"
    if logs_logit_stats(run):
        with_stats = (
            recomputed_cross_entropy_with_stats if recomputes else linear_cross_entropy_with_stats
        )
        return LossWithLogitStats(
            partial(backends.bind("cross_entropy", with_stats), **loss_kwargs), train.z_loss
        )
    loss_fn = backends.bind(
        "cross_entropy", recomputed_cross_entropy if recomputes else linear_cross_entropy
    )
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


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """This rank's model chunks and their pipeline stages; without a pipeline, one chunk with the
    whole model."""

    run: TrainRun
    mesh: Mesh
    device: torch.device
    chunks: tuple[Decoder, ...]
    handles: PipelineGroups | None
    objective: Objective
    """Training losses, computed on the rank with the output head."""

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

    def forward_backward(self, batches: Sequence[Batch], normalizer: LossNormalizer) -> Tensor:
        """Run forward and backward of all microbatches; return the summed losses in the order of
        the objective: float64 [losses], 0 on ranks without the output head."""
        total = torch.zeros(len(normalizer.terms), dtype=torch.float64, device=self.device)
        self._run(batches, total, normalizer)
        return total

    def forward(self, batches: Sequence[Batch]) -> Tensor:
        """Run forward of all microbatches; return the sums of `sum_eval_losses`, 0 on ranks without
        the output head."""
        depths = self.run.model.mtp.num_layers
        num_sums = 2 + 2 * depths if depths else 1
        total = torch.zeros(num_sums, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            self._run(batches, total, None)
        return total

    def _run(
        self, batches: Sequence[Batch], total: Tensor, normalizer: LossNormalizer | None
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
        )
        steps = [
            _ChunkStep(
                chunk,
                schedule.stage_of(self.mesh.pp.rank, number),
                boundaries,
                self.objective,
                normalizer,
                total,
            )
            for number, chunk in enumerate(self.chunks)
        ]
        pipeline.run(schedule, steps)

    def _boundaries(self, batches: Sequence[Batch]) -> "StageBoundaries":
        """Return the tensors between stages; every rank of a pipeline reads the same rows."""
        model, p, chunk = self.run.model, self.run.parallel, self.chunks[0]
        stages = plan_stages(
            p.pipeline, pp=p.pp, num_layers=model.num_layers, depths=model.mtp.num_layers
        )
        dtypes = {"residual": chunk.stream_dtype, "model": chunk.dtype}
        return StageBoundaries(model, stages, batches, self.boundary_split, dtypes)


@dataclass(frozen=True, slots=True)
class StageBoundaries:
    """Tensors between the pipeline stages of a step."""

    model: ModelConfig
    stages: Sequence[Stage]
    batches: Sequence[Batch]
    split: int
    """Number of ranks over which the tokens between stages are sharded."""

    dtypes: Mapping[str, torch.dtype]
    """Dtype of the residual stream and of the parameters."""

    def tensors(self, stage: int, microbatch: int) -> StageBoundary:
        """Return the description of what is sent across the boundary before a stage."""
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

    model: Decoder
    stage: int
    boundaries: StageBoundaries
    objective: Objective
    normalizer: LossNormalizer | None
    """None in evaluation."""

    total: Tensor
    """float64: the sums of the losses, which each microbatch adds to."""

    def __call__(self, microbatch: int, received: Tensors) -> Tensors:
        """Run one microbatch.

        Takes the tensors from the previous stage (none on the first) and returns those for the next
        stage, or the loss that backward starts from.
        """
        batches, normalizer = self.boundaries.batches, self.normalizer
        batch, aux_loss_scale = batches[microbatch], None
        if normalizer is not None and self.model.config.moe is not None:
            aux_loss_scale = normalizer.aux_loss_scale(microbatch, len(batches), batch.part)
        batch = replace(batch, seq_params=for_one_pass(batch.seq_params))
        inputs, boundary = batch.layer_inputs(aux_loss_scale), self.boundaries.tensors
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
            self.total.add_(sum_eval_losses(outputs, batch.labels, batch.mtp_inputs))
            return ()
        losses = self.objective(outputs, batch)
        check_loss_names(losses, normalizer.terms)
        self.total.add_(torch.stack([losses[name].detach() for name in normalizer.terms]))
        return (normalizer.scale_loss(losses),)


def build_run_context(
    run: TrainRun,
    mesh: Mesh,
    device: torch.device,
    *,
    dtype: torch.dtype,
    dual_batch: DualBatchOverlap,
) -> BuildContext:
    """Return what the layers of a run's model are built with. Collective if the layout overlaps
    tensor-parallel communication."""
    collective_matmul = (
        choose_collective_matmul(run.parallel.collective_matmul, mesh.tp, device)
        if run.parallel.tp_comm_overlap
        else RING_EXCHANGE
    )
    return build_context(
        run.model,
        mesh,
        run.parallel,
        collective_matmul=collective_matmul,
        dtype=dtype,
        backends=select_backends(run.kernels),
        recompute=run.recompute,
        offload=run.offload,
        lora=run.lora,
        optim=run.optim,
        build_loss=partial(build_head_loss, run),
        overlap_fn=dual_batch if run.parallel.overlap_experts else no_overlap,
    )


def build_pipeline_model(
    run: TrainRun, mesh: Mesh, device: torch.device, *, dtype: torch.dtype
) -> PipelineModel:
    """Build this rank's chunks, without allocating weights, and their communication channels.
    Collective."""
    raise_all(explicit_backend_problems(run, device.type, unavailable_backends()))
    dual_batch = DualBatchOverlap()
    chunks = build_chunks(build_run_context(run, mesh, device, dtype=dtype, dual_batch=dual_batch))
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
    splits = splits_backward(run.parallel.pipeline, mesh.pp.size)
    weights = tuple(WeightGradStore() for _ in chunks) if splits else ()
    return PipelineModel(
        run, mesh, device, tuple(chunks), handles, build_objective(run), weights, dual_batch
    )


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
