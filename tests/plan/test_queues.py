"""Tests of megalith/plan/check_schedule.py."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest

from megalith.config.parallel import ScheduleName
from megalith.plan.check_schedule import queue_problems
from megalith.plan.schedule import (
    Action,
    Channel,
    Kind,
    Schedule,
    build_schedule,
    channels,
    stage_placement,
    with_transfers,
)
from megalith.plan.simulate import find_problems
from megalith.testing.tiny import NAMES

CHUNKS: dict[ScheduleName, int] = {"interleaved": 3, "zb-v": 2, "dualpipe-v": 2}


def changed(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    return replace(
        schedule, ranks=(*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
    )


def find(schedule: Schedule, rank: int, kind: Kind, microbatch: int, chunk: int = 0) -> int:
    wanted = kind, chunk, microbatch
    return next(index for index, action in enumerate(schedule.ranks[rank]) if action[:3] == wanted)


def sent_late(schedule: Schedule, rank: int, early: int, late: int) -> Schedule:
    """The send at `early` put behind the one at `late`: every send still comes after its
    computing."""
    row = list(schedule.ranks[rank])
    row.insert(late, row.pop(early))
    return changed(schedule, rank, row)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_runs_over_queues_of_its_channels(name: ScheduleName) -> None:
    for pp, microbatches, forward_only, overlap in product(
        (2, 3, 4, 6), (1, 2, 7, 12), (True, False), (True, False)
    ):
        if name != "interleaved" or microbatches % pp == 0 or forward_only:
            plain = build_schedule(
                name,
                num_ranks=pp,
                num_chunks=CHUNKS.get(name, 1),
                num_microbatches=microbatches,
                forward_only=forward_only,
            )
            assert queue_problems(with_transfers(plain, overlap=overlap)) == []


def neighboring_sends(schedule: Schedule) -> list[tuple[int, int, int]]:
    """(rank, early, late) of two sends that follow each other on a channel."""
    results = []
    for rank, row in enumerate(schedule.ranks):
        for direction, peer in product(("forward", "backward"), range(schedule.num_ranks)):
            sends = [
                index
                for index, a in enumerate(row)
                if a.kind == f"send_{direction}" and a.peer == peer
            ]
            results += [(rank, early, late) for early, late in pairwise(sends)]
    return results


@pytest.mark.parametrize("name", NAMES)
def test_two_swapped_sends_are_legal_with_tags_and_found_without(name: ScheduleName) -> None:
    schedule = with_transfers(
        build_schedule(name, num_ranks=3, num_chunks=CHUNKS.get(name, 1), num_microbatches=6),
        overlap=False,
    )
    swapped = [(place, sent_late(schedule, *place)) for place in neighboring_sends(schedule)]
    # else what is late is needed earlier
    legal = [(place, one) for place, one in swapped if not find_problems(one)]
    assert len(legal) >= 6
    for (rank, _, late), one in legal:
        problems = queue_problems(one)
        assert problems[0].startswith(f"over NCCL, rank {rank}, action {late - 1} (send_"), problems
        assert "would be taken by rank " in problems[0]


def test_two_swapped_sends_are_named_with_both_ends_and_their_number() -> None:
    schedule = with_transfers(
        build_schedule("gpipe", num_ranks=2, num_microbatches=3), overlap=False
    )
    swapped = sent_late(schedule, 0, 3, 5)  # the last two of F0 s0 F1 s1 F2 s2
    assert find_problems(swapped) == []
    assert queue_problems(swapped) == [
        "over NCCL, rank 0, action 4 (send_forward of microbatch 2 to rank 1) would be taken by "
        "rank 1, action 2 "
        "(recv_forward of microbatch 1 from rank 0): without tags, receive 2 of a channel gets "
        "send 2, so both ranks "
        "must list its messages in one order"
    ]


def test_messages_for_different_chunks_that_cross_are_named() -> None:
    schedule = with_transfers(
        build_schedule("interleaved", num_ranks=2, num_chunks=2, num_microbatches=4)
    )
    early, late = (
        find(schedule, 0, "send_forward", 1, chunk=0),
        find(schedule, 0, "send_forward", 0, chunk=1),
    )
    [problem] = queue_problems(sent_late(schedule, 0, early, late))
    assert (
        "rank 0, action" in problem
        and "(send_forward of microbatch 0, chunk 1 to rank 1)" in problem
    )
    assert "would be taken by rank 1, action" in problem
    assert "(recv_forward of microbatch 1, chunk 0 from rank 0)" in problem


def test_every_crossed_channel_is_named_once() -> None:
    schedule = with_transfers(
        build_schedule("gpipe", num_ranks=3, num_microbatches=4, forward_only=True)
    )
    rows = []
    for row in schedule.ranks[:2]:
        sends = [action for action in row if action.kind == "send_forward"]
        rows.append(
            (*(action for action in row if action.kind != "send_forward"), *reversed(sends))
        )
    problems = queue_problems(replace(schedule, ranks=(*rows, schedule.ranks[2])))
    assert [problem.split(" (")[0] for problem in problems] == [
        "over NCCL, rank 0, action 4",
        "over NCCL, rank 1, action 8",
    ]


def test_deadlock_of_ranks_is_described_step_by_step() -> None:
    plain = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    f0, f1, b0, b1 = Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)
    circle = with_transfers(
        replace(plain, ranks=((f0, b0, f1, b1), (f0, f1, b0, b1))), overlap=False
    )
    assert queue_problems(circle) == [
        "deadlock over NCCL: rank 0, action 3 (B of microbatch 0) waits for rank 0, action 2 "
        "(recv_backward of "
        "microbatch 0 from rank 1), which waits for rank 1, action 5 (send_backward of microbatch "
        "0 to rank 0), which "
        "comes after rank 1, action 3 (F of microbatch 1), which waits for rank 1, action 2 "
        "(recv_forward of "
        "microbatch 1 from rank 0), which waits for rank 0, action 5 (send_forward of microbatch 1 "
        "to rank 1), which "
        "comes after the first of these"
    ]
    assert find_problems(circle) != []


def test_rank_that_waits_for_its_own_chunk_is_described() -> None:
    schedule = with_transfers(build_schedule("zb-v", num_ranks=2, num_chunks=2, num_microbatches=1))
    row = list(schedule.ranks[1])
    down, turn = find(schedule, 1, "F", 0, chunk=0), find(schedule, 1, "F", 0, chunk=1)
    row[down], row[turn] = row[turn], row[down]
    [problem] = queue_problems(changed(schedule, 1, row))
    assert (
        f"rank 1, action {down} (F of microbatch 0, chunk 1) waits for rank 1, action {turn} (F of"
        in problem
    )
    assert problem.endswith("which comes after the first of these")


def test_lists_without_messages_have_no_queues() -> None:
    assert queue_problems(build_schedule("1f1b", num_ranks=4, num_microbatches=4)) == []


# --- why every channel has a communicator of its own


Carried = Callable[[Channel], object]


def carried_by(schedule: Schedule, key: Carried) -> dict[Channel, int]:
    keys = list(dict.fromkeys(map(key, channels(schedule))))
    return {channel: keys.index(key(channel)) for channel in channels(schedule)}


def its_pair(channel: Channel) -> object:
    return frozenset((channel.source, channel.target))


def its_group(channel: Channel) -> object:
    return channel.direction, channel.target > channel.source


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_pair_of_ranks_in_each_of_four_groups_carries_one_channel(
    name: ScheduleName, pp: int
) -> None:
    chunks = CHUNKS.get(name, 1)
    schedule = Schedule(name, pp, chunks, 1, stage_placement(name), ())
    used = [(its_group(channel), its_pair(channel)) for channel in channels(schedule)]
    assert len(set(used)) == len(used) > 0
    assert pp > 2 or chunks == 1 or len(set(map(its_pair, channels(schedule)))) == 1 < len(used)


def test_one_communicator_for_both_directions_deadlocks_with_an_explanation() -> None:
    schedule = with_transfers(build_schedule("1f1b", num_ranks=2, num_microbatches=1))
    assert find_problems(schedule) == [] and queue_problems(schedule) == []
    assert queue_problems(schedule, carried_by(schedule, its_pair)) == [
        "deadlock over NCCL: rank 0, action 0 (recv_backward of microbatch 0 from rank 1) waits "
        "for rank 1, action 3 "
        "(send_backward of microbatch 0 to rank 0), which comes after rank 1, action 1 (F of "
        "microbatch 0), which "
        "waits for rank 1, action 0 (recv_forward of microbatch 0 from rank 0), which waits for "
        "rank 0, action 2 "
        "(send_forward of microbatch 0 to rank 1), which is queued behind the first of these"
    ]


def test_one_communicator_for_all_pairs_of_a_group_blocks_evaluation_around_a_loop() -> None:
    # what torch makes of a group whose device is given to init_process_group: one communicator, one
    # stream
    schedule = with_transfers(
        build_schedule(
            "interleaved", num_ranks=3, num_chunks=2, num_microbatches=1, forward_only=True
        )
    )
    assert queue_problems(schedule) == []
    [problem] = queue_problems(schedule, carried_by(schedule, its_group))
    assert (
        "rank 1, action 3 (send_forward of microbatch 0, chunk 0 to rank 2), which is queued behind"
        in problem
    )
