"""Entries become boxes that tile the whole tensor, in the order of memory."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from megalith.checkpoint.format import (
    CheckpointEntry,
    TensorPiece,
    as_bytes,
    describe_tiling_problem,
    inner_view,
    numel,
    pieces,
    show_box,
    to_row_major,
)
from megalith.plan.shards import Shard

SHAPES = [(), (1,), (8,), (5, 4), (3, 1, 4), (3, 2, 4), (2, 1, 3, 2)]


def entry(shape: tuple[int, ...], flat: tuple[int, int] | None = None) -> CheckpointEntry:
    values = torch.arange(math.prod(shape)).reshape(-1)
    return CheckpointEntry(
        replace(Shard.full("w", shape), flat=flat),
        "param",
        values if flat is None else values[slice(*flat)],
    )


def filled(shape: tuple[int, ...], parts: list[TensorPiece]) -> torch.Tensor:
    """The whole tensor put together from pieces; -1 where there is none."""
    out = torch.full(shape, -1)
    for part in parts:
        inner_view(TensorPiece(tuple((0, n) for n in shape), out), part.box).copy_(part.values)
    return out


@pytest.mark.parametrize("role,key", [("param", "model.a.b"), ("exp_avg", "optimizer.exp_avg.a.b")])
def test_keys_name_the_tensor_and_not_the_layout(role: str, key: str) -> None:
    assert CheckpointEntry(Shard.full("a.b", (2,)), role, torch.zeros(2)).key == key


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("limit", [None, 1, 3, 7])
def test_every_range_of_every_shape_is_tiled_by_few_boxes(
    shape: tuple[int, ...], limit: int | None
) -> None:
    total = math.prod(shape)
    for start, stop in itertools.combinations_with_replacement(range(total + 1), 2):
        parts = pieces(entry(shape, (start, stop)), max_numel=limit)
        assert sum(part.values.numel() for part in parts) == stop - start
        got = filled(shape, parts).reshape(-1)
        assert got.tolist() == [i if start <= i < stop else -1 for i in range(total)]
        if limit is None:
            assert len(parts) <= max(1, 2 * len(shape) - 1)
        else:
            assert all(numel(part.box) <= limit for part in parts)
    assert pieces(entry(shape, (0, 0))) == []


def test_a_flat_range_counts_inside_the_ranks_own_box() -> None:
    shard = replace(Shard.full("w", (4, 6)).split_dim(1, [2, 4], 1, ("tp",)), flat=(3, 9))
    parts = pieces(CheckpointEntry(shard, "master", torch.arange(6)))
    assert [(part.box, part.values.flatten().tolist()) for part in parts] == [
        (((0, 1), (5, 6)), [0]),
        (((1, 2), (2, 6)), [1, 2, 3, 4]),
        (((2, 3), (2, 3)), [5]),
    ]


def test_pieces_are_views_so_that_loading_fills_the_tensor_itself() -> None:
    # memory is the box's, the view is not its shape
    tensor = torch.zeros(2, 12, requires_grad=True)
    for part in pieces(CheckpointEntry(Shard.full("w", (4, 6)), "param", tensor), max_numel=5):
        part.values.fill_(1)
    assert tensor.sum() == 24


@pytest.mark.parametrize(
    "shape,boxes,problem",
    [
        ((4, 6), [((0, 4), (0, 3)), ((0, 4), (3, 6))], None),
        ((), [()], None),
        ((0, 3), [], None),
        (
            (4, 6),
            [((0, 4), (0, 3)), ((1, 4), (3, 6))],
            r"\[0:1, 3:6\] of \[4, 6\] is not written",
        ),
        (
            (4, 6),
            [((0, 4), (0, 4)), ((2, 4), (3, 6))],
            r"\[2:4, 3:4\] of \[4, 6\] is written twice",
        ),
        ((4, 6), [], r"\[0:4, 0:6\] of \[4, 6\] is not written"),
        ((), [], r"\[\] of \[\] is not written"),
        ((), [(), ()], r"\[\] of \[\] is written twice"),
        ((4,), [((0, 5),)], r"\[0:5\] is not inside its shape \[4\]"),
        ((4,), [((2, 2),)], r"\[2:2\] is not inside its shape \[4\]"),
        ((4, 6), [((0, 4),)], r"\[0:4\] is not inside its shape \[4, 6\]"),
    ],
)
def test_gap_and_overlap_are_reported_with_their_position(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, int], ...]], problem: str | None
) -> None:
    tiling_problem = describe_tiling_problem(shape, boxes)
    assert (
        tiling_problem == problem
        if problem is None
        else tiling_problem == problem.replace("\\", "")
    )


def test_any_single_fault_in_a_random_tiling_is_detected() -> None:
    rng = random.Random(0)
    for _ in range(60):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
        total = math.prod(shape)
        cuts = sorted({0, total, *(rng.randint(0, total) for _ in range(3))})
        boxes = [
            part.box for a, b in itertools.pairwise(cuts) for part in pieces(entry(shape, (a, b)))
        ]
        rng.shuffle(boxes)
        assert describe_tiling_problem(shape, boxes) is None
        assert "is not written" in str(describe_tiling_problem(shape, boxes[1:]))
        assert "twice" in str(describe_tiling_problem(shape, [*boxes, boxes[0]]))


def test_boxes_are_read_like_slices() -> None:
    assert show_box(((0, 4), (2, 6))) == "[0:4, 2:6]"


@pytest.mark.parametrize("tensor", [torch.zeros(5), torch.zeros(3, 2).T])
def test_tensor_that_does_not_match_its_shard_fails_an_assertion(tensor: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="model.w"):
        pieces(CheckpointEntry(Shard("w", (3, 2), ((0, 3), (0, 2))), "param", tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_values_in_any_order_of_memory_are_laid_out_row_by_row(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.checkpoint.format._COPY_NBYTES", 1000)
    whole = (torch.arange(2 * 70 * 80).view(2, 70, 80) % 251).to(dtype)
    views = [whole.permute(order) for order in itertools.permutations(range(3))]
    views += [
        whole[:, 3:, 5:].permute(1, 2, 0),
        whole[None, None].transpose(3, 4),
        whole[1].t(),
        whole[0, 0, 0],
        whole[:0].permute(2, 0, 1),
    ]
    for values in views:
        result = to_row_major(values)
        assert result.is_contiguous() and torch.equal(result, values)
        assert b"".join(as_bytes(values)) == bytes(result.view(-1).view(torch.uint8).tolist())
    assert to_row_major(whole) is whole
