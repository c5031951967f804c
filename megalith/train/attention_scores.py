"""Largest attention scores of a step: which steps measure them, their maximum over all ranks, and
the scores that QK-clip applies."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.kernels.attention.scores import ScoreRecord
from megalith.optim.qk_clip import QKClip
from megalith.optim.slots import Optimizer
from megalith.parallel.group import all_reduce_max_
from megalith.parallel.mesh import Mesh
from megalith.plan.qk_clip import AttentionHeads, LargestScore, find_largest_score


@dataclass(frozen=True, slots=True)
class ScoreMonitor:
    """Measures the largest attention scores of the steps that need them, for the log and for
    QK-clip."""

    attentions: tuple[AttentionHeads, ...]
    """Attention modules of the whole model."""

    optimizer: Optimizer
    logs: bool
    """Whether every step is measured for the log."""

    clip: QKClip | None

    def start_step(self) -> ScoreRecord | None:
        """Return the record of a step; None if its scores are not needed. Equal on all ranks."""
        if self.clip is not None:
            self.clip.scores = None  # of a step that was skipped
        return ScoreRecord() if self.logs or self._clips else None

    @property
    def _clips(self) -> bool:
        """Whether the next update is clipped."""
        return self.clip is not None and self.clip.is_due(self.optimizer.updates + 1)

    def reduce(self, record: ScoreRecord, mesh: Mesh, device: torch.device) -> Tensor:
        """Return the largest scores over the global batch: float64 [attentions * heads]; -inf
        if no pair was visible. One all-reduce over the mesh."""
        num_heads = max(attention.num_heads for attention in self.attentions)
        scores = torch.full(
            (len(self.attentions), num_heads), float("-inf"), dtype=torch.float64, device=device
        )
        for row, attention in zip(scores, self.attentions, strict=True):
            local = record.by_attention.get(attention.name)
            if local is not None:
                row[local.first_head : local.first_head + len(local.largest)] = local.largest
        return all_reduce_max_(scores, mesh.world).flatten()

    def receive(self, values: list[float]) -> LargestScore | None:
        """Receive the result of `reduce` on the host: set the scores of QK-clip, and return the
        largest for the log."""
        num_heads = len(values) // len(self.attentions)
        scores = [values[start : start + num_heads] for start in range(0, len(values), num_heads)]
        if self.clip is not None:
            self.clip.scores = scores if self._clips else None
        return find_largest_score(self.attentions, scores)
