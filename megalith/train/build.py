"""From a config to what a step needs: model, data-parallel engine, optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.checkpoint.boxes import Entry
from megalith.config.train import TrainRun
from megalith.models.decoder import Decoder, declared_parameters, initialise
from megalith.optim.adamw import AdamW
from megalith.parallel.data import DataParallel
from megalith.parallel.mesh import Mesh
from megalith.plan.shards import Shard, copies

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class Trainer:
    """Everything one rank computes with."""

    run: TrainRun
    mesh: Mesh
    device: torch.device
    model: Decoder
    data: DataParallel
    optimizer: AdamW


def build_trainer(run: TrainRun, mesh: Mesh, device: torch.device, *, fill: bool = True) -> Trainer:
    """Build this rank's part of the model without whole tensors anywhere, and give it its first weights.

    `fill=False` leaves weights at zero, for a checkpoint to fill.
    """
    dtype = DTYPES[run.precision.params]
    model = Decoder(
        run.model, mesh, sp=run.parallel.sp, dtype=dtype, context=run.parallel.context, recompute=run.recompute,
        offload=run.offload,
    )  # fmt: skip
    data = DataParallel(
        model, [(declared.shard, module, name) for declared, module, name in declared_parameters(model)], mesh,
        device=device, gradient_dtype=torch.promote_types(dtype, torch.float32), bucket_numel=run.parallel.bucket_numel,
        overlap=run.parallel.overlap, sinks=not run.train.compile,
    )  # fmt: skip
    if fill:
        initialise(model, seed=run.seed)
    if run.train.compile:
        for layer in model.layers:
            layer.compile()
    optimizer = AdamW([(owned.shard, owned.weight) for owned in data.owned], run.optim)
    return Trainer(run, mesh, device, model, data, optimizer)


def checkpoint_entries(trainer: Trainer) -> list[Entry]:
    """Every tensor that a checkpoint holds, with the slice of it that this rank has; each slice is written once."""
    entries = []
    for slot in trainer.optimizer.slots:
        tensors: dict[str, Tensor] = {"param": slot.weight, "exp_avg": slot.exp_avg, "exp_avg_sq": slot.exp_avg_sq}
        if slot.master is not slot.weight:
            tensors["master"] = slot.master
        mine = is_first_holder(slot.shard, trainer.mesh)
        entries += [Entry(slot.shard, role, tensor, mine) for role, tensor in tensors.items()]
    return entries


def weight_entries(parameters: Sequence[tuple[Shard, Tensor]], mesh: Mesh) -> list[Entry]:
    """Weights alone, for reading into a model that is not trained."""
    return [Entry(shard, "param", tensor, is_first_holder(shard, mesh)) for shard, tensor in parameters]


def is_first_holder(shard: Shard, mesh: Mesh) -> bool:
    """Whether no rank before me holds the same slice."""
    here = mesh.coordinates
    return all(here[axis] == 0 for axis in copies(shard))
