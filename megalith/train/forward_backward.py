"""Forward and backward of the microbatches of a step through this rank's model chunks, and the
training losses: sums over heads (LM, MTP, aux), normalized by the global number of labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config.parallel import PipelineConfig
from megalith.config.plugins import load_plugin
from megalith.config.train import TrainRun
from megalith.data.loader import Batch
from megalith.errors import raise_all
from megalith.kernels.backend import Backends, select_backends, unavailable_backends
from megalith.kernels.layer_inputs import AuxLossScale
from megalith.kernels.packed import for_one_pass
from megalith.launch.watchdog import backend_timeout
from megalith.models.decoder import Decoder, build_chunks
from megalith.nn.build import BuildContext, build_context
from megalith.parallel.collectives import mark_partial, no_overlap
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
from megalith.parallel.pipeline import Boundary, DualBatchOverlap, Pipeline, WeightGradStore
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
from megalith.plan.stages import plan_stages, stage_boundary

# Training losses: LM and MTP losses of every head, normalized by the global number of labels.


def build_head_loss(run: TrainRun, backends: Backends) -> Callable[..., Tensor]:
    """Return the loss function of one output head; it records logit statistics if the run logs
    them."""
    train = run.train
    if train.loss_plugin is not None:
        plugin: Callable[..., Tensor] = load_plugin("loss", train.loss_plugin)
        return plugin
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
    return PipelineModel(run, mesh, device, tuple(chunks), handles, weights, dual_batch)


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
