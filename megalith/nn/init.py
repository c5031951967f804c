"""First weights: the same for a name and a seed under every layout, drawn tile by tile, never as
whole tensors."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megalith.parallel.tensor import Init
from megalith.plan.keys import key
from megalith.plan.shards import Box, Shard, boxes_of_range, intersect

TILE = (128, 512)
"""Rows and columns of the last two dims that one generator draws; fixed, because it decides the
numbers."""


def init_param_(parameter: Tensor, shard: Shard, init: Init, *, seed: int) -> None:
    """Write the first values of my box, or of my flat range of it, into `parameter`, in place.

    The global tensor is cut into tiles; a tile comes from a fresh generator keyed by (seed, name,
    tile), on the CPU and in fp32; only the tiles that my box meets are drawn. So a value depends on
    the seed, the name and its place alone.
    """
    start, stop = shard.flat or (0, shard.numel)
    inside = boxes_of_range(shard.box_shape, start, stop)
    shapes = [[b - a for a, b in box] for box in inside]
    with torch.no_grad():
        parts = parameter.view(-1).split([math.prod(shape) for shape in shapes]) if inside else ()
        for box, shape, part in zip(inside, shapes, parts, strict=True):
            whole = tuple((o + a, o + b) for (o, _), (a, b) in zip(shard.box, box, strict=True))
            _fill_box(part.view(shape), whole, shard, init, seed=seed)


def _fill_box(values: Tensor, box: Box, shard: Shard, init: Init, *, seed: int) -> None:
    """Write the first values of one box of a parameter."""
    if init.std == 0:
        values.fill_(init.offset)
    else:
        for tile in _tiles(shard.shape, box):
            mine = intersect(tile, box)
            if mine is not None:
                drawn = (
                    _draw(shard.name, tile, seed, uniform=init.uniform)
                    .mul_(init.std)
                    .add_(init.offset)
                )
                values[_within(mine, box)] = drawn[_within(mine, tile)].to(values.dtype)
    if init.rows is not None:
        values[max(0, init.rows - box[0][0]) :].zero_()


def _tiles(shape: tuple[int, ...], box: Box) -> Iterator[Box]:
    """Every tile of a tensor that can meet a box of it."""
    sizes = [1] * len(shape)
    for dim, size in zip(range(len(shape) - 1, -1, -1), reversed(TILE), strict=False):
        sizes[dim] = size
    spans = []
    for (start, stop), length, size in zip(box, shape, sizes, strict=True):
        firsts = range(start // size * size, stop, size)
        spans.append([(first, min(first + size, length)) for first in firsts])
    yield from _product(spans)


def _product(spans: list[list[tuple[int, int]]]) -> Iterator[Box]:
    if not spans:
        yield ()
        return
    for span in spans[0]:
        for rest in _product(spans[1:]):
            yield (span, *rest)


def _draw(name: str, tile: Box, seed: int, *, uniform: bool) -> Tensor:
    """Of variance 1."""
    generator = torch.Generator().manual_seed(
        key(seed, "init", name, *(start for start, _ in tile))
    )
    sizes = [stop - start for start, stop in tile]
    if uniform:
        return torch.rand(sizes, generator=generator).mul_(2).sub_(1).mul_(math.sqrt(3))
    return torch.randn(sizes, generator=generator)


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(slice(p[0] - w[0], p[1] - w[0]) for p, w in zip(part, whole, strict=True))
