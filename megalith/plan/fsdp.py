"""Plan FSDP (ZeRO-3): the rows of a parameter that each rank stores, and unsupported
combinations."""

from dataclasses import replace

from megalith.config.parallel import ParallelConfig
from megalith.config.recompute import OffloadConfig
from megalith.plan.schedule import SPLIT_SCHEDULES, schedule_name
from megalith.plan.shards import Shard


def shard_rows(shard: Shard, rank: int, ranks: int, axes: tuple[str, ...]) -> Shard:
    """Return the rows of a matrix, or elements of a vector, that rank `rank` of `ranks` along
    `axes` stores.

    All ranks store equally many rows except the last ones, which store the remainder, possibly
    nothing.

    >>> from megalith.plan.shards import Shard
    >>> full = Shard.full("w", (5, 4))
    >>> [shard_rows(full, rank, 4, ("dp_shard",)).flat for rank in range(4)]
    [(0, 8), (8, 16), (16, 20), (20, 20)]
    """
    rows = shard.matrix_shape[0]
    columns, each = shard.numel // rows, -(-rows // ranks)
    start, stop = min(rank * each, rows), min((rank + 1) * each, rows)
    return replace(shard, flat=(start * columns, stop * columns), cut=(*shard.cut, *axes))


def padded_numel(shard: Shard, ranks: int) -> int:
    """Return the number of elements that every rank sends of a parameter: that of the first
    rank."""
    rows = shard.matrix_shape[0]
    return -(-rows // ranks) * (shard.numel // rows)


def fully_sharded_problems(parallel: ParallelConfig, offload: OffloadConfig) -> list[str]:
    """Return one error text for each setting that parallel.zero=3 does not support."""
    p = parallel
    problems: list[str] = []
    if p.zero != 3:
        return problems
    if p.reduce_dtype == "bf16":
        problems.append(
            f"parallel.reduce_dtype={p.reduce_dtype} with parallel.zero={p.zero}: its "
            "reduce-scatter "
            "is torch's, which would also add in bf16. Set parallel.reduce_dtype=fp32, or "
            "parallel.zero=2."
        )
    if p.pp * p.pipeline.vpp > 1 and schedule_name(p.pipeline) in SPLIT_SCHEDULES:
        problems.append(
            f"parallel.pipeline.schedule={schedule_name(p.pipeline)} with parallel.zero={p.zero}: "
            "the schedule defers weight gradients, but the gathered weights are freed after each "
            "backward. Set parallel.pipeline.schedule to one of 1f1b, interleaved, gpipe, or "
            "parallel.zero=2."
        )
    if offload.layers > 0:
        problems.append(
            f"offload.layers={offload.layers} with parallel.zero={p.zero}: the tensors a layer "
            "saves "
            "for backward include its gathered weights, which would be offloaded too. Set "
            "offload.layers=0, or parallel.zero=2."
        )
    return problems
