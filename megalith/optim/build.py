"""Builds the optimizer of a config."""

from collections.abc import Sequence

from torch import Tensor

from megalith.config.optim import OptimConfig
from megalith.optim.adamw import AdamW
from megalith.optim.sgd import SGD
from megalith.optim.slots import Optimizer, RatesOf, equal_rates
from megalith.plan.shards import Shard


def build_optimizer(
    weights: Sequence[tuple[Shard, Tensor]], config: OptimConfig, rates: RatesOf = equal_rates
) -> Optimizer:
    """Build the optimizer of `optim.kind` over these shards; `rates`: factors of each parameter."""
    return SGD(weights, config, rates) if config.kind == "sgd" else AdamW(weights, config, rates)
