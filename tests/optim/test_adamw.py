"""AdamW: the fused kernel, the plain formulas and torch's own optimizer agree; vectors are not
decayed."""

import copy
from dataclasses import replace

import pytest
import torch

from megalith.config.optim import OptimConfig
from megalith.observe.machine import FORMATS
from megalith.optim import adamw
from megalith.optim.optimizer import RuleOptimizer
from megalith.plan.shards import Shard
from megalith.testing.tolerance import FP32, FP64, assert_equals

SHARDS = [Shard.full("w", (7, 5)), Shard.full("b", (5,), inputs=0)]


def weights(dtype: torch.dtype) -> list[tuple[Shard, torch.Tensor]]:
    """A matrix and a vector."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            replace(s, dtype=FORMATS[dtype]),
            torch.randn(s.box_shape, generator=generator, dtype=torch.float64).to(dtype),
        )
        for s in SHARDS
    ]


def gradients(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(s.box_shape, generator=generator, dtype=torch.float64).to(dtype) for s in SHARDS
    ]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_and_plain_updates_agree_with_torch(
    dtype: torch.dtype, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OptimConfig(decoupled_weight_decay=decoupled)
    fused, plain = RuleOptimizer(weights(dtype), config), RuleOptimizer(weights(dtype), config)
    reference = [torch.nn.Parameter(w.clone()) for _, w in weights(dtype)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    groups = [
        {"params": reference[:1], "weight_decay": 0.1},
        {"params": reference[1:], "weight_decay": 0.0},
    ]
    oracle = kind(groups, lr=1e-2, betas=(config.beta1, config.beta2), eps=config.eps)
    half = torch.tensor(0.5, dtype=torch.float64)
    for step in range(4):
        fused.step(gradients(step, dtype), lr=1e-2, weight_decay=0.1, scale=half)
        with monkeypatch.context() as patch:
            patch.setattr(adamw, "HAS_FUSED", False)
            plain.step(gradients(step, dtype), lr=1e-2, weight_decay=0.1, scale=half)
        for parameter, gradient in zip(reference, gradients(step, dtype), strict=True):
            parameter.grad = gradient * 0.5
        oracle.step()
    tolerance = FP64 if dtype == torch.float64 else FP32
    for ours, other, torchs in zip(fused.slots, plain.slots, reference, strict=True):
        assert_equals(ours.shard.name, ours.weight, torchs.detach(), tolerance)
        assert_equals(ours.shard.name, other.weight, torchs.detach(), tolerance)


def test_bf16_weights_follow_fp32_master_weights() -> None:
    optimizer = RuleOptimizer(weights(torch.bfloat16), OptimConfig())
    slot = optimizer.slots[0]
    assert slot.master.dtype == torch.float32
    before = slot.master.clone()
    for step in range(3):
        optimizer.step(gradients(step, torch.float32), lr=1e-5, weight_decay=0.0)
    assert not torch.equal(before, slot.master)  # steps far below bf16's resolution are kept
    assert torch.equal(slot.weight, slot.master.to(torch.bfloat16))


def test_vectors_are_not_decayed() -> None:
    optimizer = RuleOptimizer(weights(torch.float32), OptimConfig())
    before = [slot.weight.clone() for slot in optimizer.slots]
    optimizer.step([torch.zeros(7, 5), torch.zeros(5)], lr=0.1, weight_decay=0.5)
    assert torch.allclose(optimizer.slots[0].weight, before[0] * 0.95)
    assert torch.equal(optimizer.slots[1].weight, before[1])


def test_moments_and_the_count_continue_a_run() -> None:
    first = RuleOptimizer(weights(torch.float32), OptimConfig())
    for step in range(3):
        first.step(gradients(step, torch.float32), lr=1e-2, weight_decay=0.1)
    second = RuleOptimizer(
        [(slot.shard, slot.weight.clone()) for slot in first.slots], OptimConfig()
    )
    for local, saved in zip(second.slots, copy.deepcopy(first.slots), strict=True):
        local.state["exp_avg"].copy_(saved.state["exp_avg"])
        local.state["exp_avg_sq"].copy_(saved.state["exp_avg_sq"])
    second.set_updates(3)
    for optimizer in (first, second):
        optimizer.step(gradients(9, torch.float32), lr=1e-2, weight_decay=0.1)
    assert all(
        torch.equal(a.weight, b.weight) for a, b in zip(first.slots, second.slots, strict=True)
    )
