"""Weights that are not their masters, rounded, are found to the element, and only these are written
anew."""

import math

import pytest
import torch

from megalith.checkpoint.boxes import Entry
from megalith.checkpoint.masters import pairs_of, reconcile, worst_line
from megalith.plan.shards import whole


def pair(*, changed: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    masters = torch.tensor([1.0001, -2.0003, 3e5, math.nan])
    weights = masters.to(torch.float16)  # 3e5 is inf there, and rounding all the same
    if changed is not None:
        weights[1] = changed
    return weights, masters


def test_rounding_overflow_and_nan_on_both_sides_are_no_disagreement() -> None:
    weights, masters = pair()
    before = weights.clone(), masters.clone()
    assert reconcile(weights, masters, prefer_weights=True) is None
    assert torch.equal(weights.nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(masters.nan_to_num(7), before[1].nan_to_num(7))


@pytest.mark.parametrize(
    ("changed", "largest"), [(5.0, 7.0003), (-2.002, 0.0017), (math.nan, math.inf)]
)
def test_one_side_wins_where_they_differ_and_nowhere_else(changed: float, largest: float) -> None:
    weights, masters = pair(changed=changed)
    assert reconcile(weights, masters, prefer_weights=False) == pytest.approx(largest, rel=0.05)
    assert weights[1] == masters[1].half()
    weights, masters = pair(changed=changed)
    reconcile(weights, masters, prefer_weights=True)
    assert masters[0] == torch.tensor(1.0001) and torch.equal(
        masters[1].isnan(), weights[1].isnan()
    )
    assert math.isnan(changed) or masters[1] == weights[1].float()


def test_pairs_are_the_slices_that_a_master_filled() -> None:
    shard, low, wide = whole("w", (2,)), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    entries = [
        Entry(shard, "param", low),
        Entry(shard, "master", wide),
        Entry(shard, "exp_avg", wide),
    ]
    weights, master = "model.w", "optimizer.master.w"
    (found,) = pairs_of(entries, {weights: weights, master: master})
    assert found.wide.dtype == torch.float32 and found.low is not None and found.other is None
    (found,) = pairs_of(entries, {weights: master, master: master})
    assert found.low is None and found.other is not None and found.other.dtype == torch.bfloat16
    assert pairs_of(entries, {weights: weights, master: weights}) == []


def test_the_line_names_the_worst_of_all_ranks() -> None:
    assert worst_line([{}, {}], prefer_weights=False) is None
    line = worst_line([{"a": 0.1}, {"a": 0.5, "b": 0.25}], prefer_weights=True)
    assert line == (
        "the weights of 2 parameters are not their masters, rounded: a differs most, by 0.5. The "
        "weights are used. "
        "Remove checkpoint.prefer_weights to use the masters."
    )
