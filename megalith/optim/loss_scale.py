"""Loss scaling for fp16: the loss is multiplied before backward, the gradients are divided before
the update.

fp16 has no numbers below 6e-8, where most gradients are. A scale that is too large makes
gradients overflow, which their norm shows; such a step is skipped and the scale reduced. Source:
Micikevicius et al. 2017, arXiv:1710.03740, section 3.2.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from megalith.config.optim import LossScaleConfig, PrecisionConfig

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LossScale:
    """The loss scale of a run, on the host, the same on every rank."""

    config: LossScaleConfig
    scale: float
    dynamic: bool
    """Whether overflows and overflow-free steps change the scale."""

    growth_tracker: int = 0
    """Steps without overflow since `update` last changed the scale."""

    hysteresis_tracker: int = 0
    """Overflows left until the scale is halved; at or below zero each overflow halves it."""

    stuck: int = 0
    """Consecutive overflows at the minimum scale."""

    @property
    def exhausted(self) -> bool:
        """Whether the scale is at its minimum and gradients still overflow."""
        return self.dynamic and self.stuck >= self.config.max_overflows

    def update(self, *, overflow: bool) -> None:
        """Update the scale after a step. Only growth restores the hysteresis, not a step without
        overflow."""
        if not self.dynamic:
            return
        if overflow:
            self.stuck = self.stuck + 1 if self.scale <= self.config.min else 0
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale / 2, self.config.min)
            return
        self.stuck = 0
        self.growth_tracker += 1
        if self.growth_tracker == self.config.window:
            self.growth_tracker, self.hysteresis_tracker = 0, self.config.hysteresis
            self.scale *= 2

    def as_json(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
            "stuck": self.stuck,
        }

    def load(self, saved: Mapping[str, float]) -> None:
        """Load the state of `as_json`; a constant scale is kept, with a warning if it differs."""
        if not self.dynamic:
            if saved["scale"] != self.scale:
                _log.warning(
                    "the checkpoint's loss scale %g is not used: precision.loss_scale.constant=%g",
                    saved["scale"],
                    self.scale,
                )
            return
        self.scale = float(saved["scale"])
        self.growth_tracker = int(saved["growth_tracker"])
        self.hysteresis_tracker = int(saved["hysteresis_tracker"])
        self.stuck = int(saved.get("stuck", 0))  # checkpoints before 2026-11-21 have none


def build_loss_scale(precision: PrecisionConfig) -> LossScale | None:
    """Return the loss scale of an fp16 run; None for other dtypes, whose range is wide enough."""
    if precision.params != "fp16":
        return None
    c = precision.loss_scale
    if c.constant is not None:
        return LossScale(c, c.constant, dynamic=False)
    return LossScale(c, c.initial, dynamic=True, hysteresis_tracker=c.hysteresis)
