"""Which local checkpoint is complete, and who sends which box."""

import random
from collections.abc import Sequence

import pytest

from megalith.errors import PlanError
from megalith.plan.shards import Box
from megalith.plan.tiers import (
    LocalFolder,
    choose_step,
    list_local_steps,
    merge_reports,
    plan_peers,
    plan_reads,
)
from megalith.plan.transfer import box_numel

SHAPES = {"w": (12, 5), "b": (12,), "scale": ()}


def rows(key: str, world: int, rank: int) -> list[Box]:
    """The box of one rank; the scalar is rank 0's."""
    if key == "scale":
        return [()] if rank == 0 else []
    start, stop = (12 * each // world for each in (rank, rank + 1))
    return [((start, stop), *((0, n) for n in SHAPES[key][1:]))]


def folder(
    rank: int, world: int, *, step: int = 8, save: str = "s", peers: Sequence[int] = ()
) -> LocalFolder:
    """The folder of one rank, with copies of the ranks before it at the distances `peers`."""
    owners = [rank, *((rank - peer) % world for peer in peers)]
    boxes = {key: {box for owner in owners for box in rows(key, world, owner)} for key in SHAPES}
    return LocalFolder(f"{save}{step}-{rank}", rank, step, save, world, SHAPES, boxes)


def report(folders: Sequence[LocalFolder], readers: Sequence[Sequence[int]]) -> list[LocalFolder]:
    """Merge reports in which rank r reads the folders with the numbers readers[r]."""
    return merge_reports([[folders[number] for number in each] for each in readers])


def test_peers_are_on_other_machines() -> None:
    assert plan_peers(world=16, ranks_per_machine=4, factor=2, jump=None) == (4,)
    assert plan_peers(world=16, ranks_per_machine=4, factor=3, jump=None) == (4, 8)
    assert plan_peers(world=4, ranks_per_machine=4, factor=2, jump=None) == (1,)
    assert plan_peers(world=4, ranks_per_machine=1, factor=1, jump=None) == ()
    assert plan_peers(world=1, ranks_per_machine=1, factor=2, jump=None) == ()
    assert plan_peers(world=4, ranks_per_machine=2, factor=2, jump=3) == (3,)


@pytest.mark.parametrize(
    ("factor", "jump", "shown"), [(2, 4, "4"), (3, 2, "2"), (5, None, "unset, which means 1")]
)
def test_rank_that_would_be_its_own_peer_is_rejected(
    factor: int, jump: int | None, shown: str
) -> None:
    with pytest.raises(PlanError) as error:
        plan_peers(world=4, ranks_per_machine=4, factor=factor, jump=jump)
    assert str(error.value) == (
        f"checkpoint.local.replication_factor={factor} and checkpoint.local.replication_jump="
        f"{shown}: with 4 ranks, a rank would be its own peer, or the same peer twice. Set "
        "checkpoint.local.replication_jump=1 and checkpoint.local.replication_factor to at most 4."
    )


def test_step_is_complete_if_and_only_if_no_rank_and_its_peer_are_lost() -> None:
    """Every set of lost ranks of 6, with copies at distances 1, 2, and 1 and 2."""
    for peers in ((), (1,), (2,), (1, 2)):
        all_folders = [folder(rank, 6, peers=peers) for rank in range(6)]
        for lost in range(2**6 - 1):
            left = [each for each in all_folders if not lost >> each.rank & 1]
            merged = report(left, [range(len(left))])
            expected = all(
                any(not lost >> (rank + peer) % 6 & 1 for peer in (0, *peers)) for rank in range(6)
            )
            (step,) = list_local_steps(merged)
            assert step.is_complete == expected, (peers, bin(lost))
            assert (choose_step(merged) is not None) == expected
            missing = sum(box_numel(box) for boxes in step.missing_boxes.values() for box in boxes)
            held = {box for each in left for key in SHAPES for box in each.boxes[key]}
            assert missing == 73 - sum(map(box_numel, held))


def test_newest_complete_step_is_chosen_and_saves_are_not_combined() -> None:
    first = [folder(rank, 2, step=8) for rank in range(2)]
    newer = [folder(0, 2, step=9, save="a"), folder(1, 2, step=9, save="b")]
    merged = report([*first, *newer], [range(4)])
    chosen = choose_step(merged)
    assert chosen is not None and (chosen.step, chosen.save, len(chosen.folders)) == (8, "s", 2)
    assert [step.step for step in list_local_steps(merged)] == [9, 9, 8]
    assert choose_step(merged, at_least=8) == chosen
    assert choose_step(merged, at_least=9) is None
    assert list_local_steps(merged)[0].describe_missing() == (
        "the local checkpoint of step 9 is not complete: 1 of 2 ranks have no folder of it (1), "
        "and 2 boxes of 2 tensors have no copy (first: w [6:12, 0:5])"
    )


def test_reads_are_near_and_balanced() -> None:
    world, generator = 8, random.Random(0)
    all_folders = [folder(rank, world, peers=(2,)) for rank in range(world)]
    readers = [[rank, rank ^ 1] for rank in range(world)]  # machines of two ranks
    machines = [f"m{rank // 2}" for rank in range(world)]
    merged = report(all_folders, readers)
    everything = [
        (key, box) for key in SHAPES for rank in range(world) for box in rows(key, 8, rank)
    ]
    for seed in range(50):
        needs = [generator.sample(everything, 9) for _ in range(world)]
        reads = plan_reads(merged, needs, machines)
        for rank, boxes in enumerate(needs):
            received = [(read.key, read.box) for read in reads if read.receiver == rank]
            assert received == boxes, seed
        by_name = {each.name: each for each in merged}
        for read in reads:
            assert read.sender in by_name[read.folder].readers, seed
            assert read.box in by_name[read.folder].boxes[read.key], seed
            can_read = any(
                read.receiver in each.readers and read.box in each.boxes[read.key]
                for each in merged
            )
            assert (read.sender == read.receiver) == can_read, seed
    needs = [everything if rank == 0 else [] for rank in range(world)]
    num_sent = [0] * world
    for read in plan_reads(merged, needs, machines):
        num_sent[read.sender] += box_numel(read.box) * (read.sender != 0)
    assert max(num_sent) <= 16 and num_sent[0] == 0


def test_damaged_copy_is_replaced_by_the_next_one() -> None:
    merged = report([folder(rank, 4, peers=(1,)) for rank in range(4)], [[0], [1], [2], [3]])
    machines = ["a", "b", "c", "d"]
    box = rows("w", 4, 1)[0]
    damaged: set[tuple[str, str, Box]] = set()
    senders = []
    for _ in range(2):
        (read,) = plan_reads(merged, [[("w", box)]], machines, damaged=damaged)
        senders.append(read.sender)
        damaged.add((read.folder, "w", box))
    assert senders == [1, 2]
    with pytest.raises(PlanError, match=r"^box w \[3:6, 0:5\]: no copy is intact$"):
        plan_reads(merged, [[("w", box)]], machines, damaged=damaged)


def test_folder_that_several_ranks_read_is_reported_once() -> None:
    merged = report([folder(0, 2), folder(1, 2)], [[0, 1], [1]])
    assert [each.readers for each in merged] == [(0,), (0, 1)]
