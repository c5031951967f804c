"""One rank of the comparison of divided optimizer state: ours, FSDP2 and DistributedDataParallel
take turns in it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from contenders.ranks import Adam, LossModel, compare_steps, set_up
from paired import Turns
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.parallel.data import BucketedDataParallel
from megalith.parallel.mesh import Mesh
from megalith.train.step import Trainer


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank saw."""

    losses: dict[str, float]
    """Of the first step."""

    turns: Turns
    nbytes: dict[str, int]
    """Weights, gradients and optimizer state that this rank holds between backward and the
    update."""


class FullyShardedDataParallel(Adam):
    """FSDP2: every layer a unit, and the rest one more. Weights stay gathered between forward
    and backward, which is its faster way (ZeRO-2 in what moves), unless `reshard`."""

    def __init__(self, run: TrainRun, batches: StepBatches, mesh: Mesh, *, reshard: bool) -> None:
        super().__init__(run, batches, mesh)
        self.model = LossModel(run)
        assert mesh.dp.handle is not None
        devices = DeviceMesh.from_group(mesh.dp.handle, "cpu")
        for layer in self.model.decoder.layers:
            fully_shard(layer, mesh=devices, reshard_after_forward=reshard)
        fully_shard(self.model, mesh=devices, reshard_after_forward=reshard)
        assert isinstance(self.model, FSDPModule)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **self.settings)


class Redundant(Adam):
    """DistributedDataParallel, and torch's ZeRO-1: whole parameters are dealt out over the ranks,
    then broadcast."""

    def __init__(self, run: TrainRun, batches: StepBatches, mesh: Mesh) -> None:
        super().__init__(run, batches, mesh)
        self.model = DistributedDataParallel(
            LossModel(run), process_group=mesh.dp.handle, gradient_as_bucket_view=True
        )
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=torch.optim.AdamW,
            process_group=mesh.dp.handle,
            parameters_as_bucket_view=True,
            **self.settings,
        )


def run_rank(
    rank: int, world: int, run: TrainRun, rounds: int, warmup: int, reshard: bool
) -> RankReport:
    """Every turn goes from barrier to barrier."""
    run = replace(run, parallel=ParallelConfig(zero=1))
    trainer, batches = set_up(rank, world, run)
    fsdp = FullyShardedDataParallel(run, batches, trainer.mesh, reshard=reshard)
    ddp = Redundant(run, batches, trainer.mesh)
    losses, turns = compare_steps(
        trainer, batches, {"fsdp2": fsdp.step, "ddp": ddp.step}, rounds=rounds, warmup=warmup
    )
    nbytes = {
        "ours": _our_nbytes(trainer),
        "fsdp2": _their_nbytes(fsdp.model, fsdp.optimizer),
        "ddp": _their_nbytes(
            ddp.model, ddp.optimizer.optim
        ),  # its own part of the optimizer is one of torch's inside
    }
    return RankReport(losses, turns, nbytes)


def _their_nbytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Gradients are as large as the weights they are for."""
    state = (value for values in optimizer.state.values() for value in values.values())
    return 2 * _nbytes(model.parameters()) + _nbytes(
        value for value in state if isinstance(value, Tensor)
    )


def _our_nbytes(trainer: Trainer) -> int:
    assert isinstance(trainer.data, BucketedDataParallel)
    state = (tensor for slot in trainer.optimizer.slots for tensor in slot.state.values())
    return sum(map(_nbytes, (trainer.data.weights, trainer.data.gradients))) + _nbytes(state)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """What this rank holds of them."""
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)
