"""Faults in what is trained change weights, and nothing where all is trained alike."""

from types import SimpleNamespace
from typing import Any

import torch

from megalith.config.lora import LoraConfig
from megalith.optim.schedule import GroupRates
from megalith.optim.slots import build_slot, group_by_rates
from megalith.parallel.group import single_rank_group
from megalith.parallel.tensor import SequenceParallelComm
from megalith.plan.parameters import PLAIN, ParameterRates
from megalith.plan.shards import Shard
from megalith.testing.inject import patched
from megalith.verify.faults import model
from megalith.verify.faults.model import decaying_frozen, rates_of_slot_before, whole_gradient


def test_what_is_not_trained_becomes_smaller() -> None:
    engine: Any = SimpleNamespace(frozen=[(Shard.full("w", (2,), inputs=0), torch.ones(2))])
    with patched(model, "ORIGINAL_FINISH", lambda one: []):
        assert decaying_frozen(engine) == []
    assert 0 < float(engine.frozen[0][1][0]) < 1


def test_rates_move_to_the_next_slot_where_there_are_several_kinds() -> None:
    rates = [PLAIN, ParameterRates(lr_of="own"), PLAIN]
    slots = [
        build_slot(Shard.full(name, (3, 2)), torch.ones(3, 2), (), each)
        for name, each in zip("abc", rates, strict=True)
    ]
    gradients, groups = [slot.weight for slot in slots], {"own": GroupRates(0.5, 0.1)}

    def own(found: Any) -> list[str]:
        return [slot.shard.name for part in found for slot in part.slots if part.lr == 0.5]

    assert own(group_by_rates(slots, gradients, lr=1.0, weight_decay=0.1, groups=groups)) == ["b"]
    assert own(rates_of_slot_before(slots, gradients, lr=1.0, weight_decay=0.1, groups=groups)) == [
        "c"
    ]
    assert rates_of_slot_before([], [], lr=1.0, weight_decay=0.1) == []


def test_an_adapter_says_that_its_gradient_is_whole() -> None:
    tp_comm = SequenceParallelComm(single_rank_group("tp_kv", "tp_copy"), overlap=False)
    a, _ = whole_gradient(Shard.full("layers.0.mlp.down", (4, 6)), LoraConfig(rank=2), tp_comm)
    assert a.invariant == {"tp_kv", "tp_copy"}
