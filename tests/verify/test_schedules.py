"""Pipeline schedules are checked by simulation, with and without message tags."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from megalith.config.parallel import PipelineConfig, ScheduleName
from megalith.plan.schedule import (
    Action,
    Kind,
    Schedule,
    build_schedule,
    schedule_problems,
    with_transfers,
)
from megalith.plan.simulate import even_costs, find_problems
from megalith.verify.prove import check_lists, check_schedule


def test_1f1b_is_reported_with_its_bubble_and_memory() -> None:
    report = check_schedule(PipelineConfig(), pp=4, num_microbatches=8)
    assert report.ok and report.name == "1f1b"
    assert report.bubble == Fraction(3, 8) and report.bubble_fraction_of_total == Fraction(3, 11)
    assert list(report.peak_live) == [4, 3, 2, 1]
    assert (
        report.num_messages == 2 * 3 * 8
        and report.num_actions == 4 * 8 * 2 + 2 * report.num_messages
    )
    assert report.summary() == (
        "1f1b on 4 ranks, 8 microbatches: 160 actions, 48 messages, no deadlock with tags (gloo) "
        "or without (NCCL); "
        "bubble 27.3% of the step; at most 1 to 4 live microbatches per rank"
    )


def test_chunks_count_as_parts_of_a_microbatch() -> None:
    report = check_schedule(PipelineConfig(vpp=2), pp=4, num_microbatches=8)
    assert report.name == "interleaved" and report.bubble == Fraction(3, 16)
    assert report.peak_live[0] == Fraction(11, 2)
    v = check_schedule(PipelineConfig(schedule="zb-v", vpp=2), pp=4, num_microbatches=8)
    assert list(v.peak_live) == [4] * 4 and "at most 4 live microbatches" in v.summary()


def test_paired_schedules_are_simulated_with_their_peak_memory() -> None:
    plain, paired = (
        check_schedule(PipelineConfig(), pp=4, num_microbatches=8, paired=each)
        for each in (False, True)
    )
    assert paired.ok and paired.bubble == plain.bubble
    assert (
        list(paired.peak_live) == [8, 6, 4, 2]
        and "at most 2 to 8 live microbatches" in paired.summary()
    )


def test_a_pipeline_of_one_rank_has_no_bubble_and_no_messages() -> None:
    report = check_schedule(PipelineConfig(), pp=1, num_microbatches=3, overlap=False)
    assert report.ok and report.bubble == 0 and report.num_messages == 0


def test_costs_of_the_stages_count() -> None:
    costs = even_costs(2, forward=2, backward_input=1, backward_weight=1)
    assert check_schedule(
        PipelineConfig(), pp=2, num_microbatches=4, costs=costs
    ).bubble == Fraction(1, 4)


def test_violated_rule_is_a_problem_and_nothing_is_simulated() -> None:
    report = check_schedule(PipelineConfig(vpp=2), pp=4, num_microbatches=6, rows=3)
    assert not report.ok and report.bubble is None
    assert "Set train.global_batch_size to 12 or 24" in report.problems[0]
    assert report.summary() == "interleaved on 4 ranks, 6 microbatches: cannot run"


ReportRow = list[Action]


def index_of(row: ReportRow, kind: Kind, chunk: int, microbatch: int) -> int:
    return next(
        index for index, action in enumerate(row) if action[:3] == (kind, chunk, microbatch)
    )


def send_the_wrong_chunk(row: ReportRow) -> None:
    place = index_of(row, "send_forward", 1, 0)
    row[place] = row[place]._replace(chunk=0)


def receive_the_wrong_chunk(row: ReportRow) -> None:
    place = index_of(row, "recv_backward", 1, 1)
    row[place] = row[place]._replace(chunk=0)


def forget_a_receive(row: ReportRow) -> None:
    del row[index_of(row, "recv_forward", 1, 2)]


def forget_a_send(row: ReportRow) -> None:
    del row[index_of(row, "send_backward", 1, 3)]


def swap_two_sends(row: ReportRow) -> None:
    one, other = index_of(row, "send_forward", 0, 2), index_of(row, "send_forward", 0, 3)
    row[one], row[other] = row[other], row[one]


def backward_too_early(row: ReportRow) -> None:
    row.insert(0, row.pop(index_of(row, "B", 1, 0)))


def weights_of_the_wrong_microbatch(row: ReportRow) -> None:
    place = index_of(row, "B", 0, 3)
    row[place] = row[place]._replace(microbatch=2)


FAULTS = [
    (send_the_wrong_chunk, 1, "send_forward of microbatch 0, chunk 0 to rank 2"),
    (receive_the_wrong_chunk, 1, "recv_backward of microbatch 1, chunk 0 from rank 2"),
    (forget_a_receive, 1, "F of microbatch 2, chunk 1"),
    (forget_a_send, 1, "rank 1: microbatch 3 of chunk 1 lacks send_backward"),
    (swap_two_sends, 1, "send_forward of microbatch 3, chunk 0 to rank 2"),
    (backward_too_early, 1, "B of microbatch 0, chunk 1"),
    (weights_of_the_wrong_microbatch, 1, "B of microbatch 2, chunk 0"),
]


@pytest.mark.parametrize(("fault", "rank", "text"), FAULTS)
@pytest.mark.parametrize("overlap", [True, False])
def test_wrong_schedule_is_rejected_with_rank_and_action(
    fault: Callable[[ReportRow], None], rank: int, text: str, overlap: bool
) -> None:
    whole = with_transfers(
        build_schedule("interleaved", num_ranks=3, num_chunks=2, num_microbatches=6),
        overlap=overlap,
    )
    assert check_lists(whole).ok
    row = list(whole.ranks[rank])
    fault(row)
    report = check_lists(changed(whole, rank, row))
    assert not report.ok and report.bubble is None
    assert any(text in problem for problem in report.problems), report.problems
    assert all(problem.startswith(f"rank {rank}") for problem in report.problems)


def changed(schedule: Schedule, rank: int, row: ReportRow) -> Schedule:
    return replace(
        schedule, ranks=(*schedule.ranks[:rank], tuple(row), *schedule.ranks[rank + 1 :])
    )


def test_deadlock_is_rejected() -> None:
    good = with_transfers(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
    row = list(good.ranks[0])
    for microbatch in (0, 1):  # sent only after the backward that waits for it
        row.append(row.pop(index_of(row, "send_forward", 0, microbatch)))
    [problem] = check_lists(changed(good, 0, row)).problems
    assert (
        problem.startswith("deadlock: ")
        and "rank 0, action" in problem
        and "rank 1, action" in problem
    )


def test_swapped_sends_are_valid_with_tags_and_rejected_without() -> None:
    good = with_transfers(
        build_schedule("gpipe", num_ranks=2, num_microbatches=2, forward_only=True)
    )
    f0, s0, f1, s1 = good.ranks[0]
    swapped = changed(good, 0, [f0, f1, s1, s0])
    assert find_problems(swapped) == []
    report = check_lists(swapped)
    assert not report.ok and report.summary().endswith("cannot run")
    assert report.problems == (
        "over NCCL, rank 0, action 2 (send_forward of microbatch 1 to rank 1) would be taken by "
        "rank 1, action 0 "
        "(recv_forward of microbatch 0 from rank 0): without tags, receive 1 of a channel gets "
        "send 1, so both ranks "
        "must list its messages in one order",
    )


SIZES: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


@pytest.mark.parametrize(("name", "vpp"), SIZES)
def test_every_schedule_is_valid_with_and_without_tags_in_training_and_evaluation(
    name: ScheduleName, vpp: int
) -> None:
    pipeline = PipelineConfig(schedule=name, vpp=vpp)
    for pp, microbatches, overlap in product((1, 2, 3, 4, 5), (1, 2, 3, 4, 8, 9), (True, False)):
        if not schedule_problems(pipeline, pp=pp, num_microbatches=microbatches):
            report = check_schedule(pipeline, pp=pp, num_microbatches=microbatches, overlap=overlap)
            assert (
                report.ok and "no deadlock with tags (gloo) or without (NCCL)" in report.summary()
            ), report.problems
