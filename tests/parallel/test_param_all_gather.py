"""Published weights: what is sent, and which of them each part of forward waits for."""

import torch
from torch import Tensor, nn

from megalith.parallel.grad_sync import ParamAllGather
from megalith.plan.buckets import BucketPlan, plan_buckets
from megalith.testing.inject import slow_link
from megalith.testing.ranks import run_ranks, world_group

NUMELS = (3, 70, 5, 1)


class Chunk(nn.Module):
    """Layers in a list, one beside it, and a weight that no layer has; forward reads them in this
    order."""

    def __init__(self, weights: Tensor, plan: BucketPlan) -> None:
        super().__init__()
        self.weights = [nn.Parameter(weights[slot.start : slot.stop]) for slot in plan.slots]
        self.layers = nn.ModuleList([Layer(self.weights[0]), Layer(self.weights[1])])
        self.norm = Layer(self.weights[2])
        self.table = self.weights[3]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.norm(x)
        return y


class Layer(nn.Module):
    """Adds up its weights."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


def _published(rank: int, world: int) -> list[object]:
    group = world_group(rank, world, "dp_shard")
    plan = plan_buckets(NUMELS, bucket_numel=1, align=1, end_align=4 * world)
    assert len(plan.buckets) == len(NUMELS)
    weights = torch.zeros(plan.numel)
    for bucket in plan.buckets:  # every rank updates its own slices
        weights[bucket.start : bucket.stop].view(world, -1)[rank] = rank + 1
    expected = [
        i + 1.0
        for b in plan.buckets
        for i in range(world)
        for _ in range((b.stop - b.start) // world)
    ]
    chunk = Chunk(weights, plan)
    buckets = [weights[bucket.start : bucket.stop] for bucket in plan.buckets]
    param_all_gather = ParamAllGather(buckets, plan, [group] * len(plan.buckets))
    param_all_gather.wait_in(chunk, chunk.weights)
    left: list[object] = []
    for layer in (*chunk.layers, chunk.norm):
        layer.register_forward_pre_hook(lambda *_: left.append(len(param_all_gather.pending)))
    with slow_link(latency_seconds=0.01, poison=True), torch.no_grad():
        for _ in range(2):
            param_all_gather.start()
            assert not bool(weights.isfinite().all()), "the link holds them back"
            left.append(bool(chunk(torch.zeros(())).isfinite()))
            left.append(len(param_all_gather.pending))
        param_all_gather.start()
        param_all_gather.wait_params()
    assert weights.tolist() == expected
    return left


def test_each_layer_waits_for_its_own_weights_and_the_end_of_forward_for_the_rest() -> None:
    assert run_ranks(_published, 2) == [[3, 2, 1, True, 0] * 2] * 2


def test_wait_params_without_pending_messages_does_nothing() -> None:
    plan = plan_buckets(NUMELS, bucket_numel=None)
    ParamAllGather(torch.zeros(plan.numel), plan, [world_group(0, 1, "dp_shard")]).wait_params()
