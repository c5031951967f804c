"""Forwards and backwards in pairs: that they do not need each other, and that ranks never wait for
each other."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import DispatcherName, ParallelConfig, PipelineConfig, ScheduleName
from megalith.plan.check_schedule import queue_problems
from megalith.plan.schedule import (
    PAIRED_SCHEDULES,
    Schedule,
    build_schedule,
    concurrent_actions,
    pair_forward_backward,
    pairing_problems,
    with_transfers,
)
from megalith.plan.simulate import find_problems, peak_activation_memory, simulate
from megalith.testing.tiny import random_schedule

MODEL = ModelConfig(
    vocab_size=8,
    hidden_size=6,
    num_layers=4,
    num_heads=2,
    num_kv_heads=2,
    ffn_hidden_size=8,
    moe=MoEConfig(num_experts=4, ffn_hidden_size=4),
)


def texts(schedule: Schedule) -> list[str]:
    chunks = schedule.num_chunks > 1
    return [
        " ".join(
            "+".join(f"{a.kind}{a.microbatch}{'ab'[a.chunk] if chunks else ''}" for a in each)
            for each in concurrent_actions(schedule, rank)
        )
        for rank in range(schedule.num_ranks)
    ]


def test_without_a_pipeline_each_backward_stands_beside_the_next_forward() -> None:
    assert texts(
        pair_forward_backward(build_schedule("1f1b", num_ranks=1, num_microbatches=4))
    ) == ["F0 F1+B0 F2+B1 F3+B2 B3"]
    assert texts(
        pair_forward_backward(build_schedule("1f1b", num_ranks=1, num_microbatches=1))
    ) == ["F0 B0"]


def test_in_1f1b_the_first_ranks_run_twice_as_far_ahead() -> None:
    assert texts(
        pair_forward_backward(build_schedule("1f1b", num_ranks=2, num_microbatches=5))
    ) == [
        "F0 F1 F2 F3+B0 F4+B1 B2 B3 B4",
        "F0 F1+B0 F2+B1 F3+B2 F4+B3 B4",
    ]


def test_interleaved_pairs_need_one_more_warmup_forward() -> None:
    schedule = build_schedule("interleaved", num_ranks=2, num_chunks=2, num_microbatches=4)
    assert texts(pair_forward_backward(schedule)) == [
        "F0a F1a F0b F1b F2a F3a+B0b F2b+B1b F3b+B0a B1a B2b B3b B2a B3a",
        "F0a F1a F0b F1b+B0b F2a+B1b F3a+B0a F2b+B1a F3b+B2b B3b B2a B3a",
    ]


def test_the_middle_of_dualpipe_is_pairs_of_both_chunks() -> None:
    schedule = build_schedule("dualpipe-v", num_ranks=2, num_chunks=2, num_microbatches=5)
    assert texts(pair_forward_backward(schedule))[1] == (
        "F0a F0b F1a F1b F2a+B0b F2b+B0a F3a+B1b F3b+B1a F4a+B2b F4b+B2a B3b B3a I4b I4a W4b W4a"
    )


def pairs_of(schedule: Schedule) -> int:
    return sum(
        len(each) == 2
        for rank in range(schedule.num_ranks)
        for each in concurrent_actions(schedule, rank)
    )


@pytest.mark.parametrize("name", PAIRED_SCHEDULES)
def test_pairs_are_of_two_microbatches_and_lists_match_and_never_block(name: ScheduleName) -> None:
    rng, result = random.Random(7), 0
    for _ in range(60):
        plain = random_schedule(rng, name)
        paired = pair_forward_backward(plain)
        for rank, actions in enumerate(plain.ranks):
            assert sorted(paired.ranks[rank]) == sorted(actions), "the same work"
            for each in concurrent_actions(paired, rank):
                assert len(each) == 1 or [action.kind for action in each] == ["F", "B"]
                assert len({action.microbatch for action in each}) == len(each)
        for overlap in (True, False):
            linked = with_transfers(paired, overlap=overlap)
            assert find_problems(linked) == [] and queue_problems(linked) == []
            for rank in range(plain.num_ranks):
                computed = [each for each in concurrent_actions(linked, rank) if each[0].peer < 0]
                assert computed == list(concurrent_actions(paired, rank)), (
                    "no message within a pair"
                )
        result += pairs_of(paired)
    assert result > 200


def test_forward_that_its_paired_backward_depends_on_is_detected() -> None:
    """With too few forwards ahead, a pair holds back what the next rank needs for its half."""
    schedule = pair_forward_backward(build_schedule("1f1b", num_ranks=2, num_microbatches=2))
    assert texts(schedule) == ["F0 F1 B0 B1", "F0 F1+B0 B1"]
    wrong = replace(schedule, pairs=(frozenset({(0, 1)}), schedule.pairs[1]))
    (problem,) = find_problems(with_transfers(wrong))
    assert problem.startswith("deadlock: rank 0, action 5 (B of microbatch 0) waits for rank 1")


@pytest.mark.parametrize(
    ("name", "chunks", "held", "before"),
    [("1f1b", 1, 8, 4), ("interleaved", 2, 12, 11), ("dualpipe-v", 2, 9, 9)],
)
def test_pairs_take_no_simulated_time_and_the_planned_memory(
    name: ScheduleName, chunks: int, held: int, before: int
) -> None:
    schedule = build_schedule(name, num_ranks=4, num_chunks=chunks, num_microbatches=16)
    paired = pair_forward_backward(schedule)
    assert (max(peak_activation_memory(schedule)), max(peak_activation_memory(paired))) == (
        before,
        held,
    )
    slower = Fraction(simulate(with_transfers(paired)).makespan) / Fraction(
        simulate(with_transfers(schedule)).makespan
    )
    assert slower <= (Fraction(103, 99) if name == "dualpipe-v" else 1)


def test_schedule_without_pairs_is_executed_one_action_at_a_time() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=3)
    assert pairs_of(schedule) == 0
    assert (
        pairs_of(
            pair_forward_backward(
                build_schedule("dualpipe-v", num_ranks=3, num_chunks=2, num_microbatches=1)
            )
        )
        == 0
    )


@pytest.mark.parametrize(
    ("parallel", "moe", "text"),
    [
        (
            ParallelConfig(ep=2),
            False,
            "model.moe=null: there is no token dispatch to overlap. Set parallel.overlap_experts",
        ),
        (
            ParallelConfig(),
            True,
            "parallel.ep=1: there is no all-to-all to overlap. Set parallel.ep to a "
            "divisor of model.moe.num_experts=4 above 1",
        ),
        (
            ParallelConfig(ep=2, dispatcher="allgather"),
            True,
            "parallel.dispatcher=allgather: only an all-to-all can be overlapped",
        ),
        (
            ParallelConfig(ep=2, zero=3),
            True,
            "parallel.zero=3: weights are gathered for one pass through a layer",
        ),
        (
            ParallelConfig(ep=2, pp=2, pipeline=PipelineConfig(schedule="zb-h1")),
            True,
            "parallel.pipeline.schedule=zb-h1: it does not alternate forwards and backwards. "
            "Set parallel.pipeline.schedule to one of 1f1b, interleaved, dualpipe-v.",
        ),
    ],
)
def test_unsupported_settings_of_dual_batch_overlap_are_reported(
    parallel: ParallelConfig, moe: bool, text: str
) -> None:
    model = MODEL if moe else replace(MODEL, moe=None)
    assert pairing_problems(model, parallel) == []
    (problem,) = pairing_problems(model, replace(parallel, overlap_experts=True))
    assert problem.startswith("parallel.overlap_experts=true with ") and text in problem


def test_valid_dual_batch_layouts_have_no_notes() -> None:
    exchange: DispatcherName = "alltoall"
    for pipeline in (
        PipelineConfig(),
        PipelineConfig(vpp=2),
        PipelineConfig(schedule="dualpipe-v", vpp=2),
    ):
        for pp in (1, 2):
            parallel = ParallelConfig(
                ep=2, pp=pp, pipeline=pipeline, dispatcher=exchange, overlap_experts=True
            )
            assert pairing_problems(MODEL, parallel) == []
