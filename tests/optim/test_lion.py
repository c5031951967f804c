"""Lion follows its definition, on any slice of a parameter."""

import pytest
import torch

from megalith.config.optim import OptimConfig
from megalith.optim.optimizer import RuleOptimizer
from megalith.plan.shards import Shard

SHARDS = [Shard.full("layers.0.mlp.down", (7, 5)), Shard.full("norm.weight", (5,), inputs=0)]


def draw(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shard.shape, generator=generator, dtype=torch.float64) for shard in SHARDS]


@pytest.mark.parametrize("scaled", [False, True])
def test_updates_follow_the_definition(scaled: bool) -> None:
    config = OptimConfig(kind="lion")
    weights = draw(0)
    optimizer = RuleOptimizer(list(zip(SHARDS, draw(0), strict=True)), config)
    means = [torch.zeros_like(weight) for weight in weights]
    b1, b2 = config.lion.beta1, config.lion.beta2
    for step in range(1, 5):
        scale = torch.tensor(0.25, dtype=torch.float64) if scaled else None
        optimizer.step(draw(step), lr=0.1, weight_decay=0.5, scale=scale)
        for number, gradient in enumerate(draw(step)):
            g = gradient * 0.25 if scaled else gradient
            decay = 0.5 if number == 0 else 0.0
            u = (b1 * means[number] + (1 - b1) * g).sign() + decay * weights[number]
            weights[number] -= 0.1 * u
            means[number] = b2 * means[number] + (1 - b2) * g
    for slot, weight, mean in zip(optimizer.slots, weights, means, strict=True):
        torch.testing.assert_close(slot.weight, weight, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(slot.state["exp_avg"], mean, rtol=1e-12, atol=1e-14)


def test_slices_have_the_bits_of_the_whole() -> None:
    config = OptimConfig(kind="lion")
    whole = RuleOptimizer([(SHARDS[0], draw(0)[0].float())], config)
    parts = [
        (Shard.full(f"layers.{n}.mlp.down", part.shape), part.clone())
        for n, part in enumerate(draw(0)[0].float().split((3, 4)))
    ]
    slices = RuleOptimizer(parts, config)
    for step in range(1, 4):
        gradient = draw(step)[0].float()
        pieces = [part.clone() for part in gradient.split((3, 4))]
        whole.step([gradient], lr=0.1, weight_decay=0.1)
        slices.step(pieces, lr=0.1, weight_decay=0.1)
    joined = torch.cat([slot.weight for slot in slices.slots])
    assert torch.equal(whole.slots[0].weight, joined)
