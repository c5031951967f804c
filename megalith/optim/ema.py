"""Exponential moving average (EMA) of the weights: the role `ema` of a checkpoint.

Every rank averages the shards whose master weights it holds, so that no communication is needed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.config.train import EMAConfig
from megalith.optim.slots import MASTER, OptimizerSlot

EMA = "ema"
"""Role of the averages in a checkpoint."""


class WeightEMA:
    """Exponential moving average of the master weights of an optimizer's slots.

    The averages have the dtype of the master weights (fp32, or float64 in fp64 runs), and are in
    host memory if `EMAConfig.device` is cpu.
    """

    def __init__(self, slots: Sequence[OptimizerSlot], config: EMAConfig) -> None:
        self.config = config
        self.slots = slots
        self.averages: list[Tensor] = [
            slot.read_master().detach().to(config.device or slot.weight.device, copy=True)
            for slot in slots
        ]
        """The average of each slot."""

        self.earlier_updates = 0
        """Updates of the run before the optimizer's state was reset, which the optimizer does not
        count."""

    @torch.no_grad()
    def reset(self) -> None:
        """Set the averages to the master weights, as before the first update."""
        for average, slot in zip(self.averages, self.slots, strict=True):
            average.copy_(slot.read_master())

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Update the averages after the optimizer's update number `num_updates` (from 1)."""
        num_updates += self.earlier_updates
        if not self.averages:
            return
        if num_updates <= self.config.start_step:
            self.reset()
        elif num_updates % self.config.every == 0:
            self._add_master_weights()

    def _add_master_weights(self) -> None:
        """Move the averages toward the master weights; encoded ones are decoded one at a time."""
        plain = [n for n, slot in enumerate(self.slots) if MASTER not in slot.encoded]
        master_weights = [self.slots[n].master for n in plain]
        if self.config.device is not None:
            master_weights = [master.to(self.config.device) for master in master_weights]
        weight = 1 - self.config.decay
        if plain:
            torch._foreach_lerp_([self.averages[n] for n in plain], master_weights, weight)
        for average, slot in zip(self.averages, self.slots, strict=True):
            if MASTER in slot.encoded:
                average.lerp_(slot.read_master().to(average.device), weight)
