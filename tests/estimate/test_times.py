"""Tests of megalith/estimate/times.py."""

import pytest

from megalith.config.tree import Override, apply_overrides
from megalith.estimate.times import (
    CommunicationTime,
    attention_share,
    communication_time,
    estimate_phases,
    rank_flops,
    repeated_share,
    step_traffic,
    work_seconds,
)
from megalith.estimate.workload import plan_workload
from megalith.plan.devices import DEVICES, EFFICIENCY, LINK_EFFICIENCY, device_named
from megalith.recipes import resolve
from megalith.testing.tiny import tiny_run

H100 = DEVICES["h100"]


def test_flops_of_a_rank_are_its_share_of_a_step() -> None:
    workload = plan_workload(resolve("llama3_8b"), 8)
    tokens = 512 * 8192
    assert rank_flops(workload) == pytest.approx(51_470_401_536 * tokens / 8)
    seconds = work_seconds(workload, H100)
    assert seconds == pytest.approx(rank_flops(workload) / (989.4e12 * EFFICIENCY))
    assert work_seconds(workload, device_named("40", world=8, host_memory=0)) is None


def test_recomputation_is_part_of_the_time() -> None:
    full = {"recompute.granularity": "full"}
    run = resolve("llama3_8b")
    plain, again = (plan_workload(apply_overrides(run, settings), 8) for settings in ({}, full))
    head = 6 * 4096 * 128_256 / 51_470_401_536
    assert repeated_share(plain) == 0
    assert repeated_share(again) == pytest.approx((1 - head) / 3)
    slow, fast = work_seconds(again, H100), work_seconds(plain, H100)
    assert (
        slow is not None and fast is not None and slow / fast == pytest.approx(1 + (1 - head) / 3)
    )
    block = full | {"recompute.method": "block", "recompute.num_layers": "8", "parallel.pp": "2"}
    half = plan_workload(apply_overrides(run, block), 8)
    assert repeated_share(half) == pytest.approx((1 - head) / 3 / 2), "8 of 16 layers of each stage"


def test_a_link_within_a_node_is_the_faster_one() -> None:
    workload = plan_workload(apply_overrides(resolve("llama3_70b"), {"parallel.cp": "2"}), 32)
    result = {}
    for row in step_traffic(workload, 0, 0):
        way = communication_time(workload, row, pp_rank=0, tp_rank=0, device=H100)
        assert way is not None
        rate = (450e9 if way.near else 50e9) * LINK_EFFICIENCY
        assert way.seconds == pytest.approx(row.nbytes / rate)
        result[row.axis] = way.near
        assert (way.room == 0) == (row.behind == "")
    assert result == {"tp": True, "cp": False, "dp": False}


def test_expert_all_to_all_overlaps_with_dual_batch_computation() -> None:
    layout = {
        "parallel.ep": "8",
        "parallel.tp": "1",
        "parallel.pp": "1",
        "train.global_batch_size": "64",
    }
    result = {}
    for pairs in ("false", "true"):
        run = apply_overrides(resolve("mixtral_8x7b"), layout | {"parallel.overlap_experts": pairs})
        workload = plan_workload(run, 8)
        (row,) = (
            row for row in step_traffic(workload, 0, 0) if row.what == "rows to experts and back"
        )
        result[pairs] = communication_time(workload, row, pp_rank=0, tp_rank=0, device=H100)
        work = work_seconds(workload, H100)
    plain, paired = result["false"], result["true"]
    assert plain is not None and paired is not None and work is not None
    assert plain.room == 0 and paired.seconds == plain.seconds
    many = workload.num_microbatches
    assert many > 1 and paired.room == pytest.approx((many - 1) / many * work), (
        "the first forward has no partner"
    )


def test_exposed_time_is_what_does_not_overlap() -> None:
    assert CommunicationTime(near=True, seconds=3.0, room=2.0).exposed == 1.0
    assert CommunicationTime(near=True, seconds=3.0, room=5.0).exposed == 0.0


def test_transfer_time_is_none_without_bandwidth() -> None:
    workload = plan_workload(resolve("llama3_8b"), 8)
    row = step_traffic(workload, 0, 0)[0]
    cpu = device_named("cpu", world=8, host_memory=2**34)
    assert communication_time(workload, row, pp_rank=0, tp_rank=0, device=cpu) is None


def test_share_of_attention_grows_with_row_length() -> None:
    short, long = (
        plan_workload(apply_overrides(resolve("llama3_8b"), {"train.seq_len": length}), 2)
        for length in ("1024", "8192")
    )
    assert 0 < attention_share(short) < attention_share(long) < 0.2


def test_phases_of_a_batch_schedule_have_their_microbatches_and_the_work_of_the_busiest_rank() -> (
    None
):
    settings: dict[str, Override] = {
        "train.batch_size_schedule": "[{size: 6}, {samples: 12, size: 7}, {samples: 26, size: 18}]",
        "train.global_batch_size": "18",
        "train.micro_batch_size": "1",
        "train.uneven_batch": "allow",
        "train.steps": "6",
    }
    workload = plan_workload(tiny_run(settings), 3)
    phases = estimate_phases(workload, H100)
    assert [(phase.start, phase.size, phase.num_steps) for phase in phases] == [
        (0, 6, 2),
        (12, 7, 2),
        (26, 18, 2),
    ]
    assert [phase.num_microbatches for phase in phases] == [2, 3, 6]
    assert [phase.idle_ranks for phase in phases] == [
        "",
        "2 of 3 ranks idle for 1 of 3 microbatches",
        "",
    ]
    work = [phase.work_seconds or 0.0 for phase in phases]
    assert work[2] == pytest.approx(work_seconds(workload, H100))
    assert [each / work[2] for each in work] == pytest.approx([2 / 6, 3 / 6, 1.0])
