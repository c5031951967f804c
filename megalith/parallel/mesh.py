"""Device mesh: the process groups of a run, created once from the rank grid and passed on as
explicit `Group`s."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from megalith.observe.flight import FlightRecorder
from megalith.parallel.group import Group
from megalith.plan.grid import Grid, dense_grid, expert_grid
from megalith.plan.shards import DATA_AXES, DENSE_AXES, EXPERT_AXES, EXPERT_PARTS, PARTS

MESH_AXES = ("pp", *DENSE_AXES, *EXPERT_AXES)
"""All axes, outer first, whatever their order over the ranks."""

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
"""Combinations of axes over which a run reduces, gathers or waits."""

EXPERT_SPANS: tuple[tuple[str, ...], ...] = (
    ("ep",),
    ("etp",),
    ("ep", "etp"),
    EXPERT_PARTS["edp"],
    ("edp_replica",),
    ("edp_shard",),
    (*PARTS["cp"], *PARTS["tp"]),
)
"""Additional combinations of axes of a model with experts."""

EXPERT_AXES_OUTER_FIRST = frozenset({"ep", "etp"})
"""Axes over which tokens are exchanged while gradients are reduced. Messages of one process group
wait for each other, so groups along these axes have their own handles, even if another axis has the
same ranks."""


NAMED_GROUPS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "dp": ("dp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "shard": ("dp_shard", "cp"),
    "world": ("pp", *DENSE_AXES),
}
"""Axes of the groups that are attributes of a mesh."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Device mesh of one rank: its position in the grid, and its group along every combination of
    axes."""

    grid: Grid
    rank: int
    groups: Mapping[tuple[str, ...], Group]
    coordinates: Mapping[str, int] = field(init=False, compare=False)
    """This rank's coordinate along every axis."""

    tp: Group = field(init=False, compare=False)
    """Tensor-parallel group: ranks that shard the weight matrices."""

    dp: Group = field(init=False, compare=False)
    """Data-parallel group: ranks that read other rows with the same weight shards."""

    cp: Group = field(init=False, compare=False)
    """Context-parallel group: ranks that share the tokens of the same rows."""

    pp: Group = field(init=False, compare=False)
    """Pipeline-parallel group: ranks of the other stages, first stage first."""

    dp_cp: Group = field(init=False, compare=False)
    """Ranks that compute other tokens with the same weight shards."""

    shard: Group = field(init=False, compare=False)
    """Ranks over which ZeRO shards gradients and optimizer state."""

    world: Group = field(init=False, compare=False)
    """All ranks of this grid."""

    def __post_init__(self) -> None:
        """Set this rank's coordinates and groups; a rank outside the grid has none."""
        if self.rank not in self.grid.ranks:
            object.__setattr__(self, "coordinates", {})
            return
        object.__setattr__(self, "coordinates", self.grid.coordinates(self.rank))
        for name, axes in NAMED_GROUPS.items():
            object.__setattr__(self, name, self.over(*axes))

    def over(self, *axes: str) -> Group:
        """Return this rank's group along `axes`, in any order; `tp` stands for `tp_kv` and
        `tp_copy`, and so on: see `PARTS`.

        A grid with experts also has groups along `ep`, `etp` and `edp`.
        """
        parts = {part for axis in axes for part in (PARTS | EXPERT_PARTS).get(axis, (axis,))}
        return self.groups[tuple(axis for axis in MESH_AXES if axis in parts)]


def build_mesh(
    grid: Grid, *, rank: int, timeout_seconds: float = 600.0, flight: FlightRecorder | None = None
) -> Mesh:
    """Create every group of `grid`; all ranks of the process group call this together, including
    those outside the grid.

    A grid may be built several times in one world, and at any offset. `flight` records this rank's
    collectives.
    """
    handles: dict[tuple[bool, tuple[tuple[int, ...], ...]], dist.ProcessGroup | None] = {}
    groups = {}
    for span in required_spans(grid):
        all_ranks = tuple(grid.groups(span))
        key = {*span} <= EXPERT_AXES_OUTER_FIRST, all_ranks
        if key not in handles:
            handles[key] = _new_groups(all_ranks, rank, "_".join(span), timeout_seconds)
        if rank in grid.ranks:
            groups[span] = _group(span, grid.find_group(rank, span), rank, handles[key], flight)
    return Mesh(grid, rank, groups)


def build_meta_mesh(grid: Grid, *, rank: int) -> Mesh:
    """Return the same groups without processes, for any rank of a world of any size, to build
    models on meta tensors."""
    groups = {}
    for span in required_spans(grid):
        ranks = grid.find_group(rank, span)
        groups[span] = Group(
            axes=span, ranks=ranks, rank=ranks.index(rank), name="paper-" + "-".join(span)
        )
    return Mesh(grid, rank, groups)


def required_spans(grid: Grid) -> tuple[tuple[str, ...], ...]:
    """Return all combinations of axes along which a run over this grid may need a group."""
    return SPANS if grid.experts is None else SPANS + EXPERT_SPANS


def build_single_rank_mesh() -> Mesh:
    """Return the mesh of one process without a process group: every axis has one rank."""
    grid = dense_grid(world=1)
    for axis, (outer, inner) in PARTS.items():
        grid = grid.factor(axis=axis, outer=(outer, 1), inner=(inner, 1))
    experts = expert_grid(world=1).factor(
        axis="edp", outer=("edp_replica", 1), inner=("edp_shard", 1)
    )
    return build_meta_mesh(replace(grid, experts=experts), rank=0)


def _new_groups(
    all_ranks: Sequence[tuple[int, ...]], rank: int, name: str, timeout_seconds: float
) -> dist.ProcessGroup | None:
    """Create each group of more than one rank, in the same order on all ranks, and return this
    rank's."""
    local_handle = None
    for ranks in all_ranks:
        if len(ranks) > 1:
            handle = dist.new_group(
                list(ranks), timeout=timedelta(seconds=timeout_seconds), group_desc=name
            )
            if rank in ranks:
                local_handle = handle
    return local_handle


def _group(
    span: tuple[str, ...],
    ranks: tuple[int, ...],
    rank: int,
    handle: dist.ProcessGroup | None,
    flight: FlightRecorder | None,
) -> Group:
    name = handle.group_name if handle is not None else ""
    return Group(
        axes=span, ranks=ranks, rank=ranks.index(rank), handle=handle, name=name, flight=flight
    )
