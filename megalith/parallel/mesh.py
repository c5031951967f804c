"""The mesh: every group of ranks a run needs, made once from the grid and handed out as explicit
`Group`s."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from megalith.observe.flight import Flight
from megalith.parallel.group import Group
from megalith.plan.grid import Grid, dense_grid, expert_grid
from megalith.plan.layout import (
    model_grid as model_grid,
)  # where it was; users of the mesh ask for both
from megalith.plan.shards import DATA_AXES, DENSE_AXES, EXPERT_AXES, EXPERT_PARTS, PARTS

MESH_AXES = ("pp", *DENSE_AXES, *EXPERT_AXES)
"""Every axis, outer first, whatever their order over the ranks is."""

SPANS: tuple[tuple[str, ...], ...] = (
    PARTS["tp"],
    ("tp_kv",),
    ("tp_copy",),
    PARTS["cp"],
    ("cp_ring",),
    ("cp_a2a",),
    PARTS["dp"],
    ("dp_replica",),
    ("dp_shard",),
    ("dp_shard", *PARTS["cp"]),
    DATA_AXES,
    ("pp",),
    DENSE_AXES,
    ("pp", *DENSE_AXES),
)
"""Combinations of axes that something sums, gathers or waits over."""

EXPERT_SPANS: tuple[tuple[str, ...], ...] = (
    ("ep",),
    ("etp",),
    ("ep", "etp"),
    EXPERT_PARTS["edp"],
    ("edp_replica",),
    ("edp_shard",),
    (*PARTS["cp"], *PARTS["tp"]),
)
"""The same in a model with experts."""

EXPERT_AXES_OUTER_FIRST = frozenset({"ep", "etp"})
"""Axes along which tokens travel while sums of gradients do. Messages of one process group wait
for one another, so groups along these are never those of other axes, even where their ranks are
the same."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """My place in the grid, and my group along every span of axes."""

    grid: Grid
    rank: int
    groups: Mapping[tuple[str, ...], Group]

    def over(self, *axes: str) -> Group:
        """My group along `axes`, in any order; `tp` stands for `tp_kv` and `tp_copy`, and so on:
        see `PARTS`.

        With experts there are also groups along `ep`, `etp` and `edp`.
        """
        wanted = {part for axis in axes for part in (PARTS | EXPERT_PARTS).get(axis, (axis,))}
        return self.groups[tuple(axis for axis in MESH_AXES if axis in wanted)]

    @property
    def tp(self) -> Group:
        """Ranks that split my weight matrices."""
        return self.over("tp")

    @property
    def dp(self) -> Group:
        """Ranks that read other rows with the same slices of the weights."""
        return self.over("dp")

    @property
    def cp(self) -> Group:
        """Ranks that share the tokens of my rows."""
        return self.over("cp")

    @property
    def pp(self) -> Group:
        """Ranks that hold the other layers, first stage first."""
        return self.over("pp")

    @property
    def dp_cp(self) -> Group:
        """Ranks that compute other tokens with the same slices of the weights."""
        return self.over("dp", "cp")

    @property
    def shard(self) -> Group:
        """Ranks that divide gradients and optimizer state under ZeRO."""
        return self.over("dp_shard", "cp")

    @property
    def world(self) -> Group:
        """Every rank of this grid."""
        return self.over("pp", *DENSE_AXES)

    @property
    def coordinates(self) -> dict[str, int]:
        """Where I stand on every axis."""
        return self.grid.coordinates(self.rank)


def build_mesh(
    grid: Grid, *, rank: int, timeout_seconds: float = 600.0, flight: Flight | None = None
) -> Mesh:
    """Make every group of `grid`. All ranks of the process group call this together, those outside
    the grid too.

    A grid may be built several times in one world, and at any offset. `flight` records what this
    rank then enters.
    """
    made: dict[tuple[bool, tuple[tuple[int, ...], ...]], dist.ProcessGroup | None] = {}
    groups = {}
    for span in spans_of(grid):
        every = tuple(grid.groups(span))
        wanted = {*span} <= EXPERT_AXES_OUTER_FIRST, every
        if wanted not in made:
            made[wanted] = _new_groups(every, rank, "_".join(span), timeout_seconds)
        if rank in grid.ranks:
            groups[span] = _group(span, grid.group_of(rank, span), rank, made[wanted], flight)
    return Mesh(grid, rank, groups)


def mesh_on_paper(grid: Grid, *, rank: int) -> Mesh:
    """The same groups without processes, at any place of a world of any size: enough to build on
    meta tensors."""
    groups = {}
    for span in spans_of(grid):
        ranks = grid.group_of(rank, span)
        groups[span] = Group(
            axes=span, ranks=ranks, rank=ranks.index(rank), name="paper-" + "-".join(span)
        )
    return Mesh(grid, rank, groups)


def spans_of(grid: Grid) -> tuple[tuple[str, ...], ...]:
    """Every combination of axes that a run over this grid may need a group along."""
    return SPANS if grid.experts is None else SPANS + EXPERT_SPANS


def mesh_of_one() -> Mesh:
    """One process, no process group: every axis has one rank."""
    grid = dense_grid(world=1)
    for axis, (outer, inner) in PARTS.items():
        grid = grid.factor(axis=axis, outer=(outer, 1), inner=(inner, 1))
    experts = expert_grid(world=1).factor(
        axis="edp", outer=("edp_replica", 1), inner=("edp_shard", 1)
    )
    return mesh_on_paper(replace(grid, experts=experts), rank=0)


def destroy_mesh(mesh: Mesh) -> None:
    """Release the process groups of a mesh; gloo may abort an exit that leaves them."""
    for handle in {group.handle for group in mesh.groups.values() if group.handle is not None}:
        dist.destroy_process_group(handle)


def _new_groups(
    every: Sequence[tuple[int, ...]], rank: int, name: str, timeout_seconds: float
) -> dist.ProcessGroup | None:
    """Make each group of more than one rank, in the same order on every rank; give back mine."""
    mine = None
    for ranks in every:
        if len(ranks) > 1:
            handle = dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout_seconds), group_desc=name
            )
            if rank in ranks:
                mine = handle
    return mine


def _group(
    span: tuple[str, ...],
    ranks: tuple[int, ...],
    rank: int,
    handle: dist.ProcessGroup | None,
    flight: Flight | None,
) -> Group:
    name = handle.group_name if handle is not None else ""
    return Group(
        axes=span, ranks=ranks, rank=ranks.index(rank), handle=handle, name=name, flight=flight
    )
