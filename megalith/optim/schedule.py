"""Schedules of learning rate and weight decay, as pure functions of the samples consumed before a
step.

No state is stored: a resumed run, or one with another batch size, evaluates the same functions.
Skipped steps (with non-finite gradients) do not count their samples.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, get_args

from megalith.config.optim import (
    BatchSizeScaling,
    DecayStyle,
    GroupConfig,
    ScheduleConfig,
    WeightDecayStyle,
    WsdDecayStyle,
)
from megalith.config.plugins import load_plugin
from megalith.plan.batch_schedule import BatchSizeSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleLengths:
    """The lengths of a schedule, in samples."""

    warmup: int
    """Samples of the warmup."""

    decay: int
    """Samples from the start of the run until `min_lr`."""

    wsd_decay: int
    """Samples of the final decay of a wsd schedule."""

    total: int
    """Samples of the run, over which the weight decay changes."""


def schedule_lengths(
    schedule: ScheduleConfig, *, batch_schedule: BatchSizeSchedule, total_steps: int
) -> ScheduleLengths:
    """Return the lengths of a schedule in samples: the sums of the batch sizes of its steps, so
    that the learning rate has the same values after a warmup of N steps with any batch sizes."""
    decay_steps = _decay_steps(schedule, total_steps)
    decay = batch_schedule.count_samples(decay_steps)
    fall_begins = max(0, decay_steps - (schedule.wsd_decay_steps or 0))
    return ScheduleLengths(
        warmup=batch_schedule.count_samples(count_warmup_steps(schedule, total_steps)),
        decay=decay,
        wsd_decay=decay - batch_schedule.count_samples(fall_begins),
        total=batch_schedule.count_samples(total_steps),
    )


def count_warmup_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Return the steps of the warmup; a share of the decay is rounded and leaves at least one step
    after it.

    >>> schedule = ScheduleConfig(lr=1e-3, warmup_steps=0.125)
    >>> [count_warmup_steps(schedule, total_steps) for total_steps in (40, 3)]
    [5, 0]
    """
    if isinstance(schedule.warmup_steps, int):
        return schedule.warmup_steps
    decay = _decay_steps(schedule, total_steps)
    return min(round(schedule.warmup_steps * decay), decay - 1)


def learning_rate(schedule: ScheduleConfig, samples: int, lengths: ScheduleLengths) -> float:
    """Return the learning rate of the step before which `samples` samples were consumed (0: the
    first step).

    It increases linearly to `lr`, then follows `style`, and is `min_lr` after `lengths.decay`
    (except for `constant`). Source of wsd: Hu et al. 2024, arXiv:2404.06395, section 4; of
    minus_sqrt: Hägele et al. 2024, arXiv:2405.18392, section 3; of cosine: Loshchilov and Hutter
    2016, arXiv:1608.03983.
    """
    if schedule.plugin is not None:
        return float(load_plugin("schedule", schedule.plugin)(schedule, samples, lengths))
    high, low = schedule.lr, schedule.min_lr
    if samples <= lengths.warmup and lengths.warmup > 0:
        return schedule.warmup_init + (high - schedule.warmup_init) * samples / lengths.warmup
    if schedule.style == "constant":
        return high
    if samples > lengths.decay:
        return low
    if schedule.style == "inverse_square_root":
        return max(low, high * math.sqrt(max(lengths.warmup, 1)) / math.sqrt(max(samples, 1)))
    if schedule.style == "wsd":
        fall_begins = lengths.decay - lengths.wsd_decay
        if samples <= fall_begins:
            return high
        return low + (high - low) * DECAY_SHAPES[schedule.wsd_decay_style](
            (samples - fall_begins) / lengths.wsd_decay
        )
    return low + (high - low) * DECAY_SHAPES[schedule.style](
        (samples - lengths.warmup) / (lengths.decay - lengths.warmup)
    )


def batch_size_factor(schedule: ScheduleConfig, *, size: int, full_size: int) -> float:
    """Return the factor of the learning rate of a step with `size` samples; `full_size`:
    train.global_batch_size.

    Source of sqrt: Malladi et al. 2022, arXiv:2205.10287, section 4; of linear: Goyal et al. 2017,
    arXiv:1706.02677, section 2.1.

    >>> schedule = ScheduleConfig(lr=1e-3, scale_lr_with_batch_size="sqrt")
    >>> [batch_size_factor(schedule, size=size, full_size=16) for size in (4, 16)]
    [0.5, 1.0]
    """
    ratio = size / full_size
    factors = {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}
    return factors[schedule.scale_lr_with_batch_size]


def weight_decay(schedule: ScheduleConfig, samples: int, lengths: ScheduleLengths) -> float:
    """Return the weight decay of the step before which `samples` samples were consumed."""
    start, end = schedule.weight_decay, schedule.end_weight_decay
    if end is None or schedule.weight_decay_style == "constant":
        return start
    if samples >= lengths.total:
        return end
    return start + (end - start) * (
        1.0 - DECAY_SHAPES[schedule.weight_decay_style](samples / lengths.total)
    )


class GroupRates(NamedTuple):
    """Learning rate and weight decay of a parameter group in a step."""

    lr: float
    weight_decay: float


NO_GROUPS: Mapping[str, GroupRates] = MappingProxyType({})
"""No parameter groups: all parameters have the schedule's rates."""


def group_rates(
    groups: Sequence[GroupConfig],
    schedule: ScheduleConfig,
    samples: int,
    lengths: ScheduleLengths,
    *,
    factor: float = 1.0,
) -> dict[str, GroupRates]:
    """Return learning rate and weight decay of every group by name, in the step after `samples`
    samples. `factor`: of the learning rates (`batch_size_factor`)."""
    rates = {}
    for group in groups:
        group_schedule = schedule
        if group.lr is not None:
            group_schedule = replace(
                group_schedule,
                lr=group.lr,
                min_lr=schedule.min_lr if group.min_lr is None else group.min_lr,
            )
        if group.weight_decay is not None:
            group_schedule = replace(
                group_schedule,
                weight_decay=group.weight_decay,
                end_weight_decay=group.end_weight_decay,
            )
        lr_scale, decay_scale = (
            1.0 if x is None else x for x in (group.lr_scale, group.weight_decay_scale)
        )
        lr, decay = (
            learning_rate(group_schedule, samples, lengths) * lr_scale * factor,
            weight_decay(group_schedule, samples, lengths) * decay_scale,
        )
        rates[group.name] = GroupRates(lr, decay)
    return rates


def _linear(x: float) -> float:
    return 1.0 - x


def _cosine(x: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * x))


def _exponential(x: float) -> float:
    return math.exp2(1.0 - x) - 1.0


def _minus_sqrt(x: float) -> float:
    return 1.0 - math.sqrt(x)


DECAY_SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "exponential": _exponential,
    "minus_sqrt": _minus_sqrt,
}
"""Decay shapes, from 1 at x = 0 to 0 at x = 1."""


def schedule_problems(schedule: ScheduleConfig, total_steps: int) -> list[str]:
    """Return a message for each rule that the schedule of a run of `total_steps` steps breaks."""
    return [
        *_style_problems(schedule),
        *_rate_problems(schedule),
        *_length_problems(schedule, total_steps),
        *_wsd_problems(schedule, total_steps),
        *_weight_decay_problems(schedule),
    ]


def _decay_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    return total_steps if schedule.decay_steps is None else schedule.decay_steps


def _style_problems(schedule: ScheduleConfig) -> list[str]:
    """Return invalid names of styles, from programs or files that no type checker has seen."""
    choices = {
        "style": DecayStyle,
        "wsd_decay_style": WsdDecayStyle,
        "weight_decay_style": WeightDecayStyle,
        "scale_lr_with_batch_size": BatchSizeScaling,
    }
    return [
        f"schedule.{name}={getattr(schedule, name)} must be one of {', '.join(get_args(styles))}."
        for name, styles in choices.items()
        if getattr(schedule, name) not in get_args(styles)
    ]


def _rate_problems(schedule: ScheduleConfig) -> list[str]:
    problems = []
    for name in ("min_lr", "warmup_init"):
        value = getattr(schedule, name)
        if value > schedule.lr >= 0:
            problems.append(
                f"schedule.{name}={value} must be at most schedule.lr={schedule.lr}. Set it to "
                f"{schedule.lr} or less."
            )
    if schedule.style == "constant" and schedule.min_lr > 0:
        problems.append(
            f"schedule.min_lr={schedule.min_lr} is never reached with schedule.style=constant. Set "
            "schedule.min_lr to 0, or choose another style."
        )
    if schedule.warmup_steps == 0 and schedule.warmup_init > 0:
        problems.append(
            f"schedule.warmup_init={schedule.warmup_init} has no effect without a warmup. Set "
            "schedule.warmup_steps above 0, or schedule.warmup_init to 0."
        )
    return problems


def _length_problems(schedule: ScheduleConfig, total_steps: int) -> list[str]:
    problems = []
    if schedule.decay_steps is not None and schedule.style == "constant":
        problems.append(
            f"schedule.decay_steps={schedule.decay_steps} has no effect with "
            "schedule.style=constant. Leave it unset, or choose another style."
        )
    return problems + _warmup_problems(schedule, total_steps)


def _warmup_problems(schedule: ScheduleConfig, total_steps: int) -> list[str]:
    warmup, decay = schedule.warmup_steps, _decay_steps(schedule, total_steps)
    if isinstance(warmup, float) and warmup >= 1:
        return [
            f"schedule.warmup_steps={warmup} must be a whole number of steps, or a share from 0 to "
            "below 1. Use 0 for no warmup, or 0.05 for a twentieth of the run."
        ]
    if decay < 1 or not warmup >= decay:
        return []
    end = (
        f"train.steps={total_steps}"
        if schedule.decay_steps is None
        else f"schedule.decay_steps={decay}"
    )
    return [
        f"schedule.warmup_steps={warmup} leaves no step after the warmup: it must be less than "
        f"{end}. Set schedule.warmup_steps to {max(decay // 10, min(1, decay - 1))}, or to 0.1 for "
        "a tenth of any run."
    ]


def _is_warmup(warmup: int | float) -> bool:
    """Return whether a warmup is a count of steps or a share in [0, 1); NaN is neither."""
    return warmup >= 0 if isinstance(warmup, int) else 0 <= warmup < 1


def _wsd_problems(schedule: ScheduleConfig, total_steps: int) -> list[str]:
    decay_steps = schedule.wsd_decay_steps
    if schedule.style != "wsd":
        if decay_steps is None:
            return []
        return [
            f"schedule.wsd_decay_steps={decay_steps} has no effect with "
            f"schedule.style={schedule.style}. Set schedule.style to wsd, or leave "
            "schedule.wsd_decay_steps unset."
        ]
    if not _is_warmup(schedule.warmup_steps):
        return []  # another rule rejects it
    available_steps = _decay_steps(schedule, total_steps) - count_warmup_steps(
        schedule, total_steps
    )
    if decay_steps is None:
        return [
            "schedule.wsd_decay_steps is unset: schedule.style=wsd needs the length of its final "
            f"fall. Set schedule.wsd_decay_steps, e.g. to {max(available_steps // 5, 1)} (a fifth "
            "of the steps after the warmup)."
        ]
    if decay_steps > max(available_steps, 0):
        return [
            f"schedule.wsd_decay_steps={decay_steps} must be at most {max(available_steps, 0)}, "
            "the steps between the warmup and the end of the decay. Set schedule.wsd_decay_steps "
            f"to {max(available_steps // 5, 0)} (a fifth)."
        ]
    return []


def _weight_decay_problems(schedule: ScheduleConfig) -> list[str]:
    start, end, style = (
        schedule.weight_decay,
        schedule.end_weight_decay,
        schedule.weight_decay_style,
    )
    problems = []
    if style == "constant":
        if end is not None:
            problems.append(
                f"schedule.end_weight_decay={end} has no effect with "
                "schedule.weight_decay_style=constant. Leave it unset, or set "
                "schedule.weight_decay_style to linear or cosine."
            )
    elif end is None:
        problems.append(
            f"schedule.weight_decay_style={style} needs schedule.end_weight_decay. Set it to at "
            f"least schedule.weight_decay={start}, or set schedule.weight_decay_style to constant."
        )
    elif end < start:
        problems.append(
            f"schedule.end_weight_decay={end} must be at least schedule.weight_decay={start}. Set "
            f"it to {start} or more."
        )
    return problems
