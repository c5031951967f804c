"""The optimizer, its precision and its clipping."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Parameters with a learning rate or a weight decay of their own, by name.

    A parameter may be in several groups if no two of them decide the same about it.
    """

    name: str
    """Small letters, digits and underscores: its learning rate is lr_NAME in metrics.jsonl."""

    match: tuple[str, ...]
    """Names of parameters, or patterns of them, such as embed.weight, layers.[0-3].* and
    *.moe.router."""

    lr: float | None = None
    """In place of schedule.lr: the rate climbs to it and falls in the same shape at the same
    steps."""

    min_lr: float | None = None
    """In place of schedule.min_lr, beside `lr`; unset: schedule.min_lr."""

    lr_scale: float | None = None
    """What the rate is multiplied by, instead of `lr`."""

    weight_decay: float | None = None
    """In place of schedule.weight_decay."""

    end_weight_decay: float | None = None
    """In place of schedule.end_weight_decay, beside `weight_decay`; unset: the decay stays as it
    is."""

    weight_decay_scale: float | None = None
    """What the weight decay is multiplied by, instead of `weight_decay`."""

    @property
    def sets_rate(self) -> bool:
        """Whether it decides anything about the learning rate."""
        return (self.lr, self.lr_scale) != (None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """The update rule, with fp32 master weights where the weights are shorter, and what happens to
    gradients before."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """adamw: Loshchilov and Hutter 2017, arXiv:1711.05101; sgd: with momentum, weight decay added
    to the gradient."""

    beta1: float = 0.9
    """adamw: how much of the mean gradient is kept each step."""

    beta2: float = 0.95
    """adamw: how much of the mean squared gradient is kept each step; 0.999 remembers a spike for
    about 1000 steps."""

    eps: float = 1e-8
    """adamw: added to the root of the mean squared gradient."""

    decoupled_weight_decay: bool = True
    """adamw: decay the weights directly; off: add the decay to the gradient (Adam with L2)."""

    momentum: float = 0.9
    """sgd: how much of the last update is kept; 0: nothing."""

    nesterov: bool = False
    """sgd: step along the gradient plus the new momentum. Source: Sutskever et al. 2013, section
    2."""

    clip_grad: float = 1.0
    """Scale gradients so that their global L2 norm is at most this; 0 turns clipping off."""

    nonfinite_grad: Literal["skip", "raise"] = "skip"
    """A step whose gradient norm is not finite changes nothing and is counted (`skip`), or ends
    the run and says which rank and parameter it came from (`raise`; each bucket is looked at
    before it is summed)."""

    count_zeros: bool = False
    """Log how many elements of the gradient are zero."""

    trained: tuple[str, ...] = ("*",)
    """Train only the parameters with these names, or patterns of names, such as head.weight and
    layers.3.*; all others stay as they are, without gradients, optimizer state and messages."""

    frozen: tuple[str, ...] = ()
    """Of these, parameters that stay as they are all the same, by name or pattern."""

    groups: tuple[GroupConfig, ...] = ()
    """Learning rates and weight decay of their own for some parameters."""

    decayed_vectors: tuple[str, ...] = ()
    """Vectors (norms, biases) that decay as matrices do, by name or pattern; others do not."""

    def trains(self, parameter: str) -> bool:
        """Whether a parameter is trained, by its canonical name."""
        return fits(parameter, self.trained) and not fits(parameter, self.frozen)

    def trains_all(self) -> bool:
        """Whether nothing was frozen by name."""
        return self.trained == ("*",) and not self.frozen


TRAIN_ALL = OptimConfig()
"""Every default."""


def fits(parameter: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns is of this name.

    >>> patterns = ["layers.[0-3].*"]
    >>> fits("layers.3.attention.q", patterns), fits("layers.13.attention.q", patterns)
    (True, False)
    """
    return any(fnmatchcase(parameter, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleConfig:
    """What the loss is multiplied by under precision.params=fp16, so that small gradients do not
    vanish.

    Nothing here matters in other formats. Source: Micikevicius et al. 2017, arXiv:1710.03740,
    section 3.2.
    """

    constant: float | None = None
    """The scale of the whole run; unset: it halves when gradients overflow, and doubles after a
    while without."""

    initial: float = 2.0**32
    """The first scale."""

    min: float = 1.0
    """The scale is never lowered below this."""

    window: int = 1000
    """Steps without overflow, since the last change, after which the scale doubles."""

    hysteresis: int = 2
    """Overflows until the scale halves; counted anew whenever it doubles."""

    max_overflows: int = 100
    """Overflows in a row at the lowest scale that end the run: then the scale is not what is
    wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Number formats of one run."""

    params: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Weights and activations. bf16 and fp16 keep fp32 master weights and sum gradients in fp32;
    fp16 also scales the loss; fp64 is for proofs."""

    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """fp16: what the loss is multiplied by."""


def optim_problems(optim: OptimConfig, precision: PrecisionConfig) -> list[str]:
    """Settings of the update and of its number formats that cannot work: one text each."""
    return _momentum_problems(optim) + _loss_scale_problems(optim, precision)


def _momentum_problems(optim: OptimConfig) -> list[str]:
    problems = []
    if not 0 <= optim.momentum < 1:
        problems.append(
            f"optim.momentum={optim.momentum} must be in [0, 1). Use 0.9, or 0 for plain gradient "
            "descent."
        )
    if optim.nesterov and optim.kind != "sgd":
        problems.append(
            f"optim.nesterov={str(optim.nesterov).lower()} is for optim.kind=sgd, and "
            f"optim.kind={optim.kind}. "
            f"Set optim.kind=sgd, or remove optim.nesterov."
        )
    elif optim.nesterov and optim.momentum == 0:
        problems.append(
            "optim.nesterov=true looks ahead along the momentum, and "
            f"optim.momentum={optim.momentum} keeps none. "
            f"Set optim.momentum to 0.9, or remove optim.nesterov."
        )
    return problems


def _loss_scale_problems(optim: OptimConfig, precision: PrecisionConfig) -> list[str]:
    scale, problems = precision.loss_scale, []
    place = "precision.loss_scale"
    above = {
        "initial": (scale.initial, 2.0**32),
        "min": (scale.min, 1.0),
        "constant": (scale.constant, 1024.0),
    }
    for name, (value, usual) in above.items():
        if value is not None and not 0 < value < float("inf"):
            problems.append(
                f"{place}.{name}={value} must be a finite number above 0. Use {usual:g}."
            )
    counts = {
        "window": scale.window,
        "hysteresis": scale.hysteresis,
        "max_overflows": scale.max_overflows,
    }
    problems += [
        f"{place}.{name}={value} must be at least 1. Set {place}.{name} to 1 or more."
        for name, value in counts.items()
        if value < 1
    ]
    if not problems and scale.min > scale.initial:
        problems.append(
            f"{place}.min={scale.min:g} is above {place}.initial={scale.initial:g}, where the "
            f"scale starts. Set {place}.min to {scale.initial:g} or less."
        )
    if scale.constant is not None and precision.params != "fp16":
        problems.append(
            f"{place}.constant={scale.constant:g} with precision.params={precision.params}, whose "
            "range needs no loss "
            f"scale. Set precision.params=fp16, or remove {place}.constant."
        )
    if precision.params == "fp16" and optim.nonfinite_grad == "raise":
        problems.append(
            f"optim.nonfinite_grad={optim.nonfinite_grad} with precision.params=fp16, where "
            "gradients overflow in good "
            f"runs too and lower the loss scale. Set optim.nonfinite_grad=skip."
        )
    return problems
