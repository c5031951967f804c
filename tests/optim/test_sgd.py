"""SGD is torch's, to the bit; vectors are not decayed."""

from dataclasses import replace

import pytest
import torch

from megalith.config.optim import OptimConfig
from megalith.observe.machine import FORMATS
from megalith.optim.optimizer import RuleOptimizer
from megalith.plan.shards import Shard
from megalith.train.trainer import build_optimizer

SHARDS = [Shard.full("w", (7, 5)), Shard.full("b", (5,), inputs=0)]


def weights(dtype: torch.dtype = torch.float32) -> list[tuple[Shard, torch.Tensor]]:
    """A matrix and a vector."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            replace(s, dtype=FORMATS[dtype]),
            torch.randn(s.box_shape, generator=generator).to(dtype),
        )
        for s in SHARDS
    ]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(s.box_shape, generator=generator) for s in SHARDS]


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_ten_steps_are_bitwise_equal_to_torch_sgd(
    momentum: float, nesterov: bool, clipped: bool
) -> None:
    ours = build_optimizer(weights(), OptimConfig(kind="sgd", momentum=momentum, nesterov=nesterov))
    reference = [torch.nn.Parameter(w.clone()) for _, w in weights()]
    groups = [
        {"params": reference[:1], "weight_decay": 0.1},
        {"params": reference[1:], "weight_decay": 0.0},
    ]
    oracle = torch.optim.SGD(groups, lr=1e-2, momentum=momentum, nesterov=nesterov)
    for step in range(10):
        scale = torch.tensor(0.3, dtype=torch.float64) if clipped else None
        ours.step(gradients(step), lr=1e-2, weight_decay=0.1, scale=scale)
        for parameter, gradient in zip(reference, gradients(step), strict=True):
            parameter.grad = gradient * 0.3 if clipped else gradient
        oracle.step()
    for slot, parameter in zip(ours.slots, reference, strict=True):
        assert torch.equal(slot.weight, parameter.detach())
    assert ours.updates == 10


def test_sgd_without_momentum_has_no_state() -> None:
    assert [
        dict(slot.state)
        for slot in RuleOptimizer(weights(), OptimConfig(kind="sgd", momentum=0.0)).slots
    ] == [{}, {}]
    assert [
        list(slot.state) for slot in RuleOptimizer(weights(), OptimConfig(kind="sgd")).slots
    ] == [["momentum"]] * 2


def test_bf16_weights_follow_fp32_master_weights() -> None:
    optimizer = RuleOptimizer(weights(torch.bfloat16), OptimConfig(kind="sgd"))
    before = optimizer.slots[0].master.clone()
    for step in range(3):
        optimizer.step(gradients(step), lr=1e-5, weight_decay=0.0)
    slot = optimizer.slots[0]
    assert not torch.equal(before, slot.master)  # steps far below bf16's resolution are kept
    assert torch.equal(slot.weight, slot.master.to(torch.bfloat16))


def test_rank_without_shards_can_step() -> None:
    for kind in ("sgd", "adamw", "lion"):
        optimizer = build_optimizer([], OptimConfig(kind=kind))  # type: ignore[arg-type]  # one of the three
        optimizer.step([], lr=0.1, weight_decay=0.1)
        optimizer.set_updates(7)
        assert optimizer.updates == 7
