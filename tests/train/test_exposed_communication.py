"""The table of a step's communication: number, duration and exposed time of the operations."""

from dataclasses import replace

import pytest
import torch

from megalith.config.parallel import ParallelConfig
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.exposed_communication import (
    ExposedCommunication,
    MeasuredTraffic,
    _group_axes,
    summarize_exposed_communication,
)

LATENCY = 0.005


def measured(rank: int, world: int) -> ExposedCommunication:
    run = tiny_run()
    run = replace(run, parallel=ParallelConfig(dp=2, zero=1, overlap=True, bucket_numel=2000))
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    return summarize_exposed_communication(
        run, mesh, torch.device("cpu"), steps=2, latency=LATENCY, bandwidth=1e9
    )


def test_every_rank_has_the_same_table_and_every_operation_takes_at_least_the_latency() -> None:
    table, other = run_ranks(measured, 2)
    assert table == other
    assert {row.over for row in table.traffic} == {"dp"}
    assert {"isend", "irecv", "all_reduce"} <= {row.kind for row in table.traffic}
    assert all(row.seconds >= row.per_step * LATENCY * 0.99 for row in table.traffic)
    # Nothing is computed while the gradient norm is reduced.
    assert LATENCY * 0.99 <= table.exposed <= table.step_seconds


def test_hidden_share_is_the_part_that_is_not_exposed() -> None:
    assert MeasuredTraffic("all_reduce", "dp", 3, 1.0, 0.2, 0.05).hidden == pytest.approx(0.75)
    assert MeasuredTraffic("all_reduce", "dp", 0, 0.0, 0.0, 0.0).hidden == 0.0


def test_groups_are_called_by_the_axes_of_the_settings() -> None:
    assert _group_axes("dp_replica_dp_shard") == "dp"
    assert _group_axes("pp-forward-up") == "pp"
    assert _group_axes("tp_copy") == "tp_copy"
    assert _group_axes("default_pg") == "default_pg"
