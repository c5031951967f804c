"""How the learning rate and the weight decay move over a run."""

from dataclasses import dataclass
from typing import Literal

DecayStyle = Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"]
WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Learning rate and weight decay over the run: warm up, hold or decay, end at the minimum.

    Lengths are steps here; the schedule itself counts samples, so a step that changes nothing moves
    neither value.
    """

    lr: float
    """Highest learning rate, reached at the end of the warm-up."""

    min_lr: float = 0.0
    """Lowest learning rate: where the decay ends, and the value of every step after it (constant
    never goes there)."""

    style: DecayStyle = "cosine"
    """Shape after the warm-up. wsd (warm-up, stable, decay) holds `lr` and falls over the last
    `wsd_decay_steps`."""

    warmup_steps: int | float = 0
    """Warmup: steps over which the rate rises linearly from `warmup_init` to `lr`. A number
    below 1 is a share of `decay_steps`, or of train.steps where that is unset: 0.1 of 40 steps
    are 4."""

    warmup_init: float = 0.0
    """Learning rate of the very first step when there is a warm-up."""

    decay_steps: int | None = None
    """Step at which `min_lr` is reached, counted from the start of the run; unset: the last step of
    the run."""

    wsd_decay_steps: int | None = None
    """wsd: steps of the final fall, the last ones before `decay_steps`; unset with every other
    style."""

    wsd_decay_style: WsdDecayStyle = "minus_sqrt"
    """wsd: shape of the final fall; 1 - sqrt(x) did best in Hägele et al. 2024, arXiv:2405.18392,
    section 3."""

    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none. With another style than constant: its
    first value."""

    end_weight_decay: float | None = None
    """Weight decay at the last step, for `weight_decay_style` linear and cosine; unset with
    constant."""

    weight_decay_style: WeightDecayStyle = "constant"
    """How the weight decay climbs from `weight_decay` to `end_weight_decay` over the run."""
