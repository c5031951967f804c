"""Local checkpoints: which step is complete on the ranks that are left, and which rank sends which
box to which other; no torch.

A box that several ranks have stored is a box with replicas.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from megalith.errors import PlanError
from megalith.plan.shards import Box
from megalith.plan.transfer import box_numel, subtract_box


def plan_peers(
    *, world: int, ranks_per_machine: int, factor: int, jump: int | None
) -> tuple[int, ...]:
    """Return the rank distances of the peers that store copies of a rank's boxes; none for a single
    rank.

    factor: number of copies with the rank's own; jump: distance to the first peer, and from each to
    the next; None: `ranks_per_machine`, so that a copy is on another machine, or 1 if there is only
    one machine.

    >>> plan_peers(world=16, ranks_per_machine=8, factor=2, jump=None)
    (8,)
    >>> plan_peers(world=4, ranks_per_machine=4, factor=3, jump=None)
    (1, 2)

    Raises:
        PlanError: a rank would be its own peer, or have the same peer twice.
    """
    if world == 1:
        return ()
    default = ranks_per_machine if ranks_per_machine < world else 1
    distance = default if jump is None else jump
    peers = tuple(number * distance % world for number in range(1, factor))
    if len({0, *peers}) == factor:
        return peers
    shown = f"unset, which means {distance}" if jump is None else str(distance)
    raise PlanError(
        f"checkpoint.local.replication_factor={factor} and checkpoint.local.replication_jump="
        f"{shown}: with {world} ranks, a rank would be its own peer, or the same peer twice. Set "
        f"checkpoint.local.replication_jump=1 and checkpoint.local.replication_factor to at most "
        f"{world}."
    )


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """Table of one rank's folder of one local checkpoint."""

    name: str
    """Identifies the folder; several ranks of a machine report the same one."""

    rank: int
    """Rank that wrote it."""

    step: int
    save: str
    """Identifies the save; boxes of different saves of a step are not combined."""

    world_size: int
    """Number of ranks of the save."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every tensor of the checkpoint, whichever ranks store it."""

    boxes: Mapping[str, Set[Box]]
    """Boxes in this folder, by tensor."""

    readers: tuple[int, ...] = ()
    """Ranks that can read the folder."""


def merge_reports(reports: Sequence[Sequence[LocalFolder]]) -> list[LocalFolder]:
    """Return every folder once, with its readers; `reports`: the folders that each rank can
    read."""
    folders: dict[str, LocalFolder] = {}
    for reader, report in enumerate(reports):
        for folder in report:
            known = folders.get(folder.name, folder)
            folders[folder.name] = replace(known, readers=(*known.readers, reader))
    return sorted(folders.values(), key=lambda folder: (folder.step, folder.save, folder.rank))


class LocalStep(NamedTuple):
    """The folders of one save, and what they lack."""

    step: int
    save: str
    folders: tuple[LocalFolder, ...]
    missing_boxes: Mapping[str, tuple[Box, ...]]
    """Parts of tensors that no folder has; empty: the checkpoint is complete."""

    lost_ranks: tuple[int, ...]
    """Ranks of the save whose folder is not among them."""

    @property
    def is_complete(self) -> bool:
        """Whether the boxes cover every tensor."""
        return not self.missing_boxes

    def describe_missing(self) -> str:
        """Describe how many ranks' folders and which boxes are missing."""
        num_boxes = sum(map(len, self.missing_boxes.values()))
        key, boxes = next(iter(self.missing_boxes.items()))
        span = ", ".join(f"{start}:{stop}" for start, stop in boxes[0])
        world = self.folders[0].world_size
        return (
            f"the local checkpoint of step {self.step} is not complete: {len(self.lost_ranks)} of "
            f"{world} ranks have no folder of it ({', '.join(map(str, self.lost_ranks)) or '-'}), "
            f"and {num_boxes} boxes of {len(self.missing_boxes)} tensors have no copy (first: "
            f"{key} [{span}])"
        )


def list_local_steps(folders: Sequence[LocalFolder]) -> list[LocalStep]:
    """Return the saves of which there are folders, newest step first; of one step, complete ones
    first."""
    saves: dict[tuple[int, str], list[LocalFolder]] = {}
    for folder in folders:
        saves.setdefault((folder.step, folder.save), []).append(folder)
    steps = [_local_step(each) for each in saves.values()]
    return sorted(steps, key=lambda step: (-step.step, not step.is_complete, step.save))


def choose_step(folders: Sequence[LocalFolder], *, at_least: int = 0) -> LocalStep | None:
    """Return the newest complete local checkpoint from step `at_least` on; None if there is
    none."""
    steps = list_local_steps(folders)
    return next((step for step in steps if step.is_complete and step.step >= at_least), None)


def _local_step(folders: Sequence[LocalFolder]) -> LocalStep:
    first = folders[0]
    missing = {}
    for key, shape in first.shapes.items():
        boxes = {box for folder in folders for box in folder.boxes.get(key, ())}
        if holes := _holes(shape, boxes):
            missing[key] = holes
    lost = set(range(first.world_size)) - {folder.rank for folder in folders}
    return LocalStep(first.step, first.save, tuple(folders), missing, tuple(sorted(lost)))


def _holes(shape: tuple[int, ...], boxes: Set[Box]) -> tuple[Box, ...]:
    """Return the parts of a tensor that none of `boxes` covers."""
    if sum(map(box_numel, boxes)) == prod(shape):  # boxes of one save do not overlap
        return ()
    left: list[Box] = [tuple((0, n) for n in shape)]
    for box in sorted(boxes):
        left = [rest for part in left for rest in subtract_box(part, box)]
    return tuple(left)


class BoxRead(NamedTuple):
    """A box that one rank reads from a folder and sends to another, or uses if they are the
    same."""

    folder: str
    sender: int
    receiver: int
    key: str
    box: Box


def plan_reads(
    folders: Sequence[LocalFolder],
    needs: Sequence[Sequence[tuple[str, Box]]],
    machines: Sequence[str],
    *,
    damaged: Set[tuple[str, str, Box]] = frozenset(),
) -> list[BoxRead]:
    """Return the reads and messages after which every rank has the stored boxes that it needs, in
    an order in which all ranks execute them.

    needs: (tensor, box) of each rank; machines: name of each rank's machine; damaged: (folder,
    tensor, box) of copies that are not read. A box is read by the rank itself if it can, otherwise
    sent by a rank of the same machine, otherwise by any; of several, by the one that sends the
    fewest elements so far.

    >>> box = ((0, 2),)
    >>> folder = LocalFolder("a", 0, 5, "s", 2, {"w": (2,)}, {"w": {box}}, readers=(1,))
    >>> [(read.sender, read.receiver) for read in plan_reads([folder], [[("w", box)]], ["m", "n"])]
    [(1, 0)]

    Raises:
        PlanError: a box has no copy that is not damaged.
    """
    copies: dict[tuple[str, Box], list[tuple[int, LocalFolder]]] = {}
    for folder in folders:
        for key, boxes in folder.boxes.items():
            for box in boxes:
                if (folder.name, key, box) not in damaged:
                    copies.setdefault((key, box), []).extend((r, folder) for r in folder.readers)
    num_sent = [0] * len(machines)
    reads = []
    for number in range(max(map(len, needs), default=0)):
        for receiver, boxes_needed in enumerate(needs):
            if number >= len(boxes_needed):
                continue
            key, box = boxes_needed[number]
            choices = [
                (_distance(machines, sender, receiver), num_sent[sender], sender, folder)
                for sender, folder in copies.get((key, box), ())
            ]
            if not choices:
                span = ", ".join(f"{start}:{stop}" for start, stop in box)
                raise PlanError(f"box {key} [{span}]: no copy is intact")
            _, _, sender, folder = min(choices, key=lambda choice: (*choice[:3], choice[3].rank))
            if sender != receiver:
                num_sent[sender] += box_numel(box)
            reads.append(BoxRead(folder.name, sender, receiver, key, box))
    return reads


def _distance(machines: Sequence[str], sender: int, receiver: int) -> int:
    if sender == receiver:
        return 0
    return 1 if machines[sender] == machines[receiver] else 2
