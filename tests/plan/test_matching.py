"""Tests of megalith/plan/check_schedule.py."""

from dataclasses import replace

import pytest

from megalith.plan.check_schedule import action_text, has_backward, has_transfers, matching_problems
from megalith.plan.schedule import Action, Kind, Schedule, build_schedule, with_transfers


def changed(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    return replace(
        schedule, ranks=(*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
    )


def find(schedule: Schedule, rank: int, kind: Kind, microbatch: int, chunk: int = 0) -> int:
    wanted = (kind, chunk, microbatch)
    return next(index for index, action in enumerate(schedule.ranks[rank]) if action[:3] == wanted)


@pytest.fixture
def interleaved() -> Schedule:
    return with_transfers(
        build_schedule("interleaved", num_ranks=2, num_chunks=2, num_microbatches=4)
    )


@pytest.fixture
def one_f_one_b() -> Schedule:
    return with_transfers(build_schedule("1f1b", num_ranks=3, num_microbatches=4), overlap=False)


def test_complete_schedules_have_no_problem(interleaved: Schedule, one_f_one_b: Schedule) -> None:
    assert matching_problems(interleaved) == [] and matching_problems(one_f_one_b) == []


def test_schedule_properties_are_derived_from_its_actions(one_f_one_b: Schedule) -> None:
    plain = build_schedule("1f1b", num_ranks=3, num_microbatches=4)
    assert has_transfers(one_f_one_b) and not has_transfers(plain)
    assert has_backward(plain)
    assert not has_backward(
        build_schedule("1f1b", num_ranks=3, num_microbatches=4, forward_only=True)
    )


def test_action_text_has_rank_and_index(interleaved: Schedule) -> None:
    assert action_text(interleaved, 0, 0) == "rank 0, action 0 (F of microbatch 0, chunk 0)"
    assert (
        action_text(interleaved, 0, 1)
        == "rank 0, action 1 (send_forward of microbatch 0, chunk 0 to rank 1)"
    )


def test_a_missing_receive_names_the_rank_and_the_action_that_lacks_it(
    one_f_one_b: Schedule,
) -> None:
    row = list(one_f_one_b.ranks[1])
    del row[find(one_f_one_b, 1, "recv_backward", 2)]
    bad = changed(one_f_one_b, 1, row)
    index = find(bad, 1, "B", 2)
    assert matching_problems(bad) == [
        f"rank 1, action {index} (B of microbatch 2): must come after its recv_backward",
        "rank 1: microbatch 2 lacks recv_backward in the whole list",
    ]


def test_a_missing_send_is_named(one_f_one_b: Schedule) -> None:
    row = list(one_f_one_b.ranks[0])
    del row[find(one_f_one_b, 0, "send_forward", 3)]
    assert matching_problems(changed(one_f_one_b, 0, row)) == [
        "rank 0: microbatch 3 lacks send_forward in the whole list"
    ]


def test_a_receive_for_the_wrong_chunk_is_named(interleaved: Schedule) -> None:
    row = list(interleaved.ranks[1])
    index = find(interleaved, 1, "recv_forward", 0, chunk=1)
    row[index] = row[index]._replace(chunk=0)
    problems = matching_problems(changed(interleaved, 1, row))
    assert problems[0].startswith(
        f"rank 1, action {index} (recv_forward of microbatch 0, chunk 0 from rank 0)"
    )
    assert any(
        "(F of microbatch 0, chunk 1): must come after its recv_forward" in problem
        for problem in problems
    )


def test_with_tags_the_ends_of_a_channel_may_list_its_messages_in_different_orders() -> None:
    schedule = with_transfers(
        build_schedule("gpipe", num_ranks=2, num_microbatches=2), overlap=False
    )
    forward_0, send_0, forward_1, send_1, *rest = schedule.ranks[0]
    assert (
        matching_problems(changed(schedule, 0, [forward_0, forward_1, send_1, send_0, *rest])) == []
    )


def test_send_before_its_computation_is_reported(one_f_one_b: Schedule) -> None:
    row = list(one_f_one_b.ranks[0])
    first, second = find(one_f_one_b, 0, "send_forward", 0), find(one_f_one_b, 0, "send_forward", 1)
    row[first], row[second] = row[second], row[first]
    problems = matching_problems(changed(one_f_one_b, 0, row))
    assert problems == [
        f"rank 0, action {first} (send_forward of microbatch 1 to rank 1): must come after its F",
    ]


def test_backward_before_forward_is_named() -> None:
    schedule = build_schedule("1f1b", num_ranks=1, num_microbatches=2)
    bad = changed(schedule, 0, [schedule.ranks[0][index] for index in (1, 0, 2, 3)])
    assert matching_problems(bad) == ["rank 0, action 0 (B of microbatch 0): must come after its F"]


def test_weights_before_the_input_part_are_named() -> None:
    schedule = build_schedule("zb-h1", num_ranks=1, num_microbatches=1)
    bad = changed(schedule, 0, [Action("F", 0, 0), Action("W", 0, 0), Action("I", 0, 0)])
    assert matching_problems(bad) == [
        "rank 0, action 1 (W of microbatch 0): must come after its B or I"
    ]


def test_repeated_action_is_reported() -> None:
    schedule = build_schedule("zb-h1", num_ranks=1, num_microbatches=1)
    bad = changed(schedule, 0, [*schedule.ranks[0], Action("B", 0, 0)])
    assert matching_problems(bad) == [
        "rank 0, action 3 (B of microbatch 0): must not come after its B or I and its B or W"
    ]


def test_invalid_actions_are_reported() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    row = [
        *schedule.ranks[0],
        Action("F", 1, 0),
        Action("F", 0, 2),
        Action("send_backward", 0, 0, 1),
    ]
    texts = matching_problems(changed(schedule, 0, row))
    assert "rank 0, action 4 (F of microbatch 0): this chunk has no such action here" in texts
    assert "rank 0, action 5 (F of microbatch 2): there is no such microbatch" in texts
    assert any("action 6" in text and "no such action" in text for text in texts)


def test_a_wrong_peer_is_named(one_f_one_b: Schedule) -> None:
    row = list(one_f_one_b.ranks[0])
    index = find(one_f_one_b, 0, "send_forward", 0)
    row[index] = row[index]._replace(peer=2)
    text = matching_problems(changed(one_f_one_b, 0, row))[0]
    assert (
        text
        == f"rank 0, action {index} (send_forward of microbatch 0 to rank 2): the peer is rank 2, "
        "expected 1"
    )


def test_lists_for_another_number_of_ranks_are_rejected(one_f_one_b: Schedule) -> None:
    bad = replace(one_f_one_b, ranks=one_f_one_b.ranks[:2])
    assert matching_problems(bad) == ["there are lists for 2 ranks, expected 3"]
