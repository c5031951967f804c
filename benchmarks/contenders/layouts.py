"""Layouts of two ranks against each other: ways to overlap tensor parallelism's messages, and a
pipeline.

All of them live in the same two processes, compute the same step, and take turns, from barrier to
barrier.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from contenders.ours import LR, WEIGHT_DECAY, random_step
from paired import take_turns, times_as_fast

from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.errors import ConfigError
from megalith.parallel.group import barrier
from megalith.parallel.mesh import build_mesh
from megalith.plan.costs import flops_per_token
from megalith.plan.grid import model_grid
from megalith.testing.inject import fused_on_cpus
from megalith.train.distributed import Job, join_job
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer

RANKS = 2
LAYOUTS: Mapping[str, ParallelConfig] = {
    "tp plain": ParallelConfig(tp=RANKS, sp=True, overlap=False),
    "tp overlapped": ParallelConfig(tp=RANKS, sp=True),
    "tp rings, messages": ParallelConfig(
        tp=RANKS, sp=True, tp_comm_overlap=True, collective_matmul="ring_exchange"
    ),
    "tp rings, fused": ParallelConfig(
        tp=RANKS, sp=True, tp_comm_overlap=True, collective_matmul="fused"
    ),
    "pipeline, 1f1b": ParallelConfig(pp=RANKS),
}
"""No layout divides rows, so that all compute the same ones."""


def compare_layouts(run: TrainRun, *, rounds: int) -> int:
    """One rank's part: rank 0 prints every layout's rate, and how it compares with plain tensor
    parallelism."""
    first = replace(run, parallel=LAYOUTS["tp plain"])
    with join_job(first, os.environ) as job, _served(job.device):
        steps = dict(_build(run, job))
        losses = {name: step() for name, step in steps.items()}
        turns = take_turns(
            {name: partial(_until_all_are_done, step, job) for name, step in steps.items()},
            rounds=rounds,
            warmup=3,
        )
        if job.first:
            _show(run, losses, turns.seconds, cpu=job.device.type == "cpu")
    return 0


@contextmanager
def _served(device: torch.device) -> Iterator[None]:
    """On CPUs a rehearsal: torch's own definition of the fused operators, which says nothing about
    their speed."""
    if device.type != "cpu":
        yield
        return
    with fused_on_cpus():
        yield


def _build(run: TrainRun, job: Job) -> Iterator[tuple[str, Callable[[], float]]]:
    """A step of every layout that this machine serves; the others are named, with the reason."""
    batches = random_step(run, job.device)
    for name, parallel in LAYOUTS.items():
        each, world = replace(run, parallel=parallel), job.mesh.world
        mesh = build_mesh(model_grid(parallel, run.model, world.size), rank=world.rank)
        try:
            trainer = build_trainer(each, mesh, job.device)
        except ConfigError as error:  # on every rank
            if job.first:
                print(f"  {name:22} left out: {error}", flush=True)
            continue
        yield (
            name,
            partial(_step, partial(train_step, trainer, batches, lr=LR, weight_decay=WEIGHT_DECAY)),
        )


def _step(step: Callable[[], object]) -> float:
    loss: float = step().loss  # type: ignore[attr-defined]  # what train_step gives
    return loss


def _until_all_are_done(step: Callable[[], float], job: Job) -> None:
    step()
    if job.device.type != "cpu":
        torch.cuda.synchronize(job.device)
    barrier(job.mesh.world)


def _show(
    run: TrainRun, losses: Mapping[str, float], seconds: Mapping[str, list[float]], *, cpu: bool
) -> None:
    tokens, flops = (
        run.train.global_batch_size * run.train.seq_len,
        flops_per_token(run.model, run.train.seq_len),
    )
    for name, times in seconds.items():
        rate = tokens / times_as_fast([1.0] * len(times), times).median
        print(
            f"  {name:22} {rate:12,.0f} tokens/s {rate * flops / RANKS / 1e12:8.1f} TFLOP/s per "
            "rank, "
            f"{times_as_fast(times, seconds['tp plain'])} of tp plain, loss {losses[name]:.4f}"
        )
    if cpu:
        print(
            "  a rehearsal on CPUs: fused products ran as torch's definition of them, one after "
            "the other"
        )
