"""QK-clip: scales the query and key projections of heads whose largest attention score is above a
threshold, in the slices that each rank owns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.config.optim import QkClipConfig
from megalith.optim.slots import MASTER, OptimizerSlot
from megalith.plan.qk_clip import AttentionHeads, ScaledPart, row_factors, split_factors

Scores = Sequence[Sequence[float]]
"""Largest score of each query head of each attention module, over the global batch."""


class QKClip:
    """QK-clip of the slots of an optimizer; no communication, since all ranks know all scores."""

    def __init__(
        self,
        slots: Sequence[OptimizerSlot],
        attentions: Sequence[AttentionHeads],
        config: QkClipConfig,
    ) -> None:
        self.config, self.attentions = config, attentions
        numbers = {attention.name: number for number, attention in enumerate(attentions)}
        self.slots: list[tuple[OptimizerSlot, int]] = [
            (slot, numbers[prefix])
            for slot in slots
            if (prefix := slot.shard.name.rpartition(".")[0]) in numbers
        ]
        """Slots of attention modules, with the number of the module."""

        self.scores: Scores | None = None
        """Scores of the step whose update follows; None: this update is not clipped."""

    def is_due(self, updates: int) -> bool:
        """Return whether the update number `updates` (from 1) is clipped."""
        return updates % self.config.every == 0

    @torch.no_grad()
    def apply(self) -> None:
        """Scale master weights and weights, after the optimizer's update and before the weights are
        all-gathered."""
        scores, self.scores = self.scores, None
        if scores is None:
            return
        for slot, number in self.slots:
            factors = row_factors(
                self.attentions[number], slot.shard.name, scores[number], self.config
            )
            if factors is not None and (factors != 1).any():
                scale_slot(slot, split_factors(slot.shard, factors))


def scale_slot(slot: OptimizerSlot, parts: Sequence[ScaledPart]) -> None:
    """Multiply the master weights of a slot by the factors of its parts, and round them to the
    weights where these have lower precision. Parts without a factor keep their bits."""
    sizes = [part.numel for part in parts]
    is_encoded = MASTER in slot.encoded
    master_weights = slot.read_master()
    master_parts = master_weights.view(-1).split(sizes)
    weight_parts: Sequence[Tensor] = slot.weight.view(-1).split(sizes)
    for part, master, weight in zip(parts, master_parts, weight_parts, strict=True):
        if (part.factors == 1).all():
            continue
        factors = torch.from_numpy(part.factors.copy()).to(master.device, master.dtype)
        master.view(part.shape).mul_(factors)
        if slot.has_master and not is_encoded:
            weight.copy_(master)
    if is_encoded:
        slot.write_master(master_weights, purpose="QK-clip")
