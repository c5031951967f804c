"""A mesh hands out exactly the groups of its grid, real or on paper, at any offset and as often as
wanted."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import PlanError
from megalith.parallel.group import Group, all_reduce_, gather_objects
from megalith.parallel.mesh import (
    SPANS,
    Mesh,
    build_mesh,
    build_meta_mesh,
    build_single_rank_mesh,
)
from megalith.plan.grid import Grid, model_grid
from megalith.testing.ranks import destroy_mesh, run_ranks

MODEL = ModelConfig(
    vocab_size=11,
    hidden_size=24,
    num_layers=1,
    num_heads=12,
    num_kv_heads=2,
    ffn_hidden_size=8,
    max_seq_len=8,
)


def grid_of(world: int, *, tp: int = 1, offset: int = 0, order: str = "tp-cp-ep-dp-pp") -> Grid:
    """A grid whose model has two key/value heads; three where tp is three."""
    model = replace(MODEL, num_kv_heads=3) if tp == 3 else MODEL
    return model_grid(ParallelConfig(tp=tp, order=order), model, world, offset=offset)


def check_against_grid(mesh: Mesh, rank: int) -> None:
    """Every span of the mesh is the grid's group, in order, with my place in it."""
    assert set(mesh.groups) == set(SPANS)
    for span in SPANS:
        group, ranks = mesh.over(*span), mesh.grid.find_group(rank, span)
        assert (group.axes, group.ranks, group.ranks[group.rank]) == (span, ranks, rank)


def _sums(rank: int, world: int, grid: Grid) -> None:
    mesh = build_mesh(grid, rank=rank, timeout_seconds=30)
    check_against_grid(mesh, rank)
    for group in mesh.groups.values():
        assert (group.handle is None) == (group.size == 1)
        total = all_reduce_(torch.tensor([2.0**rank]), group).item()
        assert total == sum(2.0**each for each in group.ranks)
        assert gather_objects(rank, group) == list(group.ranks)
        if group.handle is not None:
            assert group.name == group.handle.group_name


@pytest.mark.parametrize(
    "grid",
    [
        grid_of(3),
        grid_of(3, tp=3),
        grid_of(4, tp=2),
        grid_of(4, tp=4),
        grid_of(4, tp=2, order="dp-cp-ep-tp-pp"),
    ],
    ids=lambda grid: grid.table(),
)
def test_each_group_sums_over_the_ranks_of_the_grid(grid: Grid) -> None:
    run_ranks(_sums, grid.world, grid)


def _side_by_side(rank: int, world: int) -> list[tuple[int, ...] | None]:
    """Two grids in one world, each built by all ranks."""
    meshes = [
        build_mesh(grid_of(2, tp=2, offset=offset), rank=rank, timeout_seconds=30)
        for offset in (0, 2)
    ]
    inside = meshes[rank // 2]
    assert not meshes[1 - rank // 2].groups
    assert all_reduce_(torch.tensor([rank]), inside.tp).item() == sum(inside.tp.ranks)
    return [mesh.tp.ranks if mesh.groups else None for mesh in meshes]


def test_grids_with_offsets_share_one_world() -> None:
    assert run_ranks(_side_by_side, 4) == [[(0, 1), None]] * 2 + [[None, (2, 3)]] * 2


def _twice(rank: int, world: int) -> None:
    grid = grid_of(2, tp=2)
    first, second = (build_mesh(grid, rank=rank, timeout_seconds=30) for _ in range(2))
    assert first.tp.name != second.tp.name
    destroy_mesh(first)
    assert all_reduce_(torch.tensor([1.0]), second.tp).item() == 2.0
    destroy_mesh(second)
    destroy_mesh(build_mesh(grid, rank=rank, timeout_seconds=30))
    assert all_reduce_(torch.tensor([1.0]), _world(rank, world)).item() == 2.0


def _world(rank: int, world: int) -> Group:
    return Group(axes=("world",), ranks=tuple(range(world)), rank=rank, handle=dist.group.WORLD)


def test_mesh_can_be_built_again_and_released_independently() -> None:
    run_ranks(_twice, 2)


def _names(rank: int, world: int) -> dict[str, str]:
    grid = model_grid(
        ParallelConfig(ep=2), replace(MODEL, moe=MoEConfig(num_experts=2, ffn_hidden_size=4)), world
    )
    mesh = build_mesh(grid, rank=rank, timeout_seconds=30)
    assert all_reduce_(torch.tensor([1.0]), mesh.over("ep")).item() == 2.0
    return {axis: mesh.over(axis).name for axis in ("dp", "ep")} | {
        "both": mesh.over("ep", "etp").name
    }


def test_expert_groups_have_their_own_process_groups() -> None:
    names, _ = run_ranks(_names, 2)
    assert names["ep"] == names["both"] != names["dp"]


@pytest.mark.parametrize(("tp", "world"), [(1, 6), (2, 6), (3, 6), (4, 12), (8, 4096)])
def test_meta_mesh_has_the_groups_of_every_rank(tp: int, world: int) -> None:
    grid = grid_of(world, tp=tp)
    for rank in {0, 1, world // 2, world - 1}:
        mesh = build_meta_mesh(grid, rank=rank)
        check_against_grid(mesh, rank)
        assert all(group.handle is None and group.name for group in mesh.groups.values())
        assert mesh.coordinates["tp"] == rank % tp


def test_mesh_of_one_process_has_groups_of_one_rank() -> None:
    mesh = build_single_rank_mesh()
    assert {group.size for group in mesh.groups.values()} == {1}
    assert (mesh.tp.rank, mesh.dp.rank, mesh.world.ranks) == (0, 0, (0,))


def test_axes_may_be_named_in_any_order_and_tp_stands_for_its_two_parts() -> None:
    mesh = build_meta_mesh(grid_of(12, tp=4), rank=5)
    assert mesh.over("cp", "dp") is mesh.over("dp", "cp") is mesh.dp_cp
    assert mesh.over("tp") is mesh.over("tp_copy", "tp_kv") is mesh.tp
    assert mesh.world is mesh.over("tp", "cp", "dp", "pp")
    assert (mesh.tp.ranks, mesh.dp.ranks) == ((4, 5, 6, 7), (1, 5, 9))


@pytest.mark.parametrize(
    ("tp", "heads", "replica_ranks", "copies"),
    [(1, 2, 1, 1), (2, 2, 2, 1), (4, 2, 2, 2), (4, 1, 1, 4), (2, 4, 2, 1)],
)
def test_tp_has_two_axes_where_ranks_share_a_kv_head(
    tp: int, heads: int, replica_ranks: int, copies: int
) -> None:
    model = replace(MODEL, num_kv_heads=heads)
    grid = model_grid(ParallelConfig(tp=tp), model, tp)
    assert (grid.size("tp_kv"), grid.size("tp_copy"), grid.size("tp")) == (
        replica_ranks,
        copies,
        tp,
    )
    neighbors = build_meta_mesh(grid, rank=0).over("tp_copy").ranks
    assert neighbors == tuple(range(copies))


def test_degrees_that_do_not_multiply_to_the_world_size_are_rejected() -> None:
    with pytest.raises(PlanError, match=r"world_size=6 is not parallel.tp .* use 4 or 8 processes"):
        grid_of(6, tp=4)
