"""What a load leaves out is decided from names alone, before a tensor is read."""

import pytest

from megalith.checkpoint.strictness import (
    LoadReport,
    by_pattern,
    check_patterns,
    is_skipped,
    is_state,
    left_out,
    refused,
    weights_of,
)
from megalith.config.checkpoint import CheckpointConfig
from megalith.errors import CheckpointError


def wanted(*keys: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (key, (2, 3)) for key in keys}


def test_a_master_is_its_weights_and_moments_are_the_optimizers_own() -> None:
    assert weights_of("optimizer.master.a.b") == "model.a.b" and weights_of("optimizer.exp_avg.a") == (
        "optimizer.exp_avg.a"
    )
    assert [is_state(key) for key in ("model.a", "optimizer.master.a", "optimizer.exp_avg.a")] == [False, False, True]


@pytest.mark.parametrize("pattern", ["head.*", "model.head.weight", "optimizer.master.head.weight", "*.weight"])
def test_weights_are_skipped_with_their_masters(pattern: str) -> None:
    assert is_skipped("model.head.weight", [pattern]) and is_skipped("optimizer.master.head.weight", [pattern])
    assert not is_skipped("model.layers.0.attention.q", [pattern])
    assert is_skipped("optimizer.exp_avg.head.weight", [pattern]) == (pattern in ("head.*", "*.weight"))


def test_what_keeps_its_values_is_counted_once() -> None:
    keys = ("model.a", "optimizer.master.a", "model.b", "optimizer.master.b")
    report = left_out(wanted(*keys), {"model.b", "optimizer.master.b", "model.c"}, skip=["b"], purpose="start")
    assert report.missing == ("model.a", "optimizer.master.a") and report.surplus == ("model.c",)
    assert report.kept == ("model.a", "model.b") and report.numel == 12


def test_moments_are_surplus_to_a_run_that_resumes_with_others() -> None:
    stored = {"model.a", "optimizer.master.a", "optimizer.exp_avg.a"}
    asked = wanted("model.a", "optimizer.momentum.a")
    report = left_out(asked, stored)
    assert report.surplus == ("optimizer.exp_avg.a",) and report.fresh_state
    assert left_out(asked, stored, purpose="start").surplus == ()
    assert not left_out(wanted("model.a"), stored).fresh_state


@pytest.mark.parametrize("purpose", ["resume", "start"])
def test_only_a_start_may_lack_weights(purpose: str) -> None:
    report = LoadReport(("model.a", "optimizer.exp_avg.a"), ("model.b",))
    lenient = CheckpointConfig(missing="warn", surplus="ignore")
    found = refused(report, lenient, purpose)  # type: ignore[arg-type]  # one of the two
    assert found == (LoadReport(("model.a",), ("model.b",)) if purpose == "resume" else LoadReport())
    assert refused(report, CheckpointConfig(), "start") == report


def test_a_pattern_that_names_nothing_is_refused_with_the_names_there_are() -> None:
    check_patterns(["head.*", "optimizer.exp_avg.*"], {"model.head.weight"}, {"optimizer.exp_avg.head.weight"})
    with pytest.raises(CheckpointError, match=r"skip=heat.weight matches no tensor .* Did you mean head.weight\?"):
        check_patterns(["heat.weight"], {"model.head.weight"}, {"model.norm.weight"})


def test_names_that_differ_in_a_number_share_a_line() -> None:
    assert by_pattern(["layers.0.q", "layers.1.q", "norm"]) == ["layers.*.q (* = 0, 1)", "norm"]
