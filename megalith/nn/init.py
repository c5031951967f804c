"""First weights: the same for a name and a seed under every layout, drawn tile by tile, never as whole tensors."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megalith.parallel.tensor import Init
from megalith.plan.keys import key
from megalith.plan.shards import Box, Shard, intersect

TILE = (128, 512)
"""Rows and columns of the last two dims that one generator draws; fixed, because it decides the numbers."""


def fill(parameter: Tensor, shard: Shard, init: Init, *, seed: int) -> None:
    """Write the first values of my box into `parameter`, in place.

    The global tensor is cut into tiles; a tile comes from a fresh generator keyed by (seed, name, tile), on the CPU and
    in fp32; only the tiles that my box meets are drawn. So a value depends on the seed, the name and its place alone.
    """
    with torch.no_grad():
        box = parameter.view(shard.box_shape)
        if init.std == 0:
            box.fill_(init.offset)
        else:
            for tile in _tiles(shard):
                mine = intersect(tile, shard.box)
                if mine is not None:
                    drawn = _draw(shard.name, tile, seed).mul_(init.std).add_(init.offset)
                    box[_within(mine, shard.box)] = drawn[_within(mine, tile)].to(box.dtype)
        if init.rows is not None:
            first = max(0, init.rows - shard.box[0][0])
            box[first:].zero_()


def _tiles(shard: Shard) -> Iterator[Box]:
    """Every tile of the global tensor that can meet my box."""
    sizes = [1] * len(shard.shape)
    for dim, size in zip(range(len(shard.shape) - 1, -1, -1), reversed(TILE), strict=False):
        sizes[dim] = size
    spans = []
    for (start, stop), length, size in zip(shard.box, shard.shape, sizes, strict=True):
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


def _draw(name: str, tile: Box, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(key(seed, "init", name, *(start for start, _ in tile)))
    return torch.randn([stop - start for start, stop in tile], generator=generator)


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(slice(p[0] - w[0], p[1] - w[0]) for p, w in zip(part, whole, strict=True))
