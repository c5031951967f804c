"""One rank of the comparison with DistributedDataParallel: both contenders live in every rank and
take turns."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from contenders.ours import LR, WEIGHT_DECAY, random_step
from paired import Turns, take_turns
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.models.decoder import Decoder, allocate, initialize
from megalith.nn.build import build_context
from megalith.parallel.group import all_reduce_, barrier
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import DTYPES, build_trainer


class LossModel(nn.Module):
    """Our model without data parallelism of ours: gradients arrive in `.grad`, as plain autograd
    leaves them."""

    def __init__(self, run: TrainRun) -> None:
        super().__init__()
        self.decoder = Decoder(
            build_context(run.model, build_single_rank_mesh(), dtype=DTYPES[run.precision.params])
        )
        allocate(self.decoder, torch.device("cpu"))
        initialize(self.decoder, seed=run.seed)

    def forward(self, batches: StepBatches) -> Tensor:
        """The loss of the only microbatch, as a share of the mean over the labels of all ranks."""
        (batch,) = batches.microbatches
        loss: Tensor = self.decoder.loss(batch.ids, batch.labels, batch.layer_inputs())
        return loss / batches.num_labels


class Adam:
    """What torch's contenders have in common: fused AdamW with clipping, and a loss of the same
    parts."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, run: TrainRun, batches: StepBatches, mesh: Mesh) -> None:
        self.batches, self.mesh, self.clip_grad = batches, mesh, run.optim.clip_grad
        self.settings = {
            "lr": LR,
            "betas": (run.optim.beta1, run.optim.beta2),
            "eps": run.optim.eps,
            "weight_decay": WEIGHT_DECAY,
            "fused": True,
        }

    def step(self) -> float:
        """One update; the loss before it."""
        loss: Tensor = self.model(self.batches)
        # their gradients are means over the ranks, ours are sums
        (loss * self.mesh.dp.size).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(all_reduce_(loss.detach(), self.mesh.dp))


class Replicated(Adam):
    """The same model under torch's DistributedDataParallel."""

    def __init__(self, run: TrainRun, batches: StepBatches, mesh: Mesh) -> None:
        super().__init__(run, batches, mesh)
        self.model = DistributedDataParallel(
            LossModel(run), process_group=mesh.dp.handle, gradient_as_bucket_view=True
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **self.settings)


def run_rank(
    rank: int, world: int, run: TrainRun, rounds: int, warmup: int
) -> tuple[dict[str, float], Turns]:
    """Losses of the first step, and what every turn took."""
    trainer, batches = set_up(rank, world, run)
    return compare_steps(
        trainer,
        batches,
        {"ddp": Replicated(run, batches, trainer.mesh).step},
        rounds=rounds,
        warmup=warmup,
    )


def set_up(rank: int, world: int, run: TrainRun) -> tuple[Trainer, StepBatches]:
    """Ours, and what all compute: an equal part of the step's rows as one microbatch, other rows on
    every rank."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as `megalith train` does; the others share the process
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    rows = run.train.global_batch_size // world
    local = replace(run, train=replace(run.train, global_batch_size=rows, micro_batch_size=rows))
    batches = random_step(local, torch.device("cpu"), seed=rank)
    batches = StepBatches(batches.microbatches, batches.num_labels * world)
    return build_trainer(run, mesh, torch.device("cpu")), batches


def compare_steps(
    trainer: Trainer,
    batches: StepBatches,
    theirs: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warmup: int,
) -> tuple[dict[str, float], Turns]:
    """Losses of the first step of ours and theirs, and what every turn took, each from barrier to
    barrier."""
    steps = {
        "ours": lambda: train_step(trainer, batches, lr=LR, weight_decay=WEIGHT_DECAY).loss,
        **theirs,
    }
    losses = {name: step() for name, step in steps.items()}
    turns = {name: _until_all_are_done(step, trainer.mesh) for name, step in steps.items()}
    return losses, take_turns(turns, rounds=rounds, warmup=warmup)


def _until_all_are_done(step: Callable[[], object], mesh: Mesh) -> Callable[[], None]:
    def turn() -> None:
        step()
        barrier(mesh.world)

    return turn
