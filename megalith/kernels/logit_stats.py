"""Loss over the vocabulary that also records logit statistics: the largest logit and the z-loss."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.kernels.cross_entropy import CrossEntropyResult


@dataclass(slots=True)
class LogitStats:
    """Logit statistics of labeled tokens since the last call of `taken`, on the device of the
    head."""

    z: Tensor | None = None
    """float64: sum of z_loss * logsumexp^2; None: no microbatch yet."""

    largest: Tensor | None = None
    """float64: the largest logit, -inf without labels."""

    def note(self, measured: CrossEntropyResult, labels: Tensor, z_loss: float) -> None:
        """Add the statistics of a microbatch."""
        is_unlabeled = labels < 0
        z = (
            z_loss
            * measured.logsumexp.detach().double().square().masked_fill(is_unlabeled, 0.0).sum()
        )
        largest = measured.largest.detach().double().masked_fill(is_unlabeled, float("-inf"))
        largest = torch.cat(
            [largest, largest.new_full((1,), float("-inf"))]
        ).amax()  # of no token, too
        self.z = z if self.z is None else self.z + z
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def taken(self) -> tuple[Tensor | None, Tensor | None]:
        """Return z and the largest logit, and reset both."""
        stats, self.z, self.largest = (self.z, self.largest), None, None
        return stats


@dataclass(frozen=True, slots=True)
class LossWithLogitStats:
    """Summed loss that records logit statistics; calls `compute` and returns its loss only."""

    compute: Callable[..., CrossEntropyResult]
    z_loss: float = 0.0
    seen: LogitStats = field(default_factory=LogitStats)

    def __call__(self, x: Tensor, weight: Tensor, labels: Tensor, **others: object) -> Tensor:
        """Sum over labeled tokens of -log p(label) + z_loss * logsumexp^2."""
        measured = self.compute(x, weight, labels, z_loss=self.z_loss, **others)
        with torch.no_grad():
            self.seen.note(measured, labels, self.z_loss)
        return measured.loss
