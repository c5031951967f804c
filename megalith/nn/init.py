"""Weight initialization: equal for a name and a seed under every parallel layout, drawn tile by
tile."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megalith.parallel.tensor import Init
from megalith.plan.keys import key
from megalith.plan.shards import Box, Shard, intersect, split_range_into_boxes

TILE = (128, 512)
"""Rows and columns of the last two dims that one generator draws; fixed, because it determines the
values."""


def init_param_(parameter: Tensor, shard: Shard, init: Init, *, seed: int) -> None:
    """Initialize the local box of `parameter`, or a flat range of it, in place.

    The global tensor is divided into tiles; each tile is drawn by a new generator keyed by (seed,
    name, tile), on the CPU and in fp32; only tiles that intersect the local box are drawn. So a
    value depends only on the seed, the name and its position.
    """
    start, stop = shard.flat or (0, shard.numel)
    local_boxes = split_range_into_boxes(shard.box_shape, start, stop)
    shapes = [[b - a for a, b in box] for box in local_boxes]
    with torch.no_grad():
        parts = (
            parameter.view(-1).split([math.prod(shape) for shape in shapes]) if local_boxes else ()
        )
        for box, shape, part in zip(local_boxes, shapes, parts, strict=True):
            global_box = tuple(
                (o + a, o + b) for (o, _), (a, b) in zip(shard.box, box, strict=True)
            )
            _fill_box(part.view(shape), global_box, shard, init, seed=seed)


def _fill_box(values: Tensor, box: Box, shard: Shard, init: Init, *, seed: int) -> None:
    """Initialize one box of a parameter."""
    if init.std == 0:
        values.fill_(init.offset)
    else:
        for tile in _tiles(shard.shape, box):
            overlap = intersect(tile, box)
            if overlap is not None:
                drawn = (
                    _draw(shard.name, tile, seed, uniform=init.uniform)
                    .mul_(init.std)
                    .add_(init.offset)
                )
                values[_within(overlap, box)] = drawn[_within(overlap, tile)].to(values.dtype)
    if init.rows is not None:
        values[max(0, init.rows - box[0][0]) :].zero_()


def _tiles(shape: tuple[int, ...], box: Box) -> Iterator[Box]:
    """Yield every tile of a tensor that may intersect a box of it."""
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
    """Draw a tile with variance 1."""
    generator = torch.Generator().manual_seed(
        key(seed, "init", name, *(start for start, _ in tile))
    )
    sizes = [stop - start for start, stop in tile]
    if uniform:
        return torch.rand(sizes, generator=generator).mul_(2).sub_(1).mul_(math.sqrt(3))
    return torch.randn(sizes, generator=generator)


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(slice(p[0] - w[0], p[1] - w[0]) for p, w in zip(part, whole, strict=True))
