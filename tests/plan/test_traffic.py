"""Tests of megalith/plan/traffic.py: what real ranks give their collectives is what the plan says."""

from collections import defaultdict

import pytest
import torch

from megalith.config.train import TrainRun
from megalith.data.loader import Batch, StepBatches
from megalith.kernels.tokens import tokens_of_rows
from megalith.parallel.mesh import build_mesh, destroy_mesh, model_grid
from megalith.plan.traffic import sent, step_traffic
from megalith.plan.workload import plan_workload
from megalith.testing.inject import slow_link
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.build import build_trainer
from megalith.train.step import train_step

FLAGS = 64
"""Bytes of messages that carry single numbers, which the plan leaves out."""

Sums = dict[tuple[str, str, int], tuple[int, int]]
"""(axis, kind, ranks) -> calls and bytes."""


def recorded(rank: int, world: int, run: TrainRun) -> Sums:
    """What one step of one rank sends, as its collectives are given it."""
    grid = model_grid(run.parallel, run.model, world)
    mesh = build_mesh(grid, rank=rank)
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    rows, length = run.train.micro_batch_size, run.train.seq_len
    ids = torch.arange(rows * length) % run.model.vocab_size
    batch = Batch(ids=ids, labels=ids, tokens=tokens_of_rows(rows, length, device="cpu"), num_labels=ids.numel())
    many = run.train.global_batch_size // (rows * mesh.dp.size)
    with slow_link() as link:
        train_step(trainer, StepBatches([batch] * many, ids.numel() * many), lr=1e-3, weight_decay=0.0)
    found: Sums = defaultdict(lambda: (0, 0))
    sizes = {"_".join(span): group.size for span, group in mesh.groups.items()}
    for transfer in link.transfers:
        if transfer.nbytes > FLAGS:
            key = (transfer.group[:2], transfer.kind, sizes[transfer.group])
            calls, nbytes = found[key]
            found[key] = calls + 1, nbytes + transfer.nbytes
    destroy_mesh(mesh)
    return dict(found)


def planned(run: TrainRun, world: int, rank: int) -> Sums:
    """The same from the plan."""
    workload = plan_workload(run, world)
    place = workload.grid.coordinates(rank)
    found: Sums = defaultdict(lambda: (0, 0))
    for row in step_traffic(workload, place["pp"], place["tp"]):
        key = (row.axis, row.kind, row.ranks)
        calls, nbytes = found[key]
        found[key] = calls + row.calls, nbytes + row.nbytes
    return dict(found)


def assert_plan_holds(world: int, settings: dict[str, str]) -> None:
    run = tiny_run(settings | {"parallel.bucket_numel": "2000"})
    for rank, found in enumerate(run_ranks(recorded, world, run)):
        expected = planned(run, world, rank)
        assert {key: calls for key, (calls, _) in found.items()} == {key: calls for key, (calls, _) in expected.items()}
        for key, (calls, nbytes) in found.items():
            assert abs(nbytes - expected[key][1]) <= calls, (rank, key)  # each call's bytes are rounded


@pytest.mark.parametrize(
    "world, settings",
    [
        (2, {"parallel.dp": "2"}),
        (3, {"parallel.dp": "3", "train.micro_batch_size": "1"}),
        (2, {"parallel.tp": "2"}),
        (2, {"parallel.tp": "2", "parallel.sp": "true"}),
        (4, {"parallel.tp": "4", "parallel.sp": "true", "precision.params": "bf16"}),
        (4, {"parallel.tp": "2", "parallel.dp": "2", "model.tied_embeddings": "true"}),
    ],
)
def test_a_step_sends_what_the_plan_says(world: int, settings: dict[str, str]) -> None:
    assert_plan_holds(world, settings)


@pytest.mark.parametrize("sp", ["true", "false"])
@pytest.mark.parametrize(
    "again",
    [
        {"recompute.granularity": "full", "recompute.num_layers": "2"},
        {"recompute.granularity": "full", "recompute.method": "block"},
        {"recompute.granularity": "selective", "recompute.modules": "[mlp]"},
        {"recompute.granularity": "selective", "recompute.modules": "[norm, core_attention, mlp_act]"},
    ],
)
def test_recomputation_sends_its_part_again(sp: str, again: dict[str, str]) -> None:
    assert_plan_holds(2, {"parallel.tp": "2", "parallel.sp": sp} | again)


def test_shared_inputs_of_recomputed_layers_are_gathered() -> None:
    assert_plan_holds(2, {"parallel.tp": "2", "recompute.granularity": "full", "recompute.shard_inputs": "true"})


def test_a_ring_sends_all_but_one_part() -> None:
    assert sent("reduce_scatter", 900, 3) == sent("all_gather", 900, 3) == 600
    assert sent("all_reduce", 900, 3) == 1200
    assert sent("message", 900, 2) == 900
