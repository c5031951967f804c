"""Tests of megalith/plan/transfer.py: every wanted element is sent once, by balanced replicas."""

from collections import Counter
from itertools import pairwise, product
from random import Random

import numpy as np
import pytest

from megalith.errors import PlanError
from megalith.plan.shards import Box
from megalith.plan.transfer import plan_transfers


def random_layout(rng: Random, shape: tuple[int, ...], num_ranks: int) -> list[list[Box]]:
    """Split a tensor into a grid of uneven boxes, and give each to one or several ranks."""
    cuts = []
    for size in shape:
        inside = sorted(rng.sample(range(1, size), min(size - 1, rng.randrange(3))))
        cuts.append(list(pairwise([0, *inside, size])))
    layout: list[list[Box]] = [[] for _ in range(num_ranks)]
    for box in product(*cuts):
        for rank in rng.sample(range(num_ranks), rng.randint(1, num_ranks)):
            layout[rank].append(box)
    return layout


def part_of(values: np.ndarray, box: Box) -> np.ndarray:
    return values[tuple(slice(*bounds) for bounds in box)]


def test_messages_move_a_tensor_between_random_layouts() -> None:
    """Run the messages with arrays: the second user, beside which resharding can use the plan."""
    for seed in range(60):
        rng = Random(seed)
        shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 3)))
        num_ranks = rng.randint(1, 6)
        held, wanted = (random_layout(rng, shape, num_ranks) for _ in range(2))
        values = np.arange(np.prod(shape)).reshape(shape)
        sources = [[part_of(values, box).copy() for box in boxes] for boxes in held]
        results = [[np.full(part_of(values, box).shape, -1) for box in boxes] for boxes in wanted]
        for rank, boxes in enumerate(wanted):
            own = np.zeros(shape, dtype=bool)
            for box in held[rank]:
                part_of(own, box)[...] = True
            for result, box in zip(results[rank], boxes, strict=True):
                result[part_of(own, box)] = part_of(values, box)[part_of(own, box)]
        for one in plan_transfers(held, wanted):
            target = part_of(results[one.receiver][one.target_index], one.target)
            assert one.sender != one.receiver, seed
            assert (target == -1).all(), f"seed {seed}: elements are held or sent already"
            target[...] = part_of(sources[one.sender][one.source_index], one.source)
        for rank, boxes in enumerate(wanted):
            for result, box in zip(results[rank], boxes, strict=True):
                assert (result == part_of(values, box)).all(), f"seed {seed}, rank {rank}"


def test_replicas_send_equally_much() -> None:
    whole: Box = ((0, 8), (0, 8))
    transfers = plan_transfers([[whole]] * 4 + [[]] * 8, [[]] * 4 + [[whole]] * 8)
    sent = Counter(one.sender for one in transfers)
    assert sent == dict.fromkeys(range(4), 2)
    assert all(one.numel == 64 for one in transfers)


def test_equal_layouts_send_nothing() -> None:
    for seed in range(10):
        layout = random_layout(Random(seed), (7, 5), 4)
        assert plan_transfers(layout, layout) == [], seed


def test_missing_elements_are_reported() -> None:
    with pytest.raises(PlanError, match=r"rank 1 needs the elements \(\(2, 4\),\)"):
        plan_transfers([[((0, 2),)], []], [[], [((0, 4),)]])
