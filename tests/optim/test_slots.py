"""Slots keep a wide copy where weights are narrow, and know which weights decay."""

import pytest
import torch

from megalith.observe.machine import FORMATS
from megalith.optim.schedule import GroupRates
from megalith.optim.slots import build_slot, group_by_rates, round_master_weights
from megalith.plan.parameters import PLAIN, ParameterRates
from megalith.plan.shards import Shard


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_master_weights_are_separate_only_for_low_precision(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    weight = torch.ones(3, 2, dtype=dtype)
    slot = build_slot(Shard.full("w", (3, 2), dtype=FORMATS[dtype]), weight, ("momentum",))
    assert slot.master.dtype == slot.state["momentum"].dtype == wide
    assert (slot.master is weight) == (dtype == wide)
    assert not slot.state["momentum"].any()


def test_weights_are_rounded_master_weights() -> None:
    narrow, wide = (
        build_slot(Shard.full("w", (2,), dtype=FORMATS[d]), torch.ones(2, dtype=d), ())
        for d in (torch.bfloat16, torch.float32)
    )
    for slot in (narrow, wide):
        slot.master.fill_(1.0 + 2**-8 + 2**-12)
    round_master_weights([narrow, wide])
    assert torch.equal(narrow.weight, torch.full((2,), 1.0078125, dtype=torch.bfloat16))
    assert torch.equal(wide.weight, wide.master)
    round_master_weights([])


def test_matrices_decay_and_vectors_do_not() -> None:
    shards = [
        Shard.full("b", (3,), inputs=0),
        Shard.full("w", (3, 2)),
        Shard.full("n", (2,), inputs=0),
    ]
    slots = [build_slot(shard, torch.ones(shard.matrix_shape), ()) for shard in shards]
    gradients = [torch.full_like(slot.weight, 5.0) for slot in slots]
    (matrices, its, lr, decay), (vectors, reference, _, none) = group_by_rates(
        slots, gradients, lr=1e-3, weight_decay=0.1
    )
    assert (matrices, vectors) == ([slots[1]], [slots[0], slots[2]]) and (lr, decay, none) == (
        1e-3,
        0.1,
        0.0,
    )
    assert its[0] is gradients[1] and [id(x) for x in reference] == [
        id(gradients[0]),
        id(gradients[2]),
    ]
    left = group_by_rates(vectors, reference, lr=1e-3, weight_decay=0.1)
    assert [part.slots for part in left] == [vectors], "what is empty is left out"


def test_parts_have_the_same_rates() -> None:
    slow = ParameterRates(lr=0.5)
    shards = [Shard.full("a", (3, 2)), Shard.full("b", (3, 2)), Shard.full("c", (3, 2))]
    slots = [
        build_slot(shard, torch.ones(3, 2), (), slow if shard.name == "b" else PLAIN)
        for shard in shards
    ]
    parts = group_by_rates(slots, [slot.weight for slot in slots], lr=1.0, weight_decay=0.1)
    assert [(part.slots, part.lr) for part in parts] == [
        ([slots[0], slots[2]], 1.0),
        ([slots[1]], 0.5),
    ]


def test_parameters_with_fixed_spread_do_not_decay() -> None:
    shards = [Shard.full("a", (3, 2)), Shard.full("b", (3, 2))]
    rates = [PLAIN, ParameterRates(decay=0.0)]
    slots = [
        build_slot(shard, torch.ones(3, 2), (), each)
        for shard, each in zip(shards, rates, strict=True)
    ]
    parts = group_by_rates(slots, [slot.weight for slot in slots], lr=1.0, weight_decay=0.1)
    assert [(part.slots, part.weight_decay) for part in parts] == [
        ([slots[0]], 0.1),
        ([slots[1]], 0.0),
    ]


def test_groups_override_the_schedule_and_factors_multiply_their_rates() -> None:
    shards = [
        Shard.full("a", (3, 2)),
        Shard.full("b", (3, 2)),
        Shard.full("c", (2,), inputs=0),
        Shard.full("d", (2,), inputs=0),
    ]
    rates = [
        ParameterRates(lr=0.5, lr_of="slow"),
        ParameterRates(decay=0.5, decay_of="slow"),
        ParameterRates(decay_of="slow"),
        ParameterRates(vector_decays=True),
    ]
    slots = [
        build_slot(s, torch.ones(s.matrix_shape), (), each)
        for s, each in zip(shards, rates, strict=True)
    ]
    groups = {"slow": GroupRates(lr=0.2, weight_decay=0.4)}
    parts = group_by_rates(
        slots, [slot.weight for slot in slots], lr=1.0, weight_decay=0.1, groups=groups
    )
    results = {part.slots[0].shard.name: (part.lr, part.weight_decay) for part in parts}
    assert results == {"a": (0.1, 0.1), "b": (1.0, 0.2), "c": (1.0, 0.0), "d": (1.0, 0.1)}
