"""Loss scaling for fp16: the loss is multiplied before backward, the gradients divided before the
update.

fp16 has no numbers below 6e-8, where most gradients lie. A scale that is too large lets them
overflow, which shows in their norm; such a step changes nothing but the scale. Source: Micikevicius
et al. 2017, arXiv:1710.03740, section 3.2.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from megalith.config.optim import LossScaleConfig, PrecisionConfig

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LossScale:
    """One scale for the whole run, on the host, the same on every rank. Python keeps it: it changes
    between steps."""

    config: LossScaleConfig
    scale: float
    dynamic: bool
    """Whether overflows change it."""

    growth_tracker: int = 0
    """Steps without overflow since the scale was last changed by `update`."""

    hysteresis_tracker: int = 0
    """Overflows left until the scale halves; below zero it goes on halving with each."""

    stuck: int = 0
    """Overflows in a row at the lowest scale."""

    @property
    def exhausted(self) -> bool:
        """Whether lowering the scale cannot help any more."""
        return self.dynamic and self.stuck >= self.config.max_overflows

    def update(self, *, overflow: bool) -> None:
        """Note how a step went. A step that went well does not restore the hysteresis; only growth
        does."""
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
        """What a checkpoint keeps."""
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
            "stuck": self.stuck,
        }

    def load(self, saved: Mapping[str, float]) -> None:
        """Continue with what `as_json` gave; a scale that was set by hand stays, with a warning."""
        if not self.dynamic:
            if saved["scale"] != self.scale:
                _log.warning(
                    "the checkpoint's loss scale %g is not taken over: "
                    "precision.loss_scale.constant=%g",
                    saved["scale"],
                    self.scale,
                )
            return
        self.scale = float(saved["scale"])
        self.growth_tracker = int(saved["growth_tracker"])
        self.hysteresis_tracker = int(saved["hysteresis_tracker"])
        self.stuck = int(saved.get("stuck", 0))  # checkpoints before 2026-11-21 have none


def build_loss_scale(precision: PrecisionConfig) -> LossScale | None:
    """The scale of a run in fp16; None in other formats, whose range is wide enough."""
    if precision.params != "fp16":
        return None
    c = precision.loss_scale
    if c.constant is not None:
        return LossScale(c, c.constant, dynamic=False)
    return LossScale(c, c.initial, dynamic=True, hysteresis_tracker=c.hysteresis)
