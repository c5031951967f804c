"""Blends: golden orders, sizes, and shares that come out right."""

import numpy as np
import pytest

from megalith.data.build import (
    BlendedDataset,
    BlendOrder,
    build_exhaustive_order,
    build_weighted_order,
    compute_member_sizes,
    normalize_weights,
)
from megalith.data.pretrain import MockStore, PretrainDataset, WindowPlan
from megalith.errors import DataError
from tests.cases import loop_over


def test_weighted_order_equals_the_recorded_one() -> None:
    order = build_weighted_order([0.5, 0.3, 0.2], 10)
    assert order.members.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    assert order.samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]
    assert [array.dtype.name for array in (order.members, order.samples)] == ["int16", "int64"]


def test_exhaustive_order_equals_the_recorded_one() -> None:
    order = build_exhaustive_order([3, 5, 2])
    assert order.members.tolist() == [1, 0, 2, 1, 0, 1, 2, 1, 0, 1]
    assert order.samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]


@loop_over("case", range(20))
def test_blend_weights_are_met_within_one_sample_per_member(case: int) -> None:
    draw = np.random.default_rng(case)
    weights, size = draw.random(draw.integers(1, 9)) + 0.01, int(draw.integers(20, 400))
    taken = np.bincount(
        build_weighted_order(weights.tolist(), size).members, minlength=len(weights)
    )
    assert np.abs(taken - np.array(normalize_weights(weights.tolist())) * size).max() <= len(
        weights
    )


def test_a_longer_order_begins_with_the_shorter_one() -> None:
    short, long = build_weighted_order([2, 1, 4], 50), build_weighted_order([2, 1, 4], 90)
    assert long.members[:50].tolist() == short.members.tolist()


def test_an_exhaustive_order_uses_every_sample_once() -> None:
    order = build_exhaustive_order([7, 1, 12, 4])
    pairs = sorted(zip(order.members.tolist(), order.samples.tolist()))
    assert pairs == [
        (member, sample) for member, size in enumerate([7, 1, 12, 4]) for sample in range(size)
    ]


def test_members_are_built_for_slightly_more_than_their_weight() -> None:
    sizes = compute_member_sizes([3, 1], 1001, 0.005)
    assert (sizes.targets, sizes.built_for, sizes.total) == ((751, 251), (755, 253), 1002)


def members(count: int, num_samples: int) -> list[PretrainDataset]:
    plan = WindowPlan(seq_len=4, num_samples=num_samples, seed=1)
    return [
        PretrainDataset(MockStore(99, 98, 30 + i, 20), plan, vocab_size=99) for i in range(count)
    ]


def test_samples_come_from_the_member_and_index_of_the_order() -> None:
    parts = members(2, 30)
    blend = BlendedDataset(parts, ["a", "b"], build_weighted_order([2, 1], 30), "print")
    assert len(blend) == blend.num_samples == 30
    assert blend.sample(1).ids.tolist() == parts[1].sample(0).ids.tolist()
    assert blend.sample(2).ids.tolist() == parts[0].sample(1).ids.tolist()
    with pytest.raises(
        DataError, match=r"sample 30 was requested, and the blend has 30 samples\. Use more data"
    ):
        blend.sample(30)


def test_a_member_that_is_too_short_is_named() -> None:
    parts = members(2, 10)
    order = BlendOrder(np.ones(10_000, np.int16), np.arange(10_000))
    text = (
        rf"corpus-b has {parts[1].num_samples} samples, and the blend takes 10000 of them\. "
        rf"Set data.mid_level"
    )
    with pytest.raises(DataError, match=text):
        BlendedDataset(parts, ["a", "corpus-b"], order, "print")


def test_too_many_members_are_rejected() -> None:
    part = members(1, 10)[0]
    with pytest.raises(DataError, match="the blend has 32767 datasets, and the maximum is 32766"):
        BlendedDataset([part] * 32767, ["a"] * 32767, build_weighted_order([1], 2), "print")
