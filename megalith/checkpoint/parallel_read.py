"""Parallel reading of a checkpoint: a stored box that several ranks need is read and hashed by one
of them, which sends it to the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalith.checkpoint.format import DTYPES, StoredBox, TensorPiece, inner_view, lengths
from megalith.checkpoint.manifest import Manifest
from megalith.parallel.group import Group, raise_on_all_ranks
from megalith.parallel.transfer import exchange_shared_boxes
from megalith.plan.shards import Box, intersect
from megalith.plan.shared_reads import SharedRead, plan_shared_reads
from megalith.plan.transfer import box_numel

ReadBox = Callable[[str, StoredBox], Tensor]
"""Reads one stored box of a tensor and checks its hash."""


@dataclass(frozen=True, slots=True)
class NeededBox:
    """A stored box of a checkpoint, and the parts of it that this rank needs."""

    key: str
    stored: StoredBox
    parts: Sequence[tuple[TensorPiece, Box]]

    def fill(self, values: Tensor) -> None:
        """Copy the values of the stored box to this rank's pieces."""
        stored = TensorPiece(self.stored.box, values)
        for piece, box in self.parts:
            inner_view(piece, box).copy_(inner_view(stored, box))


def list_needed_boxes(
    manifest: Manifest, wanted: Mapping[str, Sequence[TensorPiece]]
) -> list[NeededBox]:
    """Return the stored boxes that overlap the wanted pieces, in file order, for sequential
    reads."""
    needed = [
        NeededBox(key, stored, parts)
        for key, wanted_pieces in wanted.items()
        for stored in manifest.tensors[key].boxes
        if (parts := _overlaps(wanted_pieces, stored.box))
    ]
    return sorted(needed, key=lambda box: (box.stored.file, box.stored.offset))


def _overlaps(wanted: Sequence[TensorPiece], stored: Box) -> list[tuple[TensorPiece, Box]]:
    shared = ((piece, intersect(piece.box, stored)) for piece in wanted)
    return [(piece, box) for piece, box in shared if box is not None]


def fill_in_parallel(
    manifest: Manifest,
    wanted: Mapping[str, Sequence[TensorPiece]],
    read: ReadBox,
    world: Group,
    *,
    buffer_nbytes: int,
) -> None:
    """Fill the pieces of every rank, reading each stored box once. Collective.

    A rank holds at most two buffers of `buffer_nbytes`, or one larger box, in host memory.

    Raises:
        CheckpointError: on every rank: a file could not be read or is damaged.
    """
    keys = sorted(manifest.tensors)
    places = [(key, stored) for key in keys for stored in manifest.tensors[key].boxes]
    numbers = {(key, stored.box): number for number, (key, stored) in enumerate(places)}
    needed = {
        numbers[each.key, each.stored.box]: each for each in list_needed_boxes(manifest, wanted)
    }
    dtypes = {key: DTYPES[manifest.tensors[key].dtype] for key in keys}
    rank_numbers = raise_on_all_ranks(lambda: [*needed], world)
    nbytes = {
        number: box_numel(places[number][1].box) * dtypes[places[number][0]].itemsize
        for number in {number for numbers in rank_numbers for number in numbers}
    }
    plan = plan_shared_reads(rank_numbers, nbytes, buffer_nbytes=buffer_nbytes)

    def fill_own() -> None:
        for number in plan.own[world.rank]:
            needed[number].fill(read(needed[number].key, needed[number].stored))

    def read_shared(reads: Sequence[SharedRead], values: dict[int, Tensor]) -> None:
        for shared in reads:
            if shared.reader == world.rank:
                box = needed[shared.box]
                values[shared.box] = read(box.key, box.stored)

    raise_on_all_ranks(fill_own, world)
    for reads in plan.rounds:
        values: dict[int, Tensor] = {}
        raise_on_all_ranks(partial(read_shared, reads, values), world)
        for shared in reads:
            if world.rank in shared.receivers:
                key, stored = places[shared.box]
                values[shared.box] = torch.empty(lengths(stored.box), dtype=dtypes[key])
        exchange_shared_boxes(reads, values, world)
        for number, tensor in values.items():
            needed[number].fill(tensor)
