"""Build the rank grids of a run from its parallel degrees; dp, cp and tp are each split into two
axes."""

from dataclasses import replace
from math import lcm

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.plan.grid import Grid, dense_grid, expert_grid
from megalith.plan.shards import EXPERT_PARTS, PARTS, key_value_ranks


def model_grid(
    parallel: ParallelConfig, model: ModelConfig, world: int, *, offset: int = 0
) -> Grid:
    """Return the dense grid of a run, with tp, cp and dp each split into two axes (`DENSE_AXES`).

    Raises:
        PlanError: the degrees do not multiply to the world size.
    """
    p = parallel
    grid = dense_grid(world=world, tp=p.tp, cp=p.cp, pp=p.pp, dp=p.dp, order=p.order, offset=offset)
    heads = key_value_ranks(model.num_kv_heads, p.tp)
    a2a = {"a2a": p.cp, "a2a+ring": p.context.a2a or 1}.get(p.context.kind, 1) if p.cp > 1 else 1
    inner = {"tp": p.tp // heads, "cp": a2a, "dp": grid.size("dp") // p.dp_replicate}
    for axis, size in inner.items():
        outer_name, inner_name = PARTS[axis]
        grid = grid.factor(
            axis=axis, outer=(outer_name, grid.size(axis) // size), inner=(inner_name, size)
        )
    return (
        grid
        if model.moe is None
        else replace(grid, experts=build_expert_grid(parallel, world, offset=offset))
    )


def build_expert_grid(parallel: ParallelConfig, world: int, *, offset: int = 0) -> Grid:
    """Return the grid of the expert layers over the same ranks, with edp split into two axes.

    Raises:
        PlanError: ep, etp and pp do not divide the world size.
    """
    p = parallel
    etp = p.tp if p.etp is None else p.etp
    grid = expert_grid(world=world, etp=etp, ep=p.ep, pp=p.pp, order=p.order, offset=offset)
    replica, shard = EXPERT_PARTS["edp"]
    return grid.factor(
        axis="edp",
        outer=(replica, p.dp_replicate),
        inner=(shard, grid.size("edp") // p.dp_replicate),
    )


def min_world_size(parallel: ParallelConfig) -> int:
    """Return the smallest world size of a layout; 1 if a degree is not positive, which the config
    rules report.

    All experts are held by ep · etp ranks of each stage; with ep=1 and etp unset the dense degrees
    decide.
    """
    p = parallel
    dense = p.tp * p.cp * p.pp * (p.dp if p.dp is not None else max(p.dp_replicate, 1))
    experts = p.ep * (p.tp if p.etp is None else p.etp) * p.pp * max(p.dp_replicate, 1)
    return max(
        1, dense if p.dp is not None or (p.ep == 1 and p.etp is None) else lcm(dense, experts)
    )
