"""One rank of the comparison of divided optimizer state: ours, FSDP2 and DistributedDataParallel take turns in it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from contenders.ours import LR, WEIGHT_DECAY
from contenders.ranks import LossModel, _my_part, _until_all_are_done
from paired import Turns, take_turns
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.kernels.memory import keep_freed_memory
from megalith.parallel.data import DataParallel
from megalith.parallel.group import all_reduce_
from megalith.parallel.mesh import Mesh, build_mesh, model_grid
from megalith.train.build import Trainer, build_trainer
from megalith.train.step import train_step


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank saw."""

    losses: dict[str, float]
    """Of the first step."""

    turns: Turns
    nbytes: dict[str, int]
    """Weights, gradients and optimizer state that this rank holds between backward and the update."""


class Adam:
    """What the two contenders have in common: fused AdamW with clipping, and a loss of the same parts."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, run: TrainRun, batches: StepBatches, mesh: Mesh) -> None:
        self.batches, self.mesh, self.clip_grad = batches, mesh, run.optim.clip_grad
        self.settings = {
            "lr": LR, "betas": (run.optim.beta1, run.optim.beta2), "eps": run.optim.eps, "weight_decay": WEIGHT_DECAY,
            "fused": True,
        }  # fmt: skip

    def step(self) -> float:
        """One update; the loss before it."""
        loss: Tensor = self.model(self.batches)
        (loss * self.mesh.dp.size).backward()  # their gradients are means over the ranks, ours are sums
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(all_reduce_(loss.detach(), self.mesh.dp))

    def nbytes(self) -> int:
        """Gradients are as large as the weights they are for."""
        state = (value for values in self.optimizer.state.values() for value in values.values())
        return 2 * _nbytes(self.model.parameters()) + _nbytes(value for value in state if isinstance(value, Tensor))


class FullySharded(Adam):
    """FSDP2: every layer a unit, and the rest one more. Weights stay gathered between forward and backward, which is
    its faster way (ZeRO-2 in what moves), unless `reshard`."""

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
    """DistributedDataParallel, and torch's ZeRO-1: whole parameters are dealt out over the ranks, then broadcast."""

    def __init__(self, run: TrainRun, batches: StepBatches, mesh: Mesh) -> None:
        super().__init__(run, batches, mesh)
        self.model = DistributedDataParallel(LossModel(run), process_group=mesh.dp.handle, gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class=torch.optim.AdamW, process_group=mesh.dp.handle,
            parameters_as_bucket_view=True, **self.settings,
        )  # fmt: skip

    def nbytes(self) -> int:
        """Its own part of the optimizer is a torch optimizer inside."""
        state = (value for values in self.optimizer.optim.state.values() for value in values.values())
        return 2 * _nbytes(self.model.parameters()) + _nbytes(value for value in state if isinstance(value, Tensor))


def run_rank(rank: int, world: int, run: TrainRun, rounds: int, warmup: int, reshard: bool) -> RankReport:
    """Every turn goes from barrier to barrier."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as `megalith train` does; the others share the process
    run = replace(run, parallel=ParallelConfig(zero=1))
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    batches = _my_part(run, rank, world)
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    fsdp, ddp = FullySharded(run, batches, mesh, reshard=reshard), Redundant(run, batches, mesh)

    def ours() -> float:
        return train_step(trainer, batches, lr=LR, weight_decay=WEIGHT_DECAY).loss

    steps: dict[str, Callable[[], float]] = {"ours": ours, "fsdp2": fsdp.step, "ddp": ddp.step}
    losses = {name: step() for name, step in steps.items()}
    turns = take_turns(
        {name: _until_all_are_done(step, mesh) for name, step in steps.items()}, rounds=rounds, warmup=warmup
    )
    return RankReport(losses, turns, {"ours": _our_nbytes(trainer), "fsdp2": fsdp.nbytes(), "ddp": ddp.nbytes()})


def _our_nbytes(trainer: Trainer) -> int:
    assert isinstance(trainer.data, DataParallel)
    state = (tensor for slot in trainer.optimizer.slots for tensor in slot.state.values())
    return trainer.data.weights.nbytes + trainer.data.gradients.nbytes + _nbytes(state)


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """What this rank holds of them."""
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)
