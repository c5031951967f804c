"""Tests of megalith/plan/schedule.py."""

import random
from dataclasses import replace

from megalith.config.parallel import ScheduleName
from megalith.plan.check_schedule import matching_problems, queue_problems
from megalith.plan.schedule import (
    Action,
    Channel,
    Schedule,
    build_schedule,
    channels,
    neighbor,
    with_transfers,
)
from megalith.plan.simulate import simulate
from megalith.testing.tiny import random_schedule
from tests.cases import loop_over

SHORT = {"send_forward": "sf", "recv_forward": "rf", "send_backward": "sb", "recv_backward": "rb"}


def texts(schedule: Schedule) -> list[str]:
    return [
        " ".join(f"{SHORT.get(a.kind, a.kind)}{a.microbatch}" for a in row)
        for row in schedule.ranks
    ]


def test_receives_are_posted_one_action_ahead_with_overlap() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=3)
    assert texts(with_transfers(schedule)) == [
        "F0 sf0 rb0 F1 sf1 B0 rb1 F2 sf2 rb2 B1 B2",
        "rf0 F0 rf1 B0 sb0 F1 rf2 B1 sb1 F2 B2 sb2",
    ]


def test_receives_are_posted_when_needed_without_overlap() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=3)
    assert texts(with_transfers(schedule, overlap=False)) == [
        "F0 sf0 F1 sf1 rb0 B0 F2 sf2 rb1 B1 rb2 B2",
        "rf0 F0 B0 sb0 rf1 F1 B1 sb1 rf2 F2 B2 sb2",
    ]


def test_single_rank_and_the_last_rank_of_a_v_need_no_message() -> None:
    names: list[ScheduleName] = ["interleaved", "zb-v"]
    for name in names:
        alone = build_schedule(name, num_ranks=1, num_chunks=2, num_microbatches=3)
        assert channels(alone) == () and with_transfers(alone) == alone
    v = with_transfers(build_schedule("zb-v", num_ranks=3, num_chunks=2, num_microbatches=6))
    assert neighbor(v, 2, 0, "forward") == (2, 1)
    assert all(a.peer == 1 for a in v.ranks[2] if a.peer >= 0)
    assert [a.kind for a in v.ranks[2] if a.peer >= 0 and a.microbatch == 0 and a.chunk == 0] == [
        "recv_forward",
        "send_backward",
    ]


def test_channels_have_both_directions_in_a_loop_and_a_v() -> None:
    loop = build_schedule("interleaved", num_ranks=3, num_chunks=2, num_microbatches=3)
    assert set(channels(loop)) == {
        *(Channel(rank, (rank + 1) % 3, "forward") for rank in range(3)),
        *(Channel((rank + 1) % 3, rank, "backward") for rank in range(3)),
    }
    two = build_schedule("interleaved", num_ranks=2, num_chunks=2, num_microbatches=2)
    assert len(channels(two)) == 4  # each way, forward and backward
    v = build_schedule("zb-v", num_ranks=2, num_chunks=2, num_microbatches=4)
    assert len(channels(v)) == 4
    assert len(channels(build_schedule("1f1b", num_ranks=4, num_microbatches=4))) == 6


def test_first_and_last_stage_have_no_outer_neighbor() -> None:
    loop = build_schedule("interleaved", num_ranks=2, num_chunks=2, num_microbatches=2)
    assert neighbor(loop, 0, 0, "backward") is None and neighbor(loop, 1, 1, "forward") is None
    assert neighbor(loop, 1, 0, "forward") == (0, 1) and neighbor(loop, 0, 1, "backward") == (
        1,
        0,
    )


@loop_over("seed", range(80))
def test_both_ends_of_every_channel_list_its_messages_in_one_order_and_nothing_blocks(
    seed: int,
) -> None:
    rng = random.Random(seed)
    schedule = random_schedule(rng, forward_only=rng.random() < 0.2)
    for overlap in (True, False):
        linked = with_transfers(schedule, overlap=overlap)
        assert matching_problems(linked) == [] and queue_problems(linked) == []
        # messages that take no time cost nothing
        assert simulate(linked).makespan == simulate(schedule).makespan
        for row, plain in zip(linked.ranks, schedule.ranks):
            assert tuple(action for action in row if action.peer < 0) == plain
            assert open_receives(row) <= (2 if overlap else 1)
        for channel in channels(linked):
            assert sent(linked, channel) == received(linked, channel)


def open_receives(row: tuple[Action, ...]) -> int:
    """The most receives that are posted and not taken yet."""
    most = count = 0
    waiting = set()
    for action in row:
        if action.kind.startswith("recv"):
            count += 1
            waiting.add((action.kind, action.chunk, action.microbatch))
        elif action.peer < 0 and action.kind != "W":
            kind = "recv_forward" if action.kind == "F" else "recv_backward"
            count -= (kind, action.chunk, action.microbatch) in waiting
        most = max(most, count)
    return most


def sent(schedule: Schedule, channel: Channel) -> list[tuple[int, int]]:
    step = 1 if channel.direction == "forward" else -1
    return [
        (schedule.stage_index(channel.source, a.chunk) + step, a.microbatch)
        for a in schedule.ranks[channel.source]
        if a.kind == f"send_{channel.direction}" and a.peer == channel.target
    ]


def received(schedule: Schedule, channel: Channel) -> list[tuple[int, int]]:
    return [
        (schedule.stage_index(channel.target, a.chunk), a.microbatch)
        for a in schedule.ranks[channel.target]
        if a.kind == f"recv_{channel.direction}" and a.peer == channel.source
    ]


def test_receives_follow_the_order_of_sending_where_they_are_needed_in_another() -> None:
    schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=3, forward_only=True)
    first, second = schedule.ranks
    # rank 1 wants the last microbatch first
    crossed = replace(schedule, ranks=(first, second[::-1]))
    for overlap in (True, False):
        linked = with_transfers(crossed, overlap=overlap)
        assert texts(linked)[1] == "rf0 rf1 rf2 F2 F1 F0"
        assert matching_problems(linked) == [] and queue_problems(linked) == []
        assert simulate(linked).makespan == 6
