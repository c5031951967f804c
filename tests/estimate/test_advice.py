"""Tests of megalith/estimate/advise.py."""

from dataclasses import replace

import pytest

from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.estimate.advise import changes, host_seconds, mlp_share, notes, remedy, tried, verdict
from megalith.estimate.memory import memory_ledger, worst
from megalith.estimate.times import layer_share
from megalith.estimate.workload import Workload, plan_workload
from megalith.plan.devices import DEVICES, GIB, Device
from megalith.recipes import resolve
from megalith.rules.run import run_problems

H100 = DEVICES["h100"]


def workload(name: str, world: int, **overrides: str) -> Workload:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return plan_workload(apply_overrides(resolve(name), dict(dotted)), world)


def device(gib: float) -> Device:
    return replace(H100, memory=int(gib * GIB))


@pytest.mark.parametrize("gib, expected", [(50, "fits"), (75, "tight"), (79.5, "does not fit")])
def test_almost_full_device_is_reported_as_tight(gib: float, expected: str) -> None:
    assert verdict(int(gib * GIB), H100) == expected
    assert verdict(int(gib * GIB), replace(H100, memory=None)) == "unknown"


def test_the_nearest_fix_of_the_8b_model_is_to_divide_its_optimizer() -> None:
    fix = remedy(workload("llama3_8b", 16), H100, run_problems)
    assert fix is not None and fix.overrides == {"parallel.zero": "1"} and fix.verdict == "fits"
    assert (
        fix.nbytes + fix.saved == worst(memory_ledger(workload("llama3_8b", 16), H100)).memory.total
    )


def test_every_suggested_change_is_correct_and_violates_no_rule() -> None:
    base = workload("llama3_70b", 64)
    before = worst(memory_ledger(base, H100)).memory.total
    result = changes(base, H100, run_problems)
    assert len(result) > 5
    for change in result:
        run = apply_overrides(base.run, dict(change.overrides))
        assert run_problems(run, 64) == []
        after = worst(memory_ledger(plan_workload(run, 64), H100)).memory.total
        assert (after, before - after) == (change.nbytes, change.saved) and change.saved > 0
        assert change.verdict == verdict(after, H100) and change.price


def test_remedy_increases_ep_if_it_saves_memory() -> None:
    result = changes(workload("mixtral_8x7b", 64, parallel__ep="2"), H100, run_problems)
    (change,) = (change for change in result if change.overrides == {"parallel.ep": "4"})
    assert change.saved > 10 * GIB and "sent to the experts of more ranks" in change.price
    assert not any(
        "parallel.ep" in change.overrides
        for change in changes(workload("llama3_8b", 16), H100, run_problems)
    )


def test_notes_report_alltoall_between_nodes_and_etp() -> None:
    (note,) = (text for text in notes(workload("deepseek_v3", 2048), H100) if "parallel.ep" in text)
    assert note.startswith("parallel.ep=64 spans nodes of 8") and "Set parallel.ep to 8" in note
    assert note.endswith("where memory allows, or parallel.overlap_experts=true.")
    (hidden,) = notes(workload("deepseek_v3", 2048, parallel__overlap_experts="true"), H100)
    assert hidden.endswith("where memory allows.")
    assert not any("parallel.ep" in text for text in notes(workload("mixtral_8x7b", 64), H100))
    parts = workload("mixtral_8x7b", 64, parallel__tp="2", parallel__sp="true", parallel__ep="4")
    assert any(
        "parallel.etp=2 sends every token" in text and "parallel.ep to 8" in text
        for text in notes(parts, H100)
    )


def test_notes_report_dual_batch_overlap_with_one_microbatch() -> None:
    pairs = {"parallel__overlap_experts": "true", "train__micro_batch_size": "2"}
    few = workload("olmoe_7b", 8, train__global_batch_size="16", **pairs)
    (note,) = (text for text in notes(few, H100) if "overlap_experts" in text)
    assert note.startswith(
        "parallel.overlap_experts=true with 1 microbatch in a step: there is no second "
        "microbatch to overlap with"
    )
    assert note.endswith(
        "Set train.global_batch_size to 32 or more, or train.micro_batch_size to 1."
    )
    more = workload("olmoe_7b", 8, train__global_batch_size="32", **pairs)
    assert not any("overlap_experts" in text for text in notes(more, H100))


def test_cheap_changes_are_combined_if_no_single_one_is_enough() -> None:
    base = workload("llama3_70b", 64)
    tight = device(30)
    assert not any(change.verdict == "fits" for change in changes(base, tight, run_problems))
    fix = remedy(base, tight, run_problems)
    assert fix is not None and len(fix.overrides) > 1
    assert tried(base, fix.overrides, tight, run_problems) == fix.nbytes <= 0.94 * 30 * GIB


def test_no_change_is_suggested_if_none_helps() -> None:
    assert remedy(workload("llama3_70b", 8), device(2), run_problems) is None


def test_change_that_violates_a_rule_is_not_suggested() -> None:
    base = workload("llama3_70b", 64)

    def no_zero(run: TrainRun, world: int) -> list[str]:
        return ["no"] if run.parallel.zero else []

    assert not any("parallel.zero" in change.overrides for change in changes(base, H100, no_zero))
    assert tried(base, {"parallel.tp": "7"}, H100, lambda run, world: []) is None, (
        "a plan that cannot be made"
    )
    assert tried(base, {"parallel.qp": "7"}, H100, lambda run, world: []) is None


def test_cost_of_offload_depends_on_host_bandwidth() -> None:
    (away,) = [
        c
        for c in changes(workload("llama3_8b", 16), H100, run_problems)
        if "offload.layers" in c.overrides
    ]
    # 16 GiB at 55 GB/s each way; a third of 34 s of work for 64 microbatches.
    assert (
        away.price
        == "activation offload to host memory: 0.32 s of transfer each way for 0.18 s of forward"
    )
    (unknown,) = [
        c
        for c in changes(workload("llama3_8b", 16), replace(H100, tflops=None), run_problems)
        if "offload.layers" in c.overrides
    ]
    assert unknown.price == "activation offload to host memory"


def test_notes_report_exposed_offload_time() -> None:
    (slow,) = notes(workload("llama3_8b", 16, offload__layers="31"), H100)
    assert slow == (
        "offload.layers=31: offload takes 0.32 s per microbatch, more than the 0.18 s "
        "of forward: the rest is exposed. Set offload.layers to 17 or less to overlap "
        "all of it, or use recompute.granularity instead."
    )
    (free,) = notes(workload("llama3_8b", 16, offload__layers="17"), H100)
    assert "takes 0.18 s per microbatch, which overlaps with 0.18 s of forward." in free
    (never,) = notes(workload("llama3_8b", 16, offload__layers="17"), replace(H100, host_gbs=1.0))
    assert never.endswith("the rest is exposed. Use recompute.granularity instead.")
    assert notes(workload("llama3_8b", 16, offload__layers="31"), replace(H100, tflops=None)) == []
    assert host_seconds(workload("llama3_8b", 16), H100) == pytest.approx((0.0, 0.1775), rel=1e-2)


def test_shares_of_the_work() -> None:
    run = resolve("llama3_8b")
    assert layer_share(run) == pytest.approx(1 - 6 * 4096 * 128_256 / 51_470_401_536)
    assert mlp_share(run) == pytest.approx(6 * 32 * 3 * 4096 * 14_336 / 51_470_401_536)


def test_notes_report_settings_without_effect_and_slow_ones() -> None:
    pointless = workload("llama3_8b", 2, recompute__granularity="selective")
    (note,) = notes(pointless, H100)
    assert "recompute.modules=['core_attention']: fused attention saves no scores" in note
    assert "saves 0.016 GiB per rank. Use [norm, mlp_act] first." in note
    wide = workload("llama3_70b", 32, parallel__tp="16")
    assert any("parallel.tp=16 spans nodes of 8" in note for note in notes(wide, H100))
    assert notes(workload("llama3_70b", 32), H100) == []


def test_notes_report_reference_kernels() -> None:
    (note,) = notes(workload("llama3_70b", 32, kernels="reference"), H100)
    assert (
        note.startswith("kernels=reference: the reference backends save")
        and "Use kernels=auto to run as estimated" in note
    )
    assert notes(workload("llama3_70b", 32, kernels="torch"), H100) == []


def test_notes_report_padding_of_slicing_by_document() -> None:
    shared = {"parallel__cp": "2", "parallel__context__slicing": "document"}
    assert notes(workload("llama3_8b", 16, **shared), H100) == notes(
        workload("llama3_8b", 16), H100
    )
    expected = notes(workload("llama3_8b", 16, data__document_masking="true", **shared), H100)
    (note,) = [one for one in expected if "slicing=document" in one]
    assert (
        "pads each document to a multiple of 8 tokens; the figures here count a row as one "
        "document." in note
    )
    assert "adds up to 7 tokens" in note and "documents of 32 tokens about 11 % more" in note
    assert note.endswith("Set parallel.context.slicing=row if documents are short.")


def test_notes_report_that_packs_count_as_longest_documents() -> None:
    packed = workload(
        "llama3_8b", 16, train__tokens_per_microbatch="8192", train__micro_batch_size="1"
    )
    (note,) = [one for one in notes(packed, H100) if "tokens_per_microbatch" in one]
    assert (
        "train.tokens_per_microbatch=8192: these figures are for documents that all have "
        "train.seq_len=" in note
    )
    assert note.endswith("Use a smaller train.seq_len to estimate a typical step.")
