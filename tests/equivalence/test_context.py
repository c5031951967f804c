"""Whole steps with shared tokens: a slow link of the ring is hidden."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.data.loader import BatchSettings, Loader
from megalith.kernels.attention import split_kv
from megalith.parallel import context
from megalith.parallel.group import Group
from megalith.parallel.mesh import build_mesh
from megalith.parallel.tensor_overlap import PendingCollective, start_ring_exchange
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched, slow_link
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify.ranks import RaggedRows

CPU = torch.device("cpu")
NAP, LATENCY = 0.040, 0.034
"""Of each of five steps of attention in a layer, forward and backward; of each of three messages:
half as much."""


def _slowly(function: Callable[..., None], *arguments: Any) -> None:
    function(*arguments)
    time.sleep(NAP)


def _at_once(x: Tensor, group: Group) -> PendingCollective:
    """A ring that hides nothing."""
    return PendingCollective(START(x, group).wait())


START = start_ring_exchange


def _exposed(
    rank: int, world: int, count: int, no_overlap: bool = False
) -> tuple[float, float, float]:
    """Seconds of a step in which no keys are waited for, that the link adds to them, and that a
    rank stands still.

    Attention sleeps for what a device would compute meanwhile, so that little depends on the cores
    of this machine; the shortest of some steps counts.
    """
    run = tiny_run({"parallel.cp": str(world), "train.micro_batch_size": "12"})
    trainer = build_trainer(
        run, build_mesh(model_grid(run.parallel, run.model, world), rank=rank), CPU
    )
    loader = Loader(
        RaggedRows(run.train.seq_len, run.model.vocab_size, 12 * count, masked=(0, 1, 2)),
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=12),
        trainer.mesh.dp,
        consumed=0,
        steps=count,
        device=CPU,
        slicing=context.local_slicing(run.parallel, trainer.mesh),
    )
    whole, exposed = [], []
    with (
        patched(context, "start_ring_exchange", _at_once if no_overlap else START),
        patched(context, "attend", partial(_slowly, split_kv.attend)),
        patched(context, "attend_backward", partial(_slowly, split_kv.attend_backward)),
        slow_link(latency_seconds=LATENCY) as link,
    ):
        for _ in range(count):
            batch = loader.next()
            dist.barrier()
            before, start = link.exposed_seconds(), time.perf_counter()
            ring = link.exposed_seconds("all_to_all")
            train_step(trainer, batch, lr=1e-2, weight_decay=0.1)
            exposed.append(link.exposed_seconds("all_to_all") - ring)
            whole.append(time.perf_counter() - start - (link.exposed_seconds() - before))
        trainer.data.wait_params()
    passed = link.select("all_to_all")
    assert len(passed) == count * run.model.num_layers * 3 * (world - 1) and all(
        one.waits == 1 for one in passed
    )
    return min(whole), link.added_seconds("all_to_all") / count, min(exposed)


@pytest.mark.slow
def test_ring_attention_hides_four_fifths_of_its_communication() -> None:
    """Keys and values behind a step of attention, forward and backward, and their gradients behind
    another."""
    for whole, added, exposed in run_ranks(_exposed, 2, 6):
        assert added > 0.4 * whole  # 0.5 on an idle machine
        assert exposed < 0.2 * added, (whole, added, exposed)


@pytest.mark.slow
def test_comparison_detects_a_ring_without_overlap() -> None:
    assert all(exposed > 0.9 * added for _, added, exposed in run_ranks(_exposed, 2, 1, True))
