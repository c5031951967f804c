"""Experts over a step: the biases that even out their use."""

from collections.abc import Iterator

import torch
from torch import nn

from megalith.nn.moe.router import Router
from megalith.parallel.group import all_reduce_
from megalith.parallel.mesh import Mesh


def routers_of(model: nn.Module) -> Iterator[Router]:
    """Every router, in the order of the layers."""
    return (module for module in model.modules() if isinstance(module, Router))


def move_balancing_biases(model: nn.Module, mesh: Mesh) -> None:
    """After a step, make experts that were chosen too seldom more likely to be chosen, and those too often less.

    Routers that are not trained keep their biases. Collective over the ranks with the same layers; one message.
    Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1.
    """
    moving = [
        (router.moved, router.balance.record, router.moe.router.balancing_rate)
        for router in routers_of(model)
        if router.moved is not None and any(weight.requires_grad for weight in router.gate.sunk())
    ]
    recorded = [(bias, record, rate) for bias, record, rate in moving if record is not None]
    if not recorded:
        return
    counts = all_reduce_(torch.stack([record.counts.sum(0) for _, record, _ in recorded]), mesh.over("dp", "cp", "tp"))
    for (bias, _, rate), count in zip(recorded, counts, strict=True):
        bias.data.add_((count.mean() - count).sign().to(bias.dtype), alpha=rate)
