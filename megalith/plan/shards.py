"""`Shard`: which slice of which named parameter a rank owns, written once and read by everything
else.

Initial weights, gradient sums, clipping, the optimizer, checkpoints and conversion all read the
same record.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Box = tuple[tuple[int, int], ...]
"""(start, stop) along every dim of a tensor."""

DENSE_AXES = ("dp_replica", "dp_shard", "cp_ring", "cp_a2a", "tp_kv", "tp_copy")
"""Axes of the dense grid that hold the same layers, each of dp, cp and tp in two parts: ranks
that share a key/value head differ along tp_copy; those that exchange heads in context
parallelism along cp_a2a; those that divide optimizer state along dp_shard."""

EXPERT_AXES = ("edp_replica", "edp_shard", "ep", "etp")
"""Axes of the expert grid that hold the same layers: ranks differ in their experts along ep, in
what part of them along etp, and along edp, which is in two parts as dp is, hold the same."""

PARTS = {"dp": ("dp_replica", "dp_shard"), "cp": ("cp_ring", "cp_a2a"), "tp": ("tp_kv", "tp_copy")}
"""The parts of each axis, outer first."""

EXPERT_PARTS = {"edp": ("edp_replica", "edp_shard")}
"""The same of the expert grid."""

DATA_AXES = (*PARTS["dp"], *PARTS["cp"])
"""Axes along which ranks compute other tokens with the same weights."""


@dataclass(frozen=True, slots=True)
class Shard:
    """My slice of one parameter: a box of its global tensor, and which other ranks hold the same
    box."""

    name: str
    """Canonical name, e.g. `layers.17.attention.q`: a file format, and the key of its initial
    weights."""

    shape: tuple[int, ...]
    """Of the whole parameter, the same under every layout."""

    box: Box
    """My part of it."""

    cut: tuple[str, ...] = ()
    """Axes along which the box differs from rank to rank."""

    invariant: frozenset[str] = frozenset()
    """Axes over which every rank already has the whole gradient (each did the same work with
    it)."""

    grid: Literal["dense", "expert"] = "dense"
    """Which factorization of the world the axes belong to."""

    flat: tuple[int, int] | None = None
    """Elements [start, stop) of my box, in row-major order, when only these are mine; None: all."""

    stages: tuple[int, ...] = (0,)
    """Pipeline ranks that hold this box, ascending; several for a table that the first and the last
    stage share."""

    inputs: int = 1
    """How many of the last dims are inputs, the columns of the matrix as it lies in memory; 0 for a
    vector."""

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Lengths of the box."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.box_shape)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """How the box lies in memory: a matrix with outputs as rows and inputs as columns, or a
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
    ) -> "Shard":
        """Return the shard of a parameter that every rank holds in full."""
        return cls(
            name=name,
            shape=shape,
            box=tuple((0, n) for n in shape),
            invariant=invariant,
            inputs=inputs,
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
    """Axes along which other ranks hold the same box."""
    axes = DENSE_AXES if shard.grid == "dense" else EXPERT_AXES
    return tuple(axis for axis in axes if axis not in shard.cut)


def summed_over(shard: Shard) -> tuple[str, ...]:
    """The gradient rule: a gradient is summed over all ranks that hold the same box, except where
    it is Invariant."""
    return tuple(axis for axis in copies(shard) if axis not in shard.invariant)


def is_first_replica(shard: Shard, here: Mapping[str, int]) -> bool:
    """Whether no rank before the one at these coordinates holds the same slice: it counts and
    writes the slice."""
    return here["pp"] == shard.stages[0] and all(here[axis] == 0 for axis in copies(shard))


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of a row-major tensor as at most 2 * dims - 1 boxes, in order.

    >>> boxes_of_range((5, 4), 3, 17)
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
        return [((first, first + 1), *box) for box in boxes_of_range(shape[1:], head, tail)]
    boxes: list[Box] = []
    if head:
        boxes += [((first, first + 1), *box) for box in boxes_of_range(shape[1:], head, inner)]
        first += 1
    if first < last:
        boxes.append(((first, last), *((0, n) for n in shape[1:])))
    boxes += [((last, last + 1), *box) for box in boxes_of_range(shape[1:], 0, tail)]
    return boxes


def intersect(a: Box, b: Box) -> Box | None:
    """The box that `a` and `b` share, or None."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def key_value_ranks(num_kv_heads: int, tp: int) -> int:
    """Tensor-parallel ranks that hold different key/value heads (tp_kv); tp / tp_kv of them share
    each part.

    >>> key_value_ranks(8, 4), key_value_ranks(2, 4)
    (4, 2)
    """
    return min(num_kv_heads, tp)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """How attention heads divide over tensor-parallel ranks: a rank's query heads use only its
    key/value heads."""

    queries: list[int]
    """Query heads of each tp rank."""

    keys: list[int]
    """Key/value heads of each tp_kv rank."""


def split_heads(num_heads: int, num_kv_heads: int, tp: int) -> HeadSplit:
    """Divide whole key/value heads first; when there are fewer than ranks, several ranks share one
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
    """How `total` items divide over `parts` ranks: as evenly as can be, the larger parts first.

    >>> split_evenly(8, 3)
    [3, 3, 2]
    """
    return [total // parts + (part < total % parts) for part in range(parts)]
