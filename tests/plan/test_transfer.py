"""Tests of megalith/plan/transfer.py: every wanted element is sent once, by balanced replicas."""

from collections import Counter
from itertools import pairwise, product
from random import Random

import numpy as np
import pytest

from megalith.errors import PlanError
from megalith.plan.shards import Box
from megalith.plan.transfer import plan_transfers, plan_weight_transfers


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


def test_every_element_of_several_parameters_is_copied_or_sent_once() -> None:
    for seed in range(40):
        rng = Random(seed)
        num_ranks = rng.randint(1, 5)
        shapes = {
            name: tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3))) for name in "abc"
        }
        held: list[dict[str, list[Box]]] = [{} for _ in range(num_ranks)]
        wanted: list[dict[str, list[Box]]] = [{} for _ in range(num_ranks)]
        for layout in (held, wanted):
            for name, shape in shapes.items():
                for rank, boxes in enumerate(random_layout(rng, shape, num_ranks)):
                    layout[rank][name] = boxes
        values = {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in shapes.items()}
        results = [
            {
                name: [np.full(part_of(values[name], box).shape, -1) for box in each]
                for name, each in boxes.items()
            }
            for boxes in wanted
        ]
        for name, one in plan_weight_transfers(held, wanted, dict.fromkeys(shapes, 4)):
            target = part_of(results[one.receiver][name][one.target_index], one.target)
            source = part_of(values[name], held[one.sender][name][one.source_index])
            assert (target == -1).all(), f"seed {seed}: an element of {name} is written twice"
            target[...] = part_of(source, one.source)
        for boxes, result in zip(wanted, results, strict=True):
            for name, each in boxes.items():
                for box, part in zip(each, result[name], strict=True):
                    assert (part == part_of(values[name], box)).all(), f"seed {seed}"


def test_replicas_send_equally_many_bytes_of_all_parameters() -> None:
    boxes: dict[str, list[Box]] = {"a": [((0, 2),)], "b": [((0, 8),)], "c": [((0, 4),)]}
    plan = plan_weight_transfers([boxes, boxes, {}], [{}, {}, boxes], {"a": 4, "b": 1, "c": 2})
    assert [(name, one.sender) for name, one in plan] == [("a", 0), ("b", 1), ("c", 0)]
    plan = plan_weight_transfers([boxes, boxes, {}], [{}, {}, boxes], {"a": 4, "b": 1, "c": 4})
    assert [one.sender for _, one in plan] == [0, 1, 0]
    plan = plan_weight_transfers([boxes, boxes, {}], [{}, {}, boxes], {"a": 8, "b": 1, "c": 4})
    assert [one.sender for _, one in plan] == [0, 1, 1]


def test_error_names_the_parameter_that_no_rank_holds() -> None:
    with pytest.raises(PlanError, match="w: rank 0 needs the elements"):
        plan_weight_transfers([{"w": [((0, 2),)]}], [{"w": [((0, 4),)]}], {"w": 4})


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
