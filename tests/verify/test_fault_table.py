"""Every planted fault is rejected by the type check or by the float64 comparison."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith.config.moe import MoEConfig
from megalith.verify.faults.plant import Fault, find_fault, load_faults
from megalith.verify.faults.table import (
    EXPERT_NEEDS,
    FaultResult,
    Outcome,
    _first_difference,
    as_markdown,
    judge_fault,
    smallest_layout,
)
from megalith.verify.matrix import load_matrix
from megalith.verify.ranks import Difference
from tests.cases import loop_over

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "concepts" / "types.md"
DEFECTS = PAGE.parents[1] / "reference" / "defects_of_megatron.md"

EXPECTED: dict[str, tuple[bool, Outcome]] = {
    "column_enter_removed": (True, "wrong gradients"),
    "row_sum_removed": (True, "wrong loss"),
    "row_sum_over_dp": (True, "wrong loss"),
    "overlapped_sum_removed": (False, "wrong gradients"),
    "sp_gather_removed": (True, "wrong shapes"),
    "sp_norm_invariant": (True, "wrong gradients"),
    "sp_norm_not_summed": (False, "wrong gradients"),
    "kv_copies_not_summed": (False, "wrong gradients"),
    "vocab_loss_local": (True, "wrong loss"),
    "z_loss_of_own_rows": (False, "wrong gradients"),
    "dp_sum_averaged": (False, "wrong gradients"),
    "flat_buckets_overlap": (False, "wrong loss"),
    "loss_scaled_per_rank": (False, "wrong loss"),
    "mtp_loss_scaled_per_rank": (False, "wrong gradients"),
    "mtp_table_not_summed": (False, "wrong gradients"),
    "mtp_copy_not_summed": (False, "wrong gradients"),
    "depths_in_other_order": (False, "wrong gradients"),
    "depths_gradients_kept": (False, "wrong gradients"),
    "depths_before_their_norms": (False, "wrong gradients"),
    "ring_never_turned": (False, "wrong loss"),
    "ring_gradients_kept": (False, "wrong gradients"),
    "cp_positions_local": (False, "wrong loss"),
    "cp_places_of_the_first_slice": (False, "wrong loss"),
    "cp_chunks_swapped": (False, "wrong loss"),
    "cp_weights_dropped_by_own_numbers": (False, "wrong loss"),
    "dropout_per_rank": (False, "wrong loss"),
    "tied_sum_left_out": (False, "wrong gradients"),
    "microbatches_swapped": (False, "wrong loss"),
    "memory_gradient_kept": (False, "wrong gradients"),
    "memory_of_another_microbatch": (False, "wrong loss"),
    "memory_of_later_tokens": (False, "wrong loss"),
    "chunks_swapped": (False, "wrong loss"),
    "weights_part_left_out": (False, "wrong gradients"),
    "stale_weights": (False, "wrong loss"),
    "slice_off_by_one": (False, "wrong gradients"),
    "replicas_not_summed": (False, "wrong gradients"),
    "slices_not_summed_over_tp": (False, "wrong gradients"),
    "fsdp_takes_means": (False, "wrong gradients"),
    "fsdp_replicas_not_summed": (False, "wrong gradients"),
    "microbatch_overwritten": (False, "wrong gradients"),
    "cp_left_out_of_sum": (False, "wrong gradients"),
    "cp_gather_unsorted": (False, "wrong loss"),
    "a2a_heads_swapped": (False, "wrong loss"),
    "chunks_of_rows": (False, "wrong loss"),
    "documents_joined_across_ranks": (False, "wrong loss"),
    "ring_gather_owner": (False, "wrong loss"),
    "ring_scatter_owner": (False, "wrong loss"),
    "regather_owner": (False, "wrong gradients"),
    "window_lost_in_ring": (False, "wrong loss"),
    "sinks_in_every_step": (False, "wrong loss"),
    "distances_within_a_rank": (False, "wrong loss"),
    "masks_of_another_rank": (False, "wrong loss"),
    "masks_forgotten": (False, "wrong loss"),
    "biases_not_summed_over_stages": (False, "wrong gradients"),
    "biases_of_other_heads": (False, "wrong loss"),
    "extra_score_left_out": (False, "wrong loss"),
    "whole_norm_local": (True, "wrong loss"),
    "latent_key_not_entered": (True, "wrong gradients"),
    "positions_of_first_rank": (False, "wrong loss"),
    "adapter_invariant": (True, "wrong gradients"),
    "adapter_mask_of_first_slice": (False, "wrong loss"),
    "stale_input_recomputed": (False, "wrong gradients"),
    "norm_counts_copies": (False, "wrong gradients"),
    "experts_summed_over_dp": (False, "wrong gradients"),
    "whole_experts_overwritten": (False, "wrong gradients"),
    "etp_alone_on_dense_grid": (False, "wrong gradients"),
    "experts_drawn_by_place": (False, "wrong loss"),
    "router_invariant": (True, "wrong gradients"),
    "etp_sum_removed": (True, "wrong loss"),
    "answers_in_wrong_order": (False, "wrong loss"),
    "rows_read_early": (False, "wrong loss"),
    "experts_weighted_twice": (False, "wrong loss"),
    "refused_by_each_rank": (False, "wrong loss"),
    "counted_before_refusal": (False, "wrong counts"),
    "balance_of_own_tokens": (False, "wrong gradients"),
    "balance_scaled_with_cp": (False, "wrong gradients"),
    "step_of_own_tokens": (False, "wrong gradients"),
    "aux_losses_scaled_per_rank": (False, "wrong gradients"),
    "bias_moved_by_own_tokens": (False, "wrong weights after a step"),
    "offset_of_own_tokens": (False, "wrong weights after a step"),
    "second_pass_counted": (False, "wrong counts"),
    "second_sum_removed": (True, "wrong gradients"),
    "host_copy_lost": (False, "wrong gradients"),
    # The last two only omit a declaration, so no value changes.
    "embedding_not_summed": (True, "wrong loss"),
    "requests_of_first_rank": (False, "wrong weights after a step"),
    "rerun_added_to_gradients": (False, "wrong weights after a step"),
    "frozen_weights_decay": (False, "wrong weights after a step"),
    "rates_of_the_neighbor": (False, "wrong weights after a step"),
    "bias_before_sum": (True, "wrong weights after a step"),
    "adamw_bias_correction_off_by_one": (False, "wrong update"),
    "vectors_decay": (False, "wrong update"),
    "adamw_decay_added_to_gradient": (False, "wrong update"),
    "sgd_momentum_damped": (False, "wrong update"),
    "sgd_vectors_decay": (False, "wrong update"),
    "keys_orthogonalized_with_values": (False, "wrong update"),
    "muon_momentum_unclipped": (False, "wrong update"),
    "muon_scale_of_local_shape": (False, "wrong weights after a step"),
    "pieces_stacked_in_rank_order": (False, "wrong weights after a step"),
    "replica_without_direction": (False, "wrong weights after a step"),
    "clip_norm_ignores_parameter": (False, "wrong update"),
    "clip_norm_counts_parameter_twice": (False, "wrong update"),
    "qk_clip_after_all_gather": (False, "wrong weights after a step"),
    "qk_clip_of_other_group": (False, "wrong weights after a step"),
    "scores_of_own_batch": (False, "wrong weights after a step"),
    "moments_swapped_on_load": (False, "wrong checkpoint"),
    "box_offset_lost_on_load": (False, "wrong checkpoint"),
    "optimizer_step_lost_on_load": (False, "wrong checkpoint"),
    "slices_shifted_on_save": (False, "wrong update"),
    "loss_not_partial": (True, "no effect"),
    "etp_part_not_declared": (True, "no effect"),
}
"""Per fault: whether the type check rejects it, and the outcome of float64 on real processes."""


class Verdicts(dict[str, FaultResult]):
    """Of each fault, found when it is first asked for."""

    def __missing__(self, name: str) -> FaultResult:
        self[name] = judge_fault(find_fault(name))
        return self[name]


@pytest.fixture(scope="module")
def fault_results() -> Verdicts:
    return Verdicts()


def test_every_fault_has_an_expected_outcome() -> None:
    assert set(EXPECTED) == {fault.name for fault in load_faults()}


@pytest.mark.parametrize("name", EXPECTED)
def test_planted_fault_is_rejected(
    name: str, fault_results: Verdicts, record_property: Callable[[str, object], None]
) -> None:
    verdict = fault_results[name]
    assert verdict.rejected
    assert (verdict.by_types is not None, verdict.numbers) == EXPECTED[name]
    assert (verdict.by_types is not None) == (verdict.fault.found_by != "numbers")
    if verdict.numbers not in ("no effect", "wrong shapes"):
        assert float(verdict.detail.split("off by ")[1].split()[0]) > 1e-6  # not by rounding
    record_property("rejected_fault", name)  # `.ci/run` fails unless every fault is recorded


def test_docs_list_every_fault_with_its_outcome() -> None:
    rows = dict(re.findall(r"^\| `(\w+)`: [^|]*\| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert set(rows) == set(EXPECTED)
    for name, row in rows.items():
        types, numbers = row.split(" | ")
        assert types.startswith("rejected: " if EXPECTED[name][0] else "not detected"), name
        assert types.endswith(find_fault(name).found_by), name
        assert numbers.startswith(EXPECTED[name][1]), name


def test_every_known_defect_of_megatron_has_a_test_that_exists() -> None:
    """Each row of the page names a test, a planted fault or a row of the matrix."""
    areas = DEFECTS.read_text().split("\n## ")[1:]
    rows = [line for area in areas for line in area.splitlines() if line.startswith("| ")]
    rows = [line for line in rows if not line.startswith("| Defect |")]
    assert len(areas) >= 7 and len(rows) >= 100
    names = {row.name for row in load_matrix()}
    for line in rows:
        evidence = line.strip("| ").split(" | ")[2]
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", evidence)
        faults = re.findall(r"planted `(\w+)`", evidence)
        layouts = re.findall(r'row "([^"]+)"', evidence)
        assert tests or faults or layouts, line
        assert len(tests) + len(faults) == evidence.count("`") // 2, line
        for path, name in tests:
            file = DEFECTS.parents[2] / path
            assert file.exists() and f"def {name}(" in file.read_text(), f"{path}::{name}"
        assert {*faults} <= {*EXPECTED} and {*layouts} <= names, line


def test_fault_table_is_formatted_as_markdown(fault_results: Verdicts) -> None:
    table = as_markdown([fault_results[name] for name in EXPECTED])
    print(table)
    assert len(table.splitlines()) == 2 + len(load_faults())
    assert all(line.count(" | ") == 2 for line in table.splitlines() if line.startswith("| `"))


@loop_over("fault", load_faults())
def test_smallest_layout_has_the_features_that_the_fault_needs(fault: Fault) -> None:
    model, parallel = smallest_layout(fault)
    assert (parallel.tp > 1, (parallel.dp or 1) > 1) == ("tp" in fault.needs, "dp" in fault.needs)
    assert (parallel.cp > 1, parallel.pp > 1) == ("cp" in fault.needs, "pp" in fault.needs)
    assert (parallel.pipeline.vpp > 2, parallel.pipeline.schedule == "zb-h1") == (
        "chunks" in fault.needs,
        "split backward" in fault.needs,
    )
    assert (parallel.zero > 0, parallel.dp_replicate > 1) == (
        "zero" in fault.needs,
        "replicas" in fault.needs,
    )
    assert (parallel.zero == 2, parallel.zero == 3) == (
        "zero 2" in fault.needs,
        "fsdp" in fault.needs,
    )
    assert parallel.tp_comm_overlap == ("rings" in fault.needs)
    assert [parallel.context.kind == kind for kind in ("gather", "a2a")] == [
        n in fault.needs for n in ("gather", "a2a")
    ]
    assert (model.attention.qk_norm == "whole") == ("whole norms" in fault.needs)
    assert (model.attention.sinks, model.attention.window is not None) == (
        "sinks" in fault.needs,
        "window" in fault.needs,
    )
    assert (model.positions == "learned") == ("learned positions" in fault.needs)
    assert bool(model.rope.sections) == ("places" in fault.needs)
    assert model.tied_embeddings == ("tied" in fault.needs)
    assert parallel.sp == ("sp" in fault.needs)
    assert (model.moe is not None) == bool(EXPERT_NEEDS & {*fault.needs})
    assert (parallel.ep > 1, parallel.etp is not None) == (
        "ep" in fault.needs,
        "etp" in fault.needs,
    )
    moe = model.moe or MoEConfig(num_experts=1, ffn_hidden_size=1)
    assert (moe.capacity.factor is not None, moe.router.expert_bias, moe.aux_loss.quantile) == (
        "capacity" in fault.needs,
        "balancing bias" in fault.needs,
        "balancing offset" in fault.needs,
    )
    assert (moe.aux_loss.global_batch_coeff > 0) == ("balance over ranks" in fault.needs)
    assert (model.num_kv_heads < parallel.tp) == ("shared heads" in fault.needs)
    assert model.output_bias == ("bias" in fault.needs)
    assert (model.dropout.residual > 0) == ("dropout" in fault.needs)
    assert (model.dropout.attention > 0) == ("dropped weights" in fault.needs)


def difference(what: str, *, holds: bool) -> Difference:
    """As a proof would find it."""
    return Difference(what, "norm.weight", 0.0 if holds else 0.25, holds)


def test_first_difference_determines_the_outcome() -> None:
    later = [
        difference("weights after 3 steps", holds=False),
        difference("replicas are equal", holds=False),
    ]
    assert _first_difference([difference("first loss", holds=True)]) == ("no effect", "")
    assert _first_difference(later)[0] == "wrong weights after a step"
    assert _first_difference([*later, difference("gradients", holds=False)]) == (
        "wrong gradients",
        "gradients off by 2e-01 in `norm.weight`",
    )
    assert _first_difference(
        [difference("gradients", holds=False), difference("first loss", holds=False)]
    )[0] == ("wrong loss")
