"""Tests of megalith/plan/schedule.py."""

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.config.parallel import PipelineConfig, ScheduleName
from megalith.errors import PlanError
from megalith.plan.check_schedule import matching_problems
from megalith.plan.schedule import (
    Action,
    Schedule,
    build_schedule,
    interleaved_order,
    interleaved_warmup,
    rank_and_chunk,
    schedule_name,
    schedule_problems,
    stage_index,
)
from megalith.plan.simulate import peak_activation_memory, simulate
from megalith.testing.tiny import NAMES as ALL
from megalith.testing.tiny import random_schedule
from tests.cases import loop_over

NAMES: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


def texts(schedule: Schedule) -> list[str]:
    chunks = schedule.num_chunks > 1
    return [
        " ".join(f"{a.kind}{a.microbatch}{'abc'[a.chunk] if chunks else ''}" for a in row)
        for row in schedule.ranks
    ]


def test_1f1b_on_two_ranks_is_the_published_order() -> None:
    assert texts(build_schedule("1f1b", num_ranks=2, num_microbatches=4)) == [
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_warms_up_one_forward_less_per_rank() -> None:
    rows = texts(build_schedule("1f1b", num_ranks=4, num_microbatches=8))
    assert [row.split().index("B0") - 1 for row in rows] == [3, 2, 1, 0]


def test_1f1b_takes_fewer_microbatches_than_ranks() -> None:
    assert texts(build_schedule("1f1b", num_ranks=4, num_microbatches=2)) == ["F0 F1 B0 B1"] * 3 + [
        "F0 B0 F1 B1"
    ]


def test_gpipe_runs_all_forwards_first() -> None:
    assert (
        texts(build_schedule("gpipe", num_ranks=2, num_microbatches=3)) == ["F0 F1 F2 B0 B1 B2"] * 2
    )


def test_interleaved_order_of_two_chunks_in_groups_of_three() -> None:
    order = interleaved_order(5, 2, 3)
    assert [microbatch for microbatch, _ in order] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [chunk for _, chunk in order] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("p", "v", "m", "group", "warmups"),
    [(4, 2, 8, 4, [10, 8, 6, 4]), (2, 2, 4, 2, [4, 2]), (4, 2, 2, 2, [4, 4, 4, 2])],
)
def test_interleaved_warmup_counts(p: int, v: int, m: int, group: int, warmups: list[int]) -> None:
    sizes = {"num_ranks": p, "num_chunks": v, "num_microbatches": m, "group": group}
    assert [interleaved_warmup(rank, **sizes) for rank in range(p)] == warmups


def test_interleaved_on_two_ranks() -> None:
    assert texts(build_schedule("interleaved", num_ranks=2, num_chunks=2, num_microbatches=4)) == [
        "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a",
        "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a",
    ]


def test_zb_h1_defers_weight_gradients_by_the_rank() -> None:
    assert texts(build_schedule("zb-h1", num_ranks=3, num_microbatches=4)) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_v_schedule_returns_from_the_last_rank() -> None:
    assert [stage_index(rank, 1, num_ranks=4, placement="v") for rank in range(4)] == [7, 6, 5, 4]
    assert [stage_index(rank, 1, num_ranks=4, placement="loop") for rank in range(4)] == [
        4,
        5,
        6,
        7,
    ]
    for placement in ("loop", "v"):
        for stage in range(12):
            rank, chunk = rank_and_chunk(stage, num_ranks=4, placement=placement)
            assert stage_index(rank, chunk, num_ranks=4, placement=placement) == stage


@pytest.mark.parametrize(("name", "chunks"), NAMES)
def test_evaluation_runs_every_forward_once_in_an_order_that_works(
    name: ScheduleName, chunks: int
) -> None:
    for p, m in [(1, 1), (2, 1), (3, 5), (4, 9)]:
        schedule = build_schedule(
            name, num_ranks=p, num_chunks=chunks, num_microbatches=m, forward_only=True
        )
        assert {action.kind for row in schedule.ranks for action in row} == {"F"}
        result = simulate(schedule)
        assert result.busy == (m * chunks,) * p
        if name == "zb-v":
            # as fast as can be: every rank computes without a gap, except at the ends of the step
            assert result.makespan == 2 * (m - 1) + 2 * p


def test_weight_gradients_are_added_in_the_same_order_by_every_schedule() -> None:
    for name, chunks in NAMES:
        schedule = build_schedule(name, num_ranks=3, num_chunks=chunks, num_microbatches=9)
        for row in schedule.ranks:
            for chunk in range(chunks):
                adds = [a.microbatch for a in row if a.kind in ("B", "W") and a.chunk == chunk]
                assert adds == list(range(9))


def test_lists_are_the_same_every_time() -> None:
    for name, chunks in NAMES:
        one, other = (
            build_schedule(name, num_ranks=4, num_chunks=chunks, num_microbatches=8)
            for _ in range(2)
        )
        assert one == other


@loop_over("seed", range(40))
def test_every_schedule_of_random_size_is_complete_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    for name in ALL:
        for forward_only in (False, True):
            assert matching_problems(random_schedule(rng, name, forward_only=forward_only)) == []


# The schedules of torch.distributed.pipelining, asked for their lists without building stages.


def torch_ranks(
    p: int, order: Callable[[int], Any], place: Callable[[int], tuple[int, int]]
) -> list[list[Action]]:
    """Torch's lists in our words: its holes, reductions and pairs taken away, stages turned into
    chunks."""
    rows = []
    for rank in range(p):
        flat: list[Any] = []
        for entry in order(rank):
            if entry is not None:
                flat += entry.sub_actions or (entry,)
        kinds = [
            (entry.computation_type.value, entry.stage_index, entry.microbatch_index)
            for entry in flat
        ]
        rows.append(
            [
                Action(kind, place(stage)[1], m)
                for kind, stage, m in kinds
                if kind in ("F", "B", "I", "W")
            ]
        )
    return rows


def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 7), (4, 8), (5, 5)])
def test_gpipe_and_1f1b_have_the_order_of_torch(p: int, m: int) -> None:
    schedules = torch_schedules()
    sizes = SimpleNamespace(_num_stages=p, _n_microbatches=m)
    pairs: list[tuple[ScheduleName, Any]] = [
        ("gpipe", schedules.ScheduleGPipe),
        ("1f1b", schedules.Schedule1F1B),
    ]
    for name, reference in pairs:
        rows = reference._get_pipeline_order(sizes)
        ours = build_schedule(name, num_ranks=p, num_microbatches=m)
        expected = torch_ranks(p, rows.__getitem__, ours.rank_and_chunk)
        assert [[a.kind for a in row] for row in ours.ranks] == [
            [a.kind for a in row] for row in expected
        ]
        if name == "1f1b":
            # torch 2.13 numbers the forwards of the last rank from 1 here (not in what it runs)
            assert [a.microbatch for a in expected.pop() if a.kind == "F"] == list(range(1, m + 1))
        assert [list(row) for row in ours.ranks[: len(expected)]] == expected


@pytest.mark.parametrize(
    ("p", "v", "m"), [(2, 2, 4), (3, 2, 6), (3, 4, 9), (4, 2, 8), (4, 3, 4), (4, 2, 10)]
)
def test_interleaved_has_the_order_of_torch(p: int, v: int, m: int) -> None:
    rounds = max(1, m // p)
    sizes = SimpleNamespace(
        n_local_stages=v, microbatches_per_round=m // rounds, pp_group_size=p, _n_microbatches=m
    )
    reference = torch_schedules().ScheduleInterleaved1F1B._calculate_single_rank_operations
    ours = build_schedule(
        "interleaved", num_ranks=p, num_chunks=v, num_microbatches=m, group=m // rounds
    )
    assert [list(row) for row in ours.ranks] == torch_ranks(
        p, partial(reference, sizes), ours.rank_and_chunk
    )


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (3, 8), (4, 12), (6, 12)])
def test_zero_bubble_and_v_schedules_are_no_worse_than_those_of_torch(p: int, m: int) -> None:
    schedules = torch_schedules()
    sizes = SimpleNamespace(
        n_local_stages=1,
        microbatches_per_round=p,
        pp_group_size=p,
        num_stages=2 * p,
        _n_microbatches=m,
    )
    pairs: list[tuple[ScheduleName, int, Any]] = [
        ("zb-h1", 1, schedules.ScheduleInterleavedZeroBubble),
        ("zb-v", 2, schedules.ScheduleZBVZeroBubble),
        ("dualpipe-v", 2, schedules.ScheduleDualPipeV),
    ]
    for name, chunks, their_class in pairs:
        ours = build_schedule(name, num_ranks=p, num_chunks=chunks, num_microbatches=m)
        order = partial(their_class._calculate_single_rank_operations, sizes)
        rows = torch_ranks(p, order, ours.rank_and_chunk)
        reference = Schedule(ours.name, p, chunks, m, ours.placement, tuple(map(tuple, rows)))
        assert simulate(ours).makespan <= simulate(reference).makespan
        assert max(peak_activation_memory(ours)) <= max(peak_activation_memory(reference))


# Bad input.


def problems(pp: int, microbatches: int, rows: int | None = None, **fields: Any) -> list[str]:
    return schedule_problems(
        PipelineConfig(**fields), pp=pp, num_microbatches=microbatches, rows=rows
    )


def test_auto_is_1f1b_or_interleaved() -> None:
    assert schedule_name(PipelineConfig()) == "1f1b"
    assert schedule_name(PipelineConfig(vpp=2)) == "interleaved"
    assert schedule_name(PipelineConfig(schedule="zb-v", vpp=2)) == "zb-v"


def test_counts_below_one_are_rejected_by_name() -> None:
    assert problems(0, 0, vpp=0, group=0) == [
        "parallel.pp=0 must be at least 1.",
        "parallel.pipeline.vpp=0 must be at least 1.",
        "microbatches per step=0 must be at least 1.",
        "parallel.pipeline.group=0 must be at least 1.",
    ]


def test_too_few_microbatches_for_interleaved_name_the_batch_that_works() -> None:
    [text] = problems(4, 3, rows=6, vpp=2)
    assert "3 microbatches per step are fewer than parallel.pp=4" in text
    assert "Set train.global_batch_size to 24, or parallel.pipeline.vpp=1." in text


def test_group_must_be_from_ranks_to_microbatches() -> None:
    [text] = problems(4, 8, vpp=2, group=3)
    assert (
        "parallel.pipeline.group=3 must be from parallel.pp=4" in text
        and "Set parallel.pipeline.group=4." in text
    )
    [text] = problems(4, 8, vpp=2, group=9)
    assert "the 8 microbatches of a step. Set parallel.pipeline.group=8." in text


def test_last_group_must_be_whole_or_go_around_the_pipeline() -> None:
    [text] = problems(4, 10, rows=2, vpp=2)
    assert (
        "10 microbatches per step leave a last group of 2 with parallel.pipeline.group (unset: "
        "parallel.pp)=4" in text
    )
    assert (
        "Set train.global_batch_size to 16 or 24, or parallel.pipeline.group to one of [5, 6, 10]."
        in text
    )
    assert problems(4, 10, vpp=2, group=6) == []
    [text] = problems(2, 7, vpp=2, group=3)
    assert "Use 6 or 8 microbatches, or parallel.pipeline.group to one of [4, 5, 7]." in text


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_schedules_of_one_chunk_reject_vpp(name: str) -> None:
    [text] = problems(2, 4, schedule=name, vpp=2)
    assert text.startswith(
        f"parallel.pipeline.vpp=2: schedule {name} has one chunk per rank. Set "
        "parallel.pipeline.vpp=1"
    )


def test_v_schedules_need_two_chunks_and_interleaved_more_than_one() -> None:
    for name in ("zb-v", "dualpipe-v"):
        [text] = problems(2, 4, schedule=name)
        assert f"parallel.pipeline.vpp=1: schedule {name} needs two chunks" in text
        assert "Set parallel.pipeline.vpp=2." in text
    [text] = problems(2, 4, schedule="interleaved")
    assert (
        "parallel.pipeline.vpp=1: schedule interleaved" in text
        and "Set parallel.pipeline.vpp to 2 or more" in text
    )


def test_group_without_interleaving_is_rejected() -> None:
    [text] = problems(2, 4, group=2)
    assert (
        text.startswith("parallel.pipeline.group=2: schedule 1f1b")
        and "Leave parallel.pipeline.group unset" in text
    )


def test_invalid_schedule_reports_all_problems_together() -> None:
    with pytest.raises(
        PlanError, match="schedule zb-v on 2 ranks must be set otherwise: .*vpp=3.*group=2"
    ):
        build_schedule("zb-v", num_ranks=2, num_chunks=3, num_microbatches=4, group=2)


def test_evaluation_takes_any_number_of_microbatches() -> None:
    pipeline = PipelineConfig(vpp=2)
    assert schedule_problems(pipeline, pp=4, num_microbatches=3, forward_only=True) == []
