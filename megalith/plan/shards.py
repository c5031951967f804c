"""`Shard`: the slice of a named parameter that a rank holds, and the rows that each rank stores
under FSDP.

Initialization, gradient reduction, clipping, the optimizer, checkpoints and HF conversion use the
same record.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megalith.config.parallel import OffloadConfig, ParallelConfig
from megalith.plan.schedule import SPLIT_SCHEDULES, schedule_name

Box = tuple[tuple[int, int], ...]
"""(start, stop) along every dim of a tensor."""

DENSE_AXES = ("dp_replica", "dp_shard", "cp_ring", "cp_a2a", "tp_kv", "tp_copy")
"""Axes of the dense grid whose ranks hold the same layers, with dp, cp and tp split into two: ranks
with the same KV head differ along tp_copy; ranks of an all-to-all of heads along cp_a2a; ZeRO
shards along dp_shard."""

EXPERT_AXES = ("edp_replica", "edp_shard", "ep", "etp")
"""Axes of the expert grid whose ranks hold the same layers: along ep ranks hold different experts,
along etp different parts of them, and along edp, split as dp is, replicas."""

PARTS = {"dp": ("dp_replica", "dp_shard"), "cp": ("cp_ring", "cp_a2a"), "tp": ("tp_kv", "tp_copy")}
"""Parts of each split axis, outer first."""

EXPERT_PARTS = {"edp": ("edp_replica", "edp_shard")}
"""Parts of the split axis of the expert grid."""

DATA_AXES = (*PARTS["dp"], *PARTS["cp"])
"""Axes along which ranks compute different tokens with the same weights."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's slice of one parameter: a box of the global tensor, and the axes along which it is
    replicated."""

    name: str
    """Canonical name, e.g. `layers.17.attention.q`: stored in checkpoints, and the key of its
    initial values."""

    shape: tuple[int, ...]
    """Global shape, the same under every layout."""

    box: Box
    """This rank's box of the global tensor."""

    cut: tuple[str, ...] = ()
    """Axes along which the box differs from rank to rank."""

    invariant: frozenset[str] = frozenset()
    """Axes over which every rank already has the whole gradient, because each did the same work."""

    grid: Literal["dense", "expert"] = "dense"
    """Grid that the axes belong to."""

    flat: tuple[int, int] | None = None
    """Elements [start, stop) of the box, in row-major order, if the rank holds only these; None:
    all."""

    stages: tuple[int, ...] = (0,)
    """Pipeline ranks that hold this box, ascending; several for tied tables."""

    inputs: int = 1
    """Number of trailing dims that are inputs (columns of the stored matrix); 0 for a vector."""

    dtype: str = "fp32"
    """Dtype in which the layer computes with the parameter, named as in `precision.params`."""

    @property
    def wide_dtype(self) -> str:
        """Dtype of its master weights and summed gradients: at least fp32."""
        return "fp64" if self.dtype == "fp64" else "fp32"

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.box_shape)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of the stored matrix, with outputs as rows and inputs as columns, or of the
        vector."""
        shape = self.box_shape
        if self.inputs == 0:
            return (math.prod(shape),)
        rows = len(shape) - self.inputs
        return math.prod(shape[:rows]), math.prod(shape[rows:])

    @classmethod
    def full(
        cls,
        name: str,
        shape: tuple[int, ...],
        *,
        invariant: frozenset[str] = frozenset(),
        inputs: int = 1,
        dtype: str = "fp32",
    ) -> "Shard":
        """Return the shard of a parameter that every rank holds in full."""
        return cls(
            name=name,
            shape=shape,
            box=tuple((0, n) for n in shape),
            invariant=invariant,
            inputs=inputs,
            dtype=dtype,
        )

    def split_dim(self, dim: int, sizes: list[int], rank: int, axes: tuple[str, ...]) -> "Shard":
        """Return part number `rank` of this shard when `dim` is split into parts of `sizes` over
        `axes`."""
        assert sum(sizes) == self.shape[dim], (self.name, self.shape, sizes)
        start = sum(sizes[:rank])
        box = tuple(
            (start, start + sizes[rank]) if d == dim else span for d, span in enumerate(self.box)
        )
        return replace(self, box=box, cut=(*self.cut, *axes))


def copies(shard: Shard) -> tuple[str, ...]:
    """Return the axes along which the box is replicated."""
    axes = DENSE_AXES if shard.grid == "dense" else EXPERT_AXES
    return tuple(axis for axis in axes if axis not in shard.cut)


def gradient_sum_axes(shard: Shard) -> tuple[str, ...]:
    """Return the axes over which the gradient is summed: all replicas, except axes where it is
    invariant."""
    return tuple(axis for axis in copies(shard) if axis not in shard.invariant)


def is_first_replica(shard: Shard, coordinates: Mapping[str, int]) -> bool:
    """Return whether the rank at these coordinates is the first that holds the slice: it counts and
    writes it."""
    return coordinates["pp"] == shard.stages[0] and all(
        coordinates[axis] == 0 for axis in copies(shard)
    )


def split_range_into_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of a row-major tensor as at most 2 * dims - 1 boxes, in order.

    >>> split_range_into_boxes((5, 4), 3, 17)
    [((0, 1), (3, 4)), ((1, 4), (0, 4)), ((4, 5), (0, 1))]
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start, stop),)] if shape else [()]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return [((first, first + 1), *box) for box in split_range_into_boxes(shape[1:], head, tail)]
    boxes: list[Box] = []
    if head:
        boxes += [
            ((first, first + 1), *box) for box in split_range_into_boxes(shape[1:], head, inner)
        ]
        first += 1
    if first < last:
        boxes.append(((first, last), *((0, n) for n in shape[1:])))
    boxes += [((last, last + 1), *box) for box in split_range_into_boxes(shape[1:], 0, tail)]
    return boxes


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def key_value_ranks(num_kv_heads: int, tp: int) -> int:
    """Return the number of tensor-parallel ranks with different KV heads (tp_kv); tp / tp_kv ranks
    share each.

    >>> key_value_ranks(8, 4), key_value_ranks(2, 4)
    (4, 2)
    """
    return min(num_kv_heads, tp)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Attention heads of each tensor-parallel rank: a rank's query heads use only its KV heads."""

    queries: list[int]
    """Query heads of each tp rank."""

    keys: list[int]
    """KV heads of each tp_kv rank."""


def split_heads(num_heads: int, num_kv_heads: int, tp: int) -> HeadSplit:
    """Split whole KV heads over the ranks; if there are fewer than ranks, several ranks share one
    and its queries.

    >>> split_heads(8, 4, 3)
    HeadSplit(queries=[4, 2, 2], keys=[2, 1, 1])
    >>> split_heads(8, 2, 4)
    HeadSplit(queries=[2, 2, 2, 2], keys=[1, 1])
    """
    per_key = num_heads // num_kv_heads
    replica_ranks = key_value_ranks(num_kv_heads, tp)
    keys = split_evenly(num_kv_heads, replica_ranks)
    if replica_ranks == tp:
        return HeadSplit([count * per_key for count in keys], keys)
    return HeadSplit(split_evenly(per_key, tp // replica_ranks) * replica_ranks, keys)


def split_evenly(total: int, parts: int) -> list[int]:
    """Split `total` items over `parts` ranks as evenly as possible, the larger parts first.

    >>> split_evenly(8, 3)
    [3, 3, 2]
    """
    return [total // parts + (part < total % parts) for part in range(parts)]


# --- FSDP (ZeRO-3): rows of a parameter that each rank stores, unsupported combinations


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
