"""The learning rate and the weight decay of each step, as pure functions of the samples consumed
before it.

Nothing is stored: a resumed run, or one that goes on with other batch sizes, reads the same values
off the same functions. A step that changed nothing (its gradient was not finite) does not count its
samples, so it moves neither.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, get_args

from megalith.config.optim import GroupConfig
from megalith.config.schedule import DecayStyle, ScheduleConfig, WeightDecayStyle, WsdDecayStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleLengths:
    """The lengths of a schedule, in samples."""

    warmup: int
    """Samples of the warmup."""

    decay: int
    """Samples from the start of the run until `min_lr`."""

    wsd_decay: int
    """wsd: samples of the final fall."""

    total: int
    """Samples of the whole run, over which the weight decay moves."""


def schedule_lengths(
    schedule: ScheduleConfig, *, global_batch_size: int, total_steps: int
) -> ScheduleLengths:
    """The lengths in samples of a schedule whose lengths are steps of `global_batch_size`
    samples."""
    return ScheduleLengths(
        warmup=count_warmup_steps(schedule, total_steps) * global_batch_size,
        decay=_decay_steps(schedule, total_steps) * global_batch_size,
        wsd_decay=(schedule.wsd_decay_steps or 0) * global_batch_size,
        total=total_steps * global_batch_size,
    )


def count_warmup_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Return the steps of the warmup; a share of the decay is rounded, and leaves at least one step
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
    """The learning rate of the step before which `samples` samples were consumed; the first step
    has samples = 0.

    It climbs in a straight line to `lr`, takes the shape of `style`, and is `min_lr` after
    `lengths.decay` (except that `constant` stays). Source of wsd: Hu et al. 2024, arXiv:2404.06395,
    section 4; of minus_sqrt: Hägele et al. 2024, arXiv:2405.18392, section 3; of cosine: Loshchilov
    and Hutter 2016, arXiv:1608.03983.
    """
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
        return low + (high - low) * FALLS[schedule.wsd_decay_style](
            (samples - fall_begins) / lengths.wsd_decay
        )
    return low + (high - low) * FALLS[schedule.style](
        (samples - lengths.warmup) / (lengths.decay - lengths.warmup)
    )


def weight_decay(schedule: ScheduleConfig, samples: int, lengths: ScheduleLengths) -> float:
    """The weight decay of the step before which `samples` samples were consumed."""
    start, end = schedule.weight_decay, schedule.end_weight_decay
    if end is None or schedule.weight_decay_style == "constant":
        return start
    if samples >= lengths.total:
        return end
    return start + (end - start) * (
        1.0 - FALLS[schedule.weight_decay_style](samples / lengths.total)
    )


class GroupRates(NamedTuple):
    """What the parameters of a group have in a step."""

    lr: float
    weight_decay: float


NO_GROUPS: Mapping[str, GroupRates] = MappingProxyType({})
"""All parameters have what the schedule says."""


def group_rates(
    groups: Sequence[GroupConfig], schedule: ScheduleConfig, samples: int, lengths: ScheduleLengths
) -> dict[str, GroupRates]:
    """The rate and the decay of every group, by name, in the step before which `samples` samples
    were consumed."""
    found = {}
    for group in groups:
        own = schedule
        if group.lr is not None:
            own = replace(
                own, lr=group.lr, min_lr=schedule.min_lr if group.min_lr is None else group.min_lr
            )
        if group.weight_decay is not None:
            own = replace(
                own, weight_decay=group.weight_decay, end_weight_decay=group.end_weight_decay
            )
        lr_scale, decay_scale = (
            1.0 if x is None else x for x in (group.lr_scale, group.weight_decay_scale)
        )
        lr, decay = (
            learning_rate(own, samples, lengths) * lr_scale,
            weight_decay(own, samples, lengths) * decay_scale,
        )
        found[group.name] = GroupRates(lr, decay)
    return found


def _linear(x: float) -> float:
    return 1.0 - x


def _cosine(x: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * x))


def _exponential(x: float) -> float:
    return math.exp2(1.0 - x) - 1.0


def _minus_sqrt(x: float) -> float:
    return 1.0 - math.sqrt(x)


FALLS: Mapping[str, Callable[[float], float]] = {
    "linear": _linear,
    "cosine": _cosine,
    "exponential": _exponential,
    "minus_sqrt": _minus_sqrt,
}
"""Shapes that fall from 1 at x = 0 to 0 at x = 1."""


def schedule_problems(schedule: ScheduleConfig, total_steps: int) -> list[str]:
    """Every rule that the schedule of a run of `total_steps` steps breaks, as messages for the
    user."""
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
    """Names that no type checker saw, since the schedule was built by a program or read from a
    file."""
    choices = {
        "style": DecayStyle,
        "wsd_decay_style": WsdDecayStyle,
        "weight_decay_style": WeightDecayStyle,
    }
    return [
        f"schedule.{name}={getattr(schedule, name)} must be one of {', '.join(get_args(styles))}."
        for name, styles in choices.items()
        if getattr(schedule, name) not in get_args(styles)
    ]


def _rate_problems(schedule: ScheduleConfig) -> list[str]:
    problems = []
    if not 0 <= schedule.lr < math.inf:  # also False for nan
        problems.append(
            f"schedule.lr={schedule.lr} must be a number of at least 0. Use 3e-4 if in doubt."
        )
        return problems
    for name in ("min_lr", "warmup_init"):
        value = getattr(schedule, name)
        if not 0 <= value <= schedule.lr:
            problems.append(
                f"schedule.{name}={value} must be between 0 and schedule.lr={schedule.lr}."
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
    if schedule.decay_steps is not None and schedule.decay_steps < 1:
        problems.append(
            f"schedule.decay_steps={schedule.decay_steps} must be at least 1. Leave it unset for "
            "the whole run."
        )
    elif schedule.decay_steps is not None and schedule.style == "constant":
        problems.append(
            f"schedule.decay_steps={schedule.decay_steps} has no effect with "
            "schedule.style=constant. Leave it unset, or choose another style."
        )
    return problems + _warmup_problems(schedule, total_steps)


def _warmup_problems(schedule: ScheduleConfig, total_steps: int) -> list[str]:
    warmup, decay = schedule.warmup_steps, _decay_steps(schedule, total_steps)
    if not _is_warmup(warmup):
        return [
            f"schedule.warmup_steps={warmup} must be a whole number of steps, or a share from 0 to "
            "below 1. Use 0 for no warmup, or 0.05 for a twentieth of the run."
        ]
    if decay < 1 or warmup < decay:
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
    """Return whether a warmup is a count of steps, or a share of them; nan is neither."""
    return warmup >= 0 if isinstance(warmup, int) else 0 <= warmup < 1


def _wsd_problems(schedule: ScheduleConfig, total_steps: int) -> list[str]:
    fall = schedule.wsd_decay_steps
    if schedule.style != "wsd":
        if fall is None:
            return []
        return [
            f"schedule.wsd_decay_steps={fall} has no effect with schedule.style={schedule.style}. "
            "Set schedule.style to wsd, or leave schedule.wsd_decay_steps unset."
        ]
    if not _is_warmup(schedule.warmup_steps):
        return []  # another rule rejects it
    room = _decay_steps(schedule, total_steps) - count_warmup_steps(schedule, total_steps)
    if fall is None:
        return [
            "schedule.wsd_decay_steps is unset: schedule.style=wsd needs the length of its final "
            f"fall. Set schedule.wsd_decay_steps, e.g. to {max(room // 5, 1)} (a fifth of the "
            "steps after the warmup)."
        ]
    if fall < 0 or fall > max(room, 0):
        return [
            f"schedule.wsd_decay_steps={fall} must be from 0 to {max(room, 0)}, the steps between "
            "the warmup and the end of the decay. Set schedule.wsd_decay_steps to "
            f"{max(room // 5, 0)} (a fifth)."
        ]
    return []


def _weight_decay_problems(schedule: ScheduleConfig) -> list[str]:
    start, end, style = (
        schedule.weight_decay,
        schedule.end_weight_decay,
        schedule.weight_decay_style,
    )
    problems = []
    if not 0 <= start < math.inf:
        problems.append(
            f"schedule.weight_decay={start} must be a number of at least 0. Use 0.1 if in doubt."
        )
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
    elif not start <= end < math.inf:
        problems.append(
            f"schedule.end_weight_decay={end} must be a number of at least "
            f"schedule.weight_decay={start}."
        )
    return problems
