"""Learning rate and weight decay schedules."""

from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"]
WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Learning rate and weight decay schedules: warmup, then a constant rate or a decay.

    Lengths are in steps; the schedule counts samples, so a skipped step does not advance it.
    """

    lr: float
    """Peak learning rate, reached at the end of the warmup."""

    min_lr: float = 0.0
    """Minimum learning rate, reached at the end of the decay and used for all later steps. Not
    used by constant."""

    style: DecayStyle = "cosine"
    """Shape of the schedule after the warmup. wsd (warmup-stable-decay) keeps `lr` constant and
    decays it over the last `wsd_decay_steps`."""

    warmup_steps: int | float = 0
    """Number of warmup steps, over which the learning rate rises linearly from `warmup_init` to
    `lr`. A number below 1 is a fraction of `decay_steps`, or of train.steps if that is unset:
    0.1 of 40 steps is 4."""

    warmup_init: float = 0.0
    """Learning rate at the start of the warmup."""

    decay_steps: int | None = None
    """Step at which `min_lr` is reached, counted from the start of the run. Unset: train.steps."""

    wsd_decay_steps: int | None = None
    """wsd: number of steps of the final decay, which ends at `decay_steps`. Unset with all other
    styles."""

    wsd_decay_style: WsdDecayStyle = "minus_sqrt"
    """wsd: shape of the final decay. minus_sqrt, 1 - sqrt(x), was best in Hägele et al. 2024,
    arXiv:2405.18392, section 3."""

    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none. The initial value if
    `weight_decay_style` is not constant."""

    end_weight_decay: float | None = None
    """Weight decay at the last step with `weight_decay_style` linear or cosine. Unset with
    constant."""

    weight_decay_style: WeightDecayStyle = "constant"
    """Shape of the change from `weight_decay` to `end_weight_decay` over the run."""
