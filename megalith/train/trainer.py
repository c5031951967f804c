"""Builds what a training step needs from the config: model, gradient synchronization, optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.checkpoint.boxes import CheckpointEntry
from megalith.config.optim import OptimConfig
from megalith.config.plugins import load_plugin
from megalith.config.train import TrainRun
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.nn.init import init_param_
from megalith.optim.gradients import LossScale, build_loss_scale
from megalith.optim.optimizers import SGD, AdamW, Optimizer, RatesOf, equal_rates
from megalith.parallel.data import BucketedDataParallel
from megalith.parallel.grad_sync import GradSync, can_shard_weights
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline import WeightGradStore
from megalith.plan.param_groups import parameter_rates
from megalith.plan.parameters import ParameterRates
from megalith.plan.shards import Shard, is_first_replica
from megalith.train.forward_backward import (
    PipelineModel,
    build_pipeline_model,
)
from megalith.train.moe import update_expert_biases, update_quantile_offsets

# Builds the optimizer of a config.


def build_optimizer(
    weights: Sequence[tuple[Shard, Tensor]], config: OptimConfig, rates: RatesOf = equal_rates
) -> Optimizer:
    """Build the optimizer over these shards; `rates`: factors of each parameter."""
    if config.plugin is not None:
        optimizer: Optimizer = load_plugin("optimizer", config.plugin)(weights, config, rates)
        return optimizer
    return SGD(weights, config, rates) if config.kind == "sgd" else AdamW(weights, config, rates)


DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


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
    def model(self) -> Decoder:
        """The model, if this rank has only one model chunk."""
        (model,) = self.pipeline_model.chunks
        return model


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
    for chunk in pipeline_model.chunks if run.train.compile else ():
        for layer in chunk.layers:
            layer.compile()

    def rates(shard: Shard) -> ParameterRates:
        return parameter_rates(run.model, run.optim, shard.name, shard.inputs)

    optimizer = build_optimizer(
        [(param.shard, param.weight) for param in data.local_params], run.optim, rates
    )
    return Trainer(
        run,
        mesh,
        device,
        pipeline_model,
        data,
        optimizer,
        build_loss_scale(run.precision),
        () if run.model.moe is None else (update_expert_biases, update_quantile_offsets),
    )


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
        from megalith.parallel.fsdp import (
            FullyShardedDataParallel,
        )  # imported here because FSDP2 takes half a second to load

        return FullyShardedDataParallel(
            list(model),
            parameters,
            mesh,
            device=device,
            gradient_dtype=torch.promote_types(DTYPES[run.precision.params], torch.float32),
            keep_gathered=len(model) * p.pp > 1,
            watch=watch,
            overlap=p.overlap,
        )
    return BucketedDataParallel(
        model,
        parameters,
        mesh,
        device=device,
        bucket_numel=p.bucket_numel,
        overlap=p.overlap,
        accumulate_in_buckets=not run.train.compile,
        zero=p.zero,
        reduce_dtype=torch.bfloat16 if p.reduce_dtype == "bf16" else None,
        chunks=[]
        if run.train.compile
        else list(model),  # a compiled graph cannot wait for a gather
        watch=watch,
        weight_grads=weight_grads,
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
    for slot in trainer.optimizer.slots:
        tensors: dict[str, Tensor] = {"param": slot.weight, **slot.state}
        if slot.master is not slot.weight:
            tensors["master"] = slot.master
        is_writer = is_first_replica(slot.shard, coordinates)
        entries += [
            CheckpointEntry(slot.shard, role, tensor, is_writer) for role, tensor in tensors.items()
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
