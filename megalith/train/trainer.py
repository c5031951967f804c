"""Builds what a training step needs from the config: model, gradient synchronization, optimizer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalith.checkpoint.format import CheckpointEntry
from megalith.config.kernels import BackendName
from megalith.config.optim import OptimConfig, OptimizerStatesConfig
from megalith.config.parallel import PipelineConfig
from megalith.config.train import TrainRun
from megalith.errors import raise_all
from megalith.kernels.backend import Backends, select_backends, unavailable_backends
from megalith.launch.watchdog import backend_timeout
from megalith.models.decoder import build_chunks, iter_parameter_specs
from megalith.nn.build import BuildContext, build_context, init_param_
from megalith.observe.machine import DTYPES
from megalith.observe.timers import Timers
from megalith.optim.assigned_ranks import build_matrix_updater
from megalith.optim.diloco import OuterOptimizer
from megalith.optim.ema import EMA, WeightEMA
from megalith.optim.loss_scale import build_loss_scale
from megalith.optim.optimizer import BuildMatrixUpdater, RuleOptimizer, is_clipped
from megalith.optim.qk_clip import QKClip
from megalith.optim.slots import (
    FP32_STATES,
    MASTER,
    Optimizer,
    RatesOf,
    equal_rates,
    find_first_replicas,
)
from megalith.parallel.collectives import no_overlap
from megalith.parallel.cross_entropy import (
    LossWithLogitStats,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    recomputed_cross_entropy,
    recomputed_cross_entropy_with_stats,
)
from megalith.parallel.data import BucketedDataParallel
from megalith.parallel.grad_sync import GradSync, can_shard_weights
from megalith.parallel.mesh import Mesh
from megalith.parallel.p2p import create_pipeline_groups, open_channels
from megalith.parallel.pipeline import DualBatchOverlap, WeightGradStore
from megalith.parallel.tensor import iter_vocab_heads
from megalith.parallel.tensor_overlap import RING_EXCHANGE, choose_collective_matmul
from megalith.plan.kernels import explicit_backend_problems, select_optimizer_backend
from megalith.plan.param_groups import parameter_rates
from megalith.plan.parameters import ParameterRates
from megalith.plan.qk_clip import list_attentions
from megalith.plan.schedule import SPLIT_SCHEDULES, channels, effective_pipeline, schedule_name
from megalith.plan.shards import Shard, is_first_replica
from megalith.plan.state_encodings import block_alignment
from megalith.train.attention_scores import ScoreMonitor
from megalith.train.forward_backward import PipelineModel, build_step_schedule
from megalith.train.moe import update_expert_biases, update_quantile_offsets
from megalith.train.objective import build_objective
from megalith.train.step import Trainer, WeightUpdate

# --- optimizer


def build_optimizer(
    weights: Sequence[tuple[Shard, Tensor]],
    config: OptimConfig,
    rates: RatesOf = equal_rates,
    build_updater: BuildMatrixUpdater | None = None,
    *,
    states: OptimizerStatesConfig = FP32_STATES,
    seed: int = 0,
    backend: BackendName = "torch",
) -> Optimizer:
    """Build the optimizer over these shards; `rates`: update rule and factors of each parameter;
    `build_updater`: of rules per matrix, which is collective over a pipeline stage; `states`:
    formats of master weights and moments; `seed`: of stochastic rounding; `backend`:
    `kernels.optimizer`."""
    return RuleOptimizer(
        weights, config, rates, build_updater, states=states, seed=seed, backend=backend
    )


# --- model chunks of this rank and their losses


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
    heads = iter_vocab_heads(chunks)
    stats = tuple(
        head.summed_loss.logit_stats.pop
        for head in heads
        if isinstance(head.summed_loss, LossWithLogitStats)
    )
    return PipelineModel(
        run,
        mesh,
        device,
        tuple(chunks),
        nn.ModuleList(chunks),
        handles,
        build_objective(run),
        stats if logs_logit_stats(run) else None,
        weights,
        dual_batch,
        Timers(level=run.observe.timer_level, device=device),
    )


def splits_backward(pipeline: PipelineConfig, pp: int) -> bool:
    """Return whether the schedule computes weight gradients separately from the rest of
    backward."""
    return schedule_name(effective_pipeline(pipeline, pp)) in SPLIT_SCHEDULES


# --- state of a run


def build_trainer(
    run: TrainRun, mesh: Mesh, device: torch.device, *, fill: bool = True, fill_frozen: bool = True
) -> Trainer:
    """Build this rank's shards of the model, without allocating full tensors, and initialize them.

    `fill=False` leaves all weights at zero, for a checkpoint to load; `fill_frozen=False` leaves
    only the frozen weights at zero.
    """
    pipeline_model = build_pipeline_model(run, mesh, device, dtype=DTYPES[run.precision.params])
    model = pipeline_model.modules
    data = build_grad_sync(run, model, mesh, device, pipeline_model.weights)
    if fill:
        _init_weights(model, data, seed=run.seed, frozen=fill_frozen)
    for chunk in model if run.train.compile else ():
        for layer in chunk.get_submodule("layers").children():
            layer.compile()

    def rates(shard: Shard) -> ParameterRates:
        return parameter_rates(run.model, run.optim, shard.name, shard.inputs)

    optimizer = build_optimizer(
        [(param.shard, param.weight) for param in data.local_params],
        run.optim,
        rates,
        partial(
            build_matrix_updater,
            mesh=mesh,
            optim=run.optim,
            nope_dim=None if run.model.mla is None else run.model.mla.nope_dim,
            overlap=run.parallel.overlap,
            device=device,
        ),
        states=run.precision.optimizer_states,
        seed=run.seed,
        backend=select_optimizer_backend(run),
    )
    score_monitor = build_score_monitor(run, optimizer)
    ema = None if run.train.ema is None else WeightEMA(optimizer.slots, run.train.ema)
    outer = None
    if run.replica_group is not None and run.replica_group.mode == "diloco":
        outer = OuterOptimizer(optimizer.slots, run.replica_group.diloco)
    return Trainer(
        run,
        mesh,
        device,
        pipeline_model,
        data,
        optimizer,
        build_loss_scale(run.precision),
        find_first_replicas((param.shard for param in data.local_params), mesh),
        frozenset(slot.shard.name for slot in optimizer.slots if not is_clipped(slot, run.optim)),
        _list_weight_updates(run, optimizer, score_monitor, ema),
        ema,
        score_monitor,
        outer,
    )


def build_score_monitor(run: TrainRun, optimizer: Optimizer) -> ScoreMonitor | None:
    """Return what measures the largest attention scores for QK-clip or the log; None if the run
    has neither."""
    clip, logs = run.optim.qk_clip, run.observe.max_attention_logit
    if clip is None and not logs:
        return None
    attentions = list_attentions(run.model)
    qk_clip = None if clip is None else QKClip(optimizer.slots, attentions, clip)
    return ScoreMonitor(attentions, optimizer, logs, qk_clip)


def _list_weight_updates(
    run: TrainRun,
    optimizer: Optimizer,
    score_monitor: ScoreMonitor | None,
    ema: WeightEMA | None,
) -> tuple[WeightUpdate, ...]:
    """Return the updates after the optimizer's step; the moving average includes the others."""
    updates: list[WeightUpdate] = []
    if run.model.moe is not None:
        updates += [update_expert_biases, update_quantile_offsets]
    if score_monitor is not None and (qk_clip := score_monitor.clip) is not None:
        updates.append(lambda _model, _mesh: qk_clip.apply())
    if ema is not None:
        updates.append(lambda _model, _mesh: ema.update(optimizer.updates))
    return tuple(updates)


def build_grad_sync(
    run: TrainRun,
    model: nn.ModuleList,
    mesh: Mesh,
    device: torch.device,
    weight_grads: Sequence[WeightGradStore] = (),
) -> GradSync:
    """Allocate the parameters of this rank's model chunks and set up their gradient reduction.

    `weight_grads`: stores of deferred weight gradients by chunk; empty: nothing is deferred.

    Parameters whose `requires_grad` is False are frozen: they are initialized and saved, but have
    no gradients and no optimizer state.
    """
    p, watch = run.parallel, run.optim.nonfinite_grad == "raise"
    parameters = [
        (declared.shard, module, name) for declared, module, name in iter_parameter_specs(model)
    ]
    if p.zero == 3 and can_shard_weights(mesh):
        # imported here because FSDP2 takes half a second to load
        from megalith.parallel.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(
            list(model),
            parameters,
            mesh,
            device=device,
            keep_gathered=len(model) * p.pp > 1,
            watch=watch,
            overlap=p.overlap,
        )
    return BucketedDataParallel(
        model,
        parameters,
        mesh,
        p,
        device=device,
        compiled=run.train.compile,
        watch=watch,
        weight_grads=weight_grads,
        alignment=block_alignment(run.precision.optimizer_states),
    )


def _init_weights(model: nn.Module, data: GradSync, *, seed: int, frozen: bool) -> None:
    """Initialize the shards that this rank owns and all-gather the rest.

    Random values are keyed, so the weights are the same under every layout.
    """
    init_of = {declared.shard.name: declared.init for declared, _, _ in iter_parameter_specs(model)}
    for shard, weight in (
        *((param.shard, param.weight) for param in data.local_params),
        *(data.frozen if frozen else ()),
    ):
        init_param_(weight, shard, init_of[shard.name], seed=seed)
    data.all_gather_params()
    data.wait_params()


def all_gather_loaded_params(trainer: Trainer) -> None:
    """All-gather the parameters after the tensors of `checkpoint_entries` were loaded."""
    trainer.data.all_gather_params()
    trainer.data.wait_params()


def checkpoint_entries(trainer: Trainer) -> list[CheckpointEntry]:
    """Return this rank's shard of every tensor that a checkpoint holds; one replica writes each
    shard.

    A LoRA run saves only its adapters, not the frozen base weights.
    """
    coordinates = trainer.mesh.coordinates
    entries = []
    for number, slot in enumerate(trainer.optimizer.slots):
        tensors: dict[str, Tensor] = {"param": slot.weight, **slot.state}
        if slot.has_master:
            tensors[MASTER] = slot.master
        if trainer.ema is not None:
            tensors[EMA] = trainer.ema.averages[number]
        if trainer.outer is not None:
            tensors |= trainer.outer.list_state(number)
        is_writer = is_first_replica(slot.shard, coordinates)
        entries += [
            CheckpointEntry(slot.shard, role, tensor, is_writer, slot.encoded.get(role))
            for role, tensor in tensors.items()
        ]
    entries += [
        CheckpointEntry(shard, role, tensor, is_first_replica(shard, coordinates))
        for shard, role, tensor in trainer.optimizer.list_matrix_states()
    ]
    return entries + (
        weight_entries(trainer.data.frozen, trainer.mesh) if trainer.run.lora is None else []
    )


def weight_entries(parameters: Sequence[tuple[Shard, Tensor]], mesh: Mesh) -> list[CheckpointEntry]:
    """Return the checkpoint entries of parameters that have no optimizer state."""
    coordinates = mesh.coordinates
    return [
        CheckpointEntry(shard, "param", tensor, is_first_replica(shard, coordinates))
        for shard, tensor in parameters
    ]
