"""A shard's box, its copies and the sum of its gradient follow from how it was cut; boxes tile what
they divide."""

import math
from itertools import product

import pytest

from megalith.plan.shards import (
    DATA_AXES,
    DENSE_AXES,
    EXPERT_AXES,
    Box,
    HeadSplit,
    Shard,
    copies,
    gradient_sum_axes,
    intersect,
    is_first_replica,
    key_value_ranks,
    split_evenly,
    split_heads,
    split_range_into_boxes,
)


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Row-major indices of the elements of a box, in order."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    places = product(*(range(start, stop) for start, stop in box))
    return [
        sum(place * stride for place, stride in zip(each, strides, strict=True)) for each in places
    ]


def test_a_whole_parameter_is_held_by_every_rank() -> None:
    shard = Shard.full("norm.weight", (6,), inputs=0)
    assert (shard.box, shard.box_shape, shard.numel, shard.cut) == (((0, 6),), (6,), 6, ())
    assert copies(shard) == gradient_sum_axes(shard) == DENSE_AXES


def test_an_experts_parameter_is_held_along_the_axes_of_its_own_grid() -> None:
    shard = Shard("up", (4, 3), ((0, 2), (0, 3)), ("ep",), grid="expert")
    assert copies(shard) == gradient_sum_axes(shard) == ("edp_replica", "edp_shard", "etp")
    here = dict.fromkeys((*DENSE_AXES, *EXPERT_AXES, "pp"), 0)
    assert is_first_replica(shard, here | {"dp_shard": 1, "tp_kv": 2, "ep": 1}), (
        "the dense grid has no say"
    )
    assert not any(is_first_replica(shard, here | {axis: 1}) for axis in copies(shard))


@pytest.mark.parametrize(("total", "parts"), [(12, 3), (7, 3), (2, 4), (0, 2), (5, 1)])
def test_parts_of_a_split_tile_the_dim_for_any_sizes(total: int, parts: int) -> None:
    shard, sizes = Shard.full("w", (3, total, 2)), split_evenly(total, parts)
    boxes = [shard.split_dim(1, sizes, rank, ("tp_kv", "tp_copy")).box for rank in range(parts)]
    covered = [element for box in boxes for element in elements(shard.shape, box)]
    assert sorted(covered) == list(range(3 * total * 2))
    assert all(box[0] == (0, 3) and box[2] == (0, 2) for box in boxes)


def test_splits_of_several_dims_combine() -> None:
    shard = Shard.full("w", (4, 6)).split_dim(0, [3, 1], 1, ("tp_kv",))
    shard = shard.split_dim(1, [2, 4], 0, ("tp_copy",))
    assert (shard.box, shard.cut, shard.shape) == (((3, 4), (0, 2)), ("tp_kv", "tp_copy"), (4, 6))
    assert copies(shard) == DATA_AXES


def test_sizes_that_do_not_sum_to_the_dim_fail_an_assertion() -> None:
    with pytest.raises(AssertionError, match="w"):
        Shard.full("w", (4,)).split_dim(0, [3, 2], 0, ("dp",))


@pytest.mark.parametrize("cut", [(), ("tp_kv",), ("tp_kv", "tp_copy"), DENSE_AXES])
@pytest.mark.parametrize(
    "invariant", [frozenset(), frozenset({"tp_copy"}), frozenset({"tp_kv", "tp_copy"})]
)
def test_a_gradient_is_summed_where_the_box_is_the_same_unless_invariant(
    cut: tuple[str, ...], invariant: frozenset[str]
) -> None:
    shard = Shard("w", (2,), ((0, 1),), cut=cut, invariant=invariant)
    held = set(DENSE_AXES) - set(cut)
    assert set(copies(shard)) == held
    assert set(gradient_sum_axes(shard)) == held - invariant
    assert gradient_sum_axes(shard) == tuple(
        axis for axis in DENSE_AXES if axis in gradient_sum_axes(shard)
    ), "in grid order"


@pytest.mark.parametrize(
    ("shape", "inputs", "matrix"),
    [
        ((4, 3, 8), 1, (12, 8)),  # q: heads, head dim, hidden
        ((2, 4, 3, 8), 1, (24, 8)),  # kv
        ((8, 4, 3), 2, (8, 12)),  # o: its inputs are heads and head dim
        ((8,), 0, (8,)),
        ((4, 3), 0, (12,)),  # a bias per head
        ((5,), 1, (1, 5)),
    ],
)
def test_box_is_stored_as_outputs_by_inputs(
    shape: tuple[int, ...], inputs: int, matrix: tuple[int, ...]
) -> None:
    assert Shard.full("w", shape, inputs=inputs).matrix_shape == matrix


def test_the_matrix_is_that_of_the_box_not_of_the_whole() -> None:
    assert Shard.full("o", (8, 4, 3), inputs=2).split_dim(
        1, [3, 1], 0, ("tp_kv",)
    ).matrix_shape == (8, 9)


@pytest.mark.parametrize("shape", [(7,), (5, 4), (3, 1, 4), (2, 3, 2, 2), (1, 1), ()])
def test_a_flat_range_is_few_boxes_in_order(shape: tuple[int, ...]) -> None:
    total = math.prod(shape)
    for start in range(total + 1):
        for stop in range(start, total + 1):
            boxes = split_range_into_boxes(shape, start, stop)
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            assert [element for box in boxes for element in elements(shape, box)] == list(
                range(start, stop)
            )
            assert all(len(box) == len(shape) for box in boxes)


def test_boxes_intersect_in_their_common_elements() -> None:
    spans = [(start, stop) for start in range(4) for stop in range(start + 1, 5)]
    for a, b in product(product(spans, repeat=2), repeat=2):
        shared = set(elements((4, 4), a)) & set(elements((4, 4), b))
        result = intersect(a, b)
        assert (result is None) == (not shared)
        assert result is None or set(elements((4, 4), result)) == shared
        assert result == intersect(b, a)


def test_boxes_of_other_dims_do_not_intersect() -> None:
    with pytest.raises(ValueError, match="zip"):
        intersect(((0, 1),), ((0, 1), (0, 1)))


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("total", [0, 1, 7, 8, 64])
def test_even_parts_differ_by_one_at_most_the_larger_first(total: int, parts: int) -> None:
    sizes = split_evenly(total, parts)
    assert (len(sizes), sum(sizes)) == (parts, total)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


LAYOUTS = [
    (heads, keys, tp)
    for keys in (1, 2, 3, 4, 8)
    for heads in (keys, 2 * keys, 4 * keys, 6 * keys)
    for tp in (1, 2, 3, 4, 6, 8)
    if tp <= keys or (tp % keys == 0 and tp <= heads)
]


@pytest.mark.parametrize(("heads", "keys", "tp"), LAYOUTS)
def test_a_ranks_query_heads_use_only_its_own_key_value_heads(
    heads: int, keys: int, tp: int
) -> None:
    split, per_key = split_heads(heads, keys, tp), heads // keys
    replica_ranks = key_value_ranks(keys, tp)
    assert (sum(split.queries), len(split.queries)) == (heads, tp)
    assert (sum(split.keys), len(split.keys)) == (keys, replica_ranks)
    assert min(split.queries) >= 1
    assert min(split.keys) >= 1
    ranks_per_holder, first_query = tp // replica_ranks, 0
    for rank, queries in enumerate(split.queries):
        holder = rank // ranks_per_holder
        first_key = sum(split.keys[:holder])
        used = {query // per_key for query in range(first_query, first_query + queries)}
        assert used <= set(range(first_key, first_key + split.keys[holder]))
        first_query += queries


def test_heads_that_divide_unevenly_are_still_whole_groups() -> None:
    assert split_heads(6, 3, 2) == HeadSplit([4, 2], [2, 1])
    assert split_heads(6, 2, 4) == HeadSplit([2, 1, 2, 1], [1, 1])
