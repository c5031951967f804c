"""A loss over the vocabulary that also notes what it saw of scores: how large they are, and what
their size costs."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.kernels.cross_entropy import Measured


@dataclass(slots=True)
class LogitStats:
    """What a head saw of labeled tokens since it was last asked, on the device where it saw it."""

    z: Tensor | None = None
    """float64: sum of z_loss * logsumexp^2; None: nothing was seen."""

    largest: Tensor | None = None
    """float64: the largest score, -inf without labels."""

    def note(self, measured: Measured, labels: Tensor, z_loss: float) -> None:
        """One more microbatch."""
        absent = labels < 0
        z = z_loss * measured.logsumexp.detach().double().square().masked_fill(absent, 0.0).sum()
        largest = measured.largest.detach().double().masked_fill(absent, float("-inf"))
        largest = torch.cat(
            [largest, largest.new_full((1,), float("-inf"))]
        ).amax()  # of no token, too
        self.z = z if self.z is None else self.z + z
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def taken(self) -> tuple[Tensor | None, Tensor | None]:
        """z and the largest score; from now on it begins again."""
        found, self.z, self.largest = (self.z, self.largest), None, None
        return found


@dataclass(frozen=True, slots=True)
class LossWithLogitStats:
    """A summed loss that notes what it saw; takes what `compute` takes, and gives its loss
    alone."""

    compute: Callable[..., Measured]
    z_loss: float = 0.0
    seen: LogitStats = field(default_factory=LogitStats)

    def __call__(self, x: Tensor, weight: Tensor, labels: Tensor, **others: object) -> Tensor:
        """Sum over labeled tokens of -log p(label) + z_loss * logsumexp^2."""
        measured = self.compute(x, weight, labels, z_loss=self.z_loss, **others)
        with torch.no_grad():
            self.seen.note(measured, labels, self.z_loss)
        return measured.loss
