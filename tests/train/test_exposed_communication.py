"""What is exposed is what a rank stands still for: gradient sums hide behind backward, with overlap
off they do not."""

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


def measured(rank: int, world: int, overlap: bool) -> ExposedCommunication:
    run = tiny_run()
    run = replace(run, parallel=ParallelConfig(dp=2, zero=1, overlap=overlap, bucket_numel=2000))
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    return summarize_exposed_communication(
        run, mesh, torch.device("cpu"), steps=2, latency=0.005, bandwidth=1e9
    )


def test_every_rank_has_the_same_table_and_overlap_exposes_less() -> None:
    # others compute, too
    pairs = [(run_ranks(measured, 2, True), run_ranks(measured, 2, False)) for _ in range(3)]
    hidden = pairs[0][0]
    assert hidden[0] == hidden[1]
    assert {each.over for each in hidden[0].traffic} == {"dp"}
    assert {"isend", "irecv", "all_reduce"} <= {each.kind for each in hidden[0].traffic}
    assert all(plain[0].exposed <= plain[0].step_seconds for _, plain in pairs)
    assert min(hidden[0].exposed for hidden, _ in pairs) < min(
        plain[0].exposed for _, plain in pairs
    )


def test_hidden_share_is_the_part_that_is_not_exposed() -> None:
    assert MeasuredTraffic("all_reduce", "dp", 3, 1.0, 0.2, 0.05).hidden == pytest.approx(0.75)
    assert MeasuredTraffic("all_reduce", "dp", 0, 0.0, 0.0, 0.0).hidden == 0.0


def test_groups_are_called_by_the_axes_of_the_settings() -> None:
    assert _group_axes("dp_replica_dp_shard") == "dp"
    assert _group_axes("pp-forward-up") == "pp"
    assert _group_axes("tp_copy") == "tp_copy"
    assert _group_axes("default_pg") == "default_pg"
