"""Messages that move a tensor from one sharding to another; no torch.

Boxes are half-open ranges per dimension in the coordinates of the whole tensor, as in `Shard`.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from megalith.errors import PlanError
from megalith.plan.shards import Box, intersect


class BoxTransfer(NamedTuple):
    """A part of the tensor that one rank sends to another."""

    sender: int
    receiver: int
    box: Box
    """In coordinates of the whole tensor."""

    source: Box
    """In coordinates of the sender's box `source_index`."""

    source_index: int
    target: Box
    """In coordinates of the receiver's box `target_index`."""

    target_index: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return box_numel(self.box)


def box_numel(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod(stop - start for start, stop in box)


class WeightTransfer(NamedTuple):
    """A part of a parameter that one rank sends to another, or copies if they are the same."""

    name: str
    transfer: BoxTransfer


def plan_weight_transfers(
    held: Sequence[Mapping[str, Sequence[Box]]],
    wanted: Sequence[Mapping[str, Sequence[Box]]],
    itemsizes: Mapping[str, int],
) -> list[WeightTransfer]:
    """Return the copies and messages after which every rank has the boxes of parameters that it
    wants, in the order of the parameters.

    held, wanted: boxes of each rank, by parameter; itemsizes: bytes of an element. Every wanted
    element is copied or sent exactly once, by the replica that sends the fewest bytes so far.

    >>> plan = plan_weight_transfers([{"w": [((0, 2),)]}], [{"w": [((0, 1),)]}], {"w": 4})
    >>> [(name, one.sender, one.receiver, one.box) for name, one in plan]
    [('w', 0, 0, ((0, 1),))]

    Raises:
        PlanError: no rank holds some wanted elements.
    """
    num_sent = [0] * len(held)
    transfers: list[WeightTransfer] = []
    for name in dict.fromkeys(name for boxes in wanted for name in boxes):
        held_boxes = [boxes.get(name, ()) for boxes in held]
        wanted_boxes = [boxes.get(name, ()) for boxes in wanted]
        try:
            planned = plan_transfers(
                held_boxes, wanted_boxes, num_sent=num_sent, itemsize=itemsizes.get(name, 1)
            )
        except PlanError as error:
            raise PlanError(f"{name}: {error}") from None
        planned = plan_copies(held_boxes, wanted_boxes) + planned
        transfers += [WeightTransfer(name, transfer) for transfer in planned]
    return transfers


def plan_copies(
    held: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]]
) -> list[BoxTransfer]:
    """Return what each rank copies from the boxes that it holds to those that it wants, each
    element once."""
    copies: list[BoxTransfer] = []
    for rank, (sources, targets) in enumerate(zip(held, wanted, strict=False)):
        for target_index, target in enumerate(targets):
            missing = [target]
            for source_index, source in enumerate(sources):
                parts = [part for box in missing if (part := intersect(box, source)) is not None]
                copies += [
                    BoxTransfer(
                        rank,
                        rank,
                        part,
                        relative_box(part, source),
                        source_index,
                        relative_box(part, target),
                        target_index,
                    )
                    for part in parts
                ]
                missing = [part for box in missing for part in subtract_box(box, source)]
    return copies


def plan_transfers(
    held: Sequence[Sequence[Box]],
    wanted: Sequence[Sequence[Box]],
    *,
    num_sent: list[int] | None = None,
    itemsize: int = 1,
) -> list[BoxTransfer]:
    """Return the messages after which every rank has the boxes that it wants.

    held, wanted: boxes of each rank. Boxes may overlap, so elements may have replicas. Every wanted
    element that the rank does not hold is sent exactly once, by the replica that sends the fewest
    bytes so far; what a rank holds itself is not sent. num_sent: bytes that each rank sends of
    other tensors, which are counted on; itemsize: bytes of an element.

    >>> rows = [[((0, 2), (0, 4))], [((2, 4), (0, 4))]]
    >>> columns = [[((0, 4), (0, 2))], [((0, 4), (2, 4))]]
    >>> [(one.sender, one.receiver, one.box) for one in plan_transfers(rows, columns)]
    [(1, 0, ((2, 4), (0, 2))), (0, 1, ((0, 2), (2, 4)))]

    Raises:
        PlanError: no rank holds some wanted elements.
    """
    num_sent = [0] * len(held) if num_sent is None else num_sent
    transfers: list[BoxTransfer] = []
    for receiver, boxes in enumerate(wanted):
        for target_index, target in enumerate(boxes):
            missing = [target]
            for own in held[receiver] if receiver < len(held) else ():
                missing = [part for box in missing for part in subtract_box(box, own)]
            while missing:
                box = missing.pop(0)
                sender, source_index, part = _choose_sender(held, num_sent, box, receiver)
                num_sent[sender] += itemsize * box_numel(part)
                source = relative_box(part, held[sender][source_index])
                transfers.append(
                    BoxTransfer(
                        sender,
                        receiver,
                        part,
                        source,
                        source_index,
                        relative_box(part, target),
                        target_index,
                    )
                )
                missing += subtract_box(box, part)
    return transfers


def _choose_sender(
    held: Sequence[Sequence[Box]], num_sent: Sequence[int], box: Box, receiver: int
) -> tuple[int, int, Box]:
    """Return (rank, index of its box, common part) of a rank that holds as much of `box` as any;
    of several, the one that sends the fewest bytes so far."""
    replicas = [
        (-box_numel(part), num_sent[rank], rank, index, part)
        for rank, boxes in enumerate(held)
        for index, one in enumerate(boxes)
        if (part := intersect(one, box)) is not None
    ]
    if not replicas:
        raise PlanError(
            f"rank {receiver} needs the elements {box}, which no rank holds. Load a checkpoint or "
            "a layout that contains all boxes."
        )
    _, _, rank, index, part = min(replicas)
    return rank, index, part


def relative_box(box: Box, origin: Box) -> Box:
    """Return a box in coordinates of the box `origin`, which contains it."""
    return tuple(
        (start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True)
    )


def subtract_box(box: Box, other: Box) -> Iterator[Box]:
    """Yield disjoint boxes that cover `box` without `other`: at most two per dimension.

    >>> list(subtract_box(((0, 4), (0, 4)), ((1, 2), (0, 3))))
    [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (3, 4))]
    """
    common = intersect(box, other)
    if common is None:
        yield box
        return
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, common, strict=True)):
        for side in ((start, first), (last, stop)):
            if side[0] < side[1]:
                yield (*common[:dim], side, *box[dim + 1 :])
