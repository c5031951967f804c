"""What a load leaves out is decided from names alone, before a tensor is read."""

import pytest

from megalith.checkpoint.keys import (
    LoadReport,
    check_patterns,
    compare_keys,
    differences,
    format_expert_numbers,
    group_by_pattern,
    is_skipped,
    is_state,
    name_experts,
    select_rejected_keys,
    weights_key,
)
from megalith.config.checkpoint import CheckpointConfig
from megalith.errors import CheckpointError


def wanted(*keys: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (key, (2, 3)) for key in keys}


def test_a_master_is_its_weights_and_moments_are_the_optimizers_own() -> None:
    assert weights_key("optimizer.master.a.b") == "model.a.b" and weights_key(
        "optimizer.exp_avg.a"
    ) == ("optimizer.exp_avg.a")
    assert [is_state(key) for key in ("model.a", "optimizer.master.a", "optimizer.exp_avg.a")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "pattern", ["head.*", "model.head.weight", "optimizer.master.head.weight", "*.weight"]
)
def test_weights_are_skipped_with_their_master_weights(pattern: str) -> None:
    assert is_skipped("model.head.weight", [pattern]) and is_skipped(
        "optimizer.master.head.weight", [pattern]
    )
    assert not is_skipped("model.layers.0.attention.q", [pattern])
    assert is_skipped("optimizer.exp_avg.head.weight", [pattern]) == (
        pattern in ("head.*", "*.weight")
    )


def test_tensors_that_keep_values_are_counted_once() -> None:
    keys = ("model.a", "optimizer.master.a", "model.b", "optimizer.master.b")
    report = compare_keys(
        wanted(*keys), {"model.b", "optimizer.master.b", "model.c"}, skip=["b"], purpose="start"
    )
    assert report.missing_keys == ("model.a", "optimizer.master.a") and report.unexpected_keys == (
        "model.c",
    )
    assert report.kept == ("model.a", "model.b") and report.numel == 12


def test_moments_are_unexpected_keys_of_resume_with_other_optimizer() -> None:
    stored = {"model.a", "optimizer.master.a", "optimizer.exp_avg.a"}
    requested = wanted("model.a", "optimizer.momentum.a")
    report = compare_keys(requested, stored)
    assert report.unexpected_keys == ("optimizer.exp_avg.a",) and report.fresh_state
    assert compare_keys(requested, stored, purpose="start").unexpected_keys == ()
    assert not compare_keys(wanted("model.a"), stored).fresh_state


@pytest.mark.parametrize("purpose", ["resume", "start"])
def test_only_a_new_run_may_have_missing_weights(purpose: str) -> None:
    report = LoadReport(("model.a", "optimizer.exp_avg.a"), ("model.b",))
    lenient = CheckpointConfig(missing_keys="warn", unexpected_keys="ignore")
    rejected_keys = select_rejected_keys(report, lenient, purpose)  # type: ignore[arg-type]  # one of the two
    assert rejected_keys == (
        LoadReport(("model.a",), ("model.b",)) if purpose == "resume" else LoadReport()
    )
    assert select_rejected_keys(report, CheckpointConfig(), "start") == report


def test_unmatched_skip_pattern_is_rejected_with_parameter_names() -> None:
    check_patterns(
        ["head.*", "optimizer.exp_avg.*"], {"model.head.weight"}, {"optimizer.exp_avg.head.weight"}
    )
    with pytest.raises(
        CheckpointError, match=r"skip=heat.weight matches no tensor .* Did you mean head.weight\?"
    ):
        check_patterns(["heat.weight"], {"model.head.weight"}, {"model.norm.weight"})


def test_names_that_differ_in_a_number_share_a_line() -> None:
    assert group_by_pattern(["layers.0.q", "layers.1.q", "norm"]) == [
        "layers.*.q (* = 0, 1)",
        "norm",
    ]


def test_missing_experts_are_named_by_number() -> None:
    keys = [
        f"model.layers.{layer}.moe.experts.{word}"
        for layer in (1, 2)
        for word in ("down", "gate_up")
    ]
    requested = {key: (key, (8, 3)) for key in keys} | {
        "model.norm.weight": ("model.norm.weight", (3,))
    }
    report = compare_keys(requested, {"model.norm.weight"}, purpose="start")
    assert (
        report.num_experts == 8
        and select_rejected_keys(report, CheckpointConfig(), "start").num_experts == 8
    )
    assert differences([], report) == (
        "  only in this run: model.layers.*.moe.experts.down (* = 1, 2): experts 0 to 7\n"
        "  only in this run: model.layers.*.moe.experts.gate_up (* = 1, 2): experts 0 to 7"
    )
    assert compare_keys(requested, {*keys}, purpose="start").num_experts == 0


def test_single_experts_are_named_by_layer() -> None:
    lost = [
        f"model.layers.0.mlp.experts.{number}.{word}.weight"
        for number in (1, 4, 5, 6)
        for word in ("up", "down")
    ]
    lost += [
        "model.norm.weight",
        "model.layers.3.mlp.experts.2.up.weight",
        "model.layers.3.mlp.experts.4.down.weight",
    ]
    assert name_experts(lost) == [
        "model.norm.weight",
        "experts 1, 4 to 6 of model.layers.0.mlp (down.weight, up.weight)",
        "expert 2 of model.layers.3.mlp (up.weight)",
        "expert 4 of model.layers.3.mlp (down.weight)",
    ]
    assert format_expert_numbers([]) == "" and format_expert_numbers([3, 2]) == "experts 2, 3"
