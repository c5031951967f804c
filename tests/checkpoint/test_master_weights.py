"""Weights that are not their master weights, rounded, are found to the element, and only these
are written anew."""

import math

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.keys import describe_master_differences, pair_master_weights, reconcile
from megalith.plan.shards import Shard


def pair(*, changed: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    master_weights = torch.tensor([1.0001, -2.0003, 3e5, math.nan])
    weights = master_weights.to(torch.float16)  # 3e5 is inf there, and rounding all the same
    if changed is not None:
        weights[1] = changed
    return weights, master_weights


def test_rounding_overflow_and_equal_nans_are_no_difference() -> None:
    weights, master_weights = pair()
    before = weights.clone(), master_weights.clone()
    assert reconcile(weights, master_weights, prefer_weights=True) is None
    assert torch.equal(weights.nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(master_weights.nan_to_num(7), before[1].nan_to_num(7))


@pytest.mark.parametrize(
    ("changed", "largest"), [(5.0, 7.0003), (-2.002, 0.0017), (math.nan, math.inf)]
)
def test_one_side_wins_where_they_differ_and_nowhere_else(changed: float, largest: float) -> None:
    weights, master_weights = pair(changed=changed)
    assert reconcile(weights, master_weights, prefer_weights=False) == pytest.approx(
        largest, rel=0.05
    )
    assert weights[1] == master_weights[1].half()
    weights, master_weights = pair(changed=changed)
    reconcile(weights, master_weights, prefer_weights=True)
    assert master_weights[0] == torch.tensor(1.0001) and torch.equal(
        master_weights[1].isnan(), weights[1].isnan()
    )
    assert math.isnan(changed) or master_weights[1] == weights[1].float()


def test_ties_rounded_away_from_zero_are_no_difference() -> None:
    """Weights with remainders are rounded so; 1.00390625 is 1.0 to nearest even."""
    master_weights = torch.tensor([1.00390625, -1.00390625, 1.0001])
    weights = torch.tensor([1.0078125, -1.0078125, 1.0]).bfloat16()
    assert reconcile(weights, master_weights, prefer_weights=False) is None
    assert weights.tolist() == [1.0078125, -1.0078125, 1.0]
    weights[2] = 1.0078125
    assert reconcile(weights, master_weights, prefer_weights=False) == pytest.approx(
        0.0077125, rel=1e-4
    )


def test_pairs_are_the_slices_that_a_master_filled() -> None:
    shard = Shard.full("w", (2,), dtype="bf16")
    low, wide = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    entries = [
        CheckpointEntry(shard, "param", low),
        CheckpointEntry(shard, "master", wide),
        CheckpointEntry(shard, "exp_avg", wide),
    ]
    weights, master = "model.w", "optimizer.master.w"
    (result,) = pair_master_weights(entries, {weights: weights, master: master})
    assert result.wide.dtype == torch.float32 and result.low is not None and result.other is None
    (result,) = pair_master_weights(entries, {weights: master, master: master})
    assert result.low is None and result.other is not None and result.other.dtype == torch.bfloat16
    assert pair_master_weights(entries, {weights: weights, master: weights}) == []


def test_warning_names_the_largest_difference_over_all_ranks() -> None:
    assert describe_master_differences([{}, {}], prefer_weights=False) is None
    line = describe_master_differences([{"a": 0.1}, {"a": 0.5, "b": 0.25}], prefer_weights=True)
    assert line == (
        "the weights of 2 parameters are not their master weights, rounded: a differs most, by "
        "0.5. The "
        "weights are used. "
        "Remove checkpoint.prefer_weights to use the master weights."
    )
