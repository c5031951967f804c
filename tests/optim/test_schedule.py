"""Tests of megalith/optim/schedule.py."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from megalith.config.fields import range_problems
from megalith.config.optim import GroupConfig, ScheduleConfig
from megalith.optim.schedule import (
    ScheduleLengths,
    group_rates,
    learning_rate,
    schedule_lengths,
    schedule_problems,
    weight_decay,
)
from megalith.plan.batch_schedule import constant_batch_size

SHORT = ScheduleLengths(warmup=10, decay=100, wsd_decay=20, total=100)
LONG = replace(SHORT, decay=110)
ONE = ScheduleConfig(lr=1.0, min_lr=0.1, warmup_steps=10)
STYLES = ["constant", "linear", "cosine", "inverse_square_root", "wsd"]
DECAY_SHAPES = ["linear", "cosine", "exponential", "minus_sqrt"]


def rate(style: Any, samples: int, lengths: ScheduleLengths, fall: Any = "linear") -> float:
    return learning_rate(replace(ONE, style=style, wsd_decay_style=fall), samples, lengths)


@pytest.mark.parametrize("style", STYLES)
def test_warmup_is_linear(style: str) -> None:
    assert [rate(style, n, SHORT) for n in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert learning_rate(replace(ONE, warmup_init=0.5), 5, SHORT) == 0.75


@pytest.mark.parametrize(
    ("lengths", "style", "samples", "expected"),
    [
        (SHORT, "linear", 28, 0.82),
        (SHORT, "cosine", 28, 0.914058),
        (SHORT, "inverse_square_root", 28, 0.597614),
        (SHORT, "linear", 55, 0.55),
        (SHORT, "cosine", 55, 0.55),
        (SHORT, "inverse_square_root", 55, 0.426401),
        (SHORT, "linear", 100, 0.1),
        (SHORT, "cosine", 100, 0.1),
        (SHORT, "inverse_square_root", 100, 0.316228),
        (SHORT, "linear", 101, 0.1),
        (SHORT, "cosine", 101, 0.1),
        (SHORT, "inverse_square_root", 101, 0.1),
        (SHORT, "constant", 101, 1.0),
        (LONG, "linear", 35, 0.775),
        (LONG, "linear", 60, 0.55),
        (LONG, "cosine", 35, 0.868198),
        (LONG, "cosine", 60, 0.55),
        (LONG, "inverse_square_root", 35, 0.534522),
        (LONG, "inverse_square_root", 60, 0.408248),
        (LONG, "inverse_square_root", 110, 0.301511),
        (LONG, "inverse_square_root", 111, 0.1),
    ],
)
def test_learning_rates_match_megatron(
    lengths: ScheduleLengths, style: str, samples: int, expected: float
) -> None:
    assert rate(style, samples, lengths) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("lengths", "samples", "expected"),
    [
        (SHORT, 80, [1.0, 1.0, 1.0, 1.0]),
        (SHORT, 85, [0.775, 0.868198, 0.713614, 0.55]),
        (SHORT, 95, [0.325, 0.231802, 0.270286, 0.220577]),
        (SHORT, 100, [0.1, 0.1, 0.1, 0.1]),
        (SHORT, 101, [0.1, 0.1, 0.1, 0.1]),
        (LONG, 95, [0.775, 0.868198, 0.713614, 0.55]),
        (LONG, 100, [0.55, 0.55, 0.472792, 0.363604]),
    ],
)
def test_warmup_stable_decay_matches_megatron(
    lengths: ScheduleLengths, samples: int, expected: list[float]
) -> None:
    assert [rate("wsd", samples, lengths, fall) for fall in DECAY_SHAPES] == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize("fall", DECAY_SHAPES)
@pytest.mark.parametrize("style", STYLES)
def test_learning_rate_is_continuous_and_within_its_bounds(style: str, fall: str) -> None:
    lengths = ScheduleLengths(warmup=1000, decay=10_000, wsd_decay=2000, total=12_000)
    rates = [rate(style, n, lengths, fall) for n in range(10_001)]
    assert all(0.1 <= value <= 1.0 for value in rates[1000:])
    # 1 - sqrt falls by sqrt(1 / 2000) = 2.2 % in its first sample, more than any other shape; a
    # jump would be 10 %.
    assert max(abs(a - b) for a, b in pairwise(rates)) < 0.025
    tail = {rate(style, n, lengths, fall) for n in (10_001, 11_000)}
    assert tail == ({1.0} if style == "constant" else {0.1})


@pytest.mark.parametrize("style", STYLES)
def test_first_step_without_warmup_has_the_full_rate(style: str) -> None:
    assert rate(style, 0, replace(SHORT, warmup=0)) == 1.0
    # The inverse square root then falls from the first sample on.
    assert rate("inverse_square_root", 4, replace(SHORT, warmup=0)) == 0.5


def test_wsd_decay_of_zero_samples_is_a_step_at_the_end() -> None:
    lengths = replace(SHORT, wsd_decay=0)
    assert [rate("wsd", n, lengths) for n in (99, 100, 101)] == [1.0, 1.0, 0.1]


def test_lengths_are_steps_times_the_global_batch() -> None:
    schedule = ScheduleConfig(lr=1.0, style="wsd", warmup_steps=3, wsd_decay_steps=4)
    lengths = schedule_lengths(schedule, batch_schedule=constant_batch_size(8), total_steps=50)
    assert lengths == ScheduleLengths(warmup=24, decay=400, wsd_decay=32, total=400)
    shorter = schedule_lengths(
        replace(schedule, decay_steps=20), batch_schedule=constant_batch_size(8), total_steps=50
    )
    assert (shorter.decay, shorter.total) == (160, 400)


@pytest.mark.parametrize(
    ("share", "total", "decay", "expected"),
    [
        (0.125, 40, None, 5),
        (0.125, 3, None, 0),
        (0.1, 40, 20, 2),
        (0.99, 1, None, 0),
        (0.9, 3, None, 2),
    ],
)
def test_warmup_share_is_rounded_and_leaves_a_step_after_the_warmup(
    share: float, total: int, decay: int | None, expected: int
) -> None:
    schedule = ScheduleConfig(lr=1.0, warmup_steps=share, decay_steps=decay)
    assert schedule_problems(schedule, total) == []
    assert (
        schedule_lengths(schedule, batch_schedule=constant_batch_size(8), total_steps=total).warmup
        == 8 * expected
    )


@pytest.mark.parametrize("style", STYLES)
def test_run_with_another_batch_size_has_the_same_rates(style: str) -> None:
    schedule = ScheduleConfig(lr=1.0, style=style, warmup_steps=2, wsd_decay_steps=4)  # type: ignore[arg-type]
    doubled = replace(schedule, warmup_steps=4, wsd_decay_steps=8)
    large = schedule_lengths(schedule, batch_schedule=constant_batch_size(16), total_steps=20)
    small = schedule_lengths(doubled, batch_schedule=constant_batch_size(8), total_steps=40)
    assert [learning_rate(schedule, n, large) for n in range(320)] == [
        learning_rate(doubled, n, small) for n in range(320)
    ]


def test_weight_decay_moves_from_its_start_to_its_end() -> None:
    constant = ScheduleConfig(lr=1.0, weight_decay=0.1)
    assert [weight_decay(constant, n, SHORT) for n in (0, 50, 200)] == [0.1, 0.1, 0.1]
    linear = ScheduleConfig(
        lr=1.0, weight_decay=0.1, end_weight_decay=0.5, weight_decay_style="linear"
    )
    assert [weight_decay(linear, n, SHORT) for n in (0, 25, 50, 100, 101)] == pytest.approx(
        [0.1, 0.2, 0.3, 0.5, 0.5]
    )
    cosine = replace(linear, weight_decay_style="cosine")
    expected = [0.1, 0.1 + 0.4 * 0.146447, 0.3, 0.5, 0.5]
    assert [weight_decay(cosine, n, SHORT) for n in (0, 25, 50, 100, 101)] == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize(
    "schedule",
    [
        ScheduleConfig(lr=3e-4),
        ScheduleConfig(lr=3e-4, min_lr=3e-5, warmup_steps=99),
        ScheduleConfig(lr=3e-4, style="constant", warmup_steps=10, warmup_init=3e-4),
        ScheduleConfig(lr=3e-4, style="wsd", warmup_steps=10, wsd_decay_steps=90),
        ScheduleConfig(lr=3e-4, style="linear", decay_steps=1000, warmup_steps=500),
        ScheduleConfig(lr=0.0, weight_decay=0.0, end_weight_decay=0.1, weight_decay_style="cosine"),
    ],
)
def test_valid_schedule_has_no_problems(schedule: ScheduleConfig) -> None:
    assert schedule_problems(schedule, 100) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lr": -1.0}, "schedule.lr=-1.0 must be a finite number of at least 0. Use 0.0003."),
        ({"lr": float("nan")}, "schedule.lr=nan must be a finite number"),
        ({"lr": float("inf")}, "schedule.lr=inf must be a finite number"),
        ({"min_lr": 0.1}, "schedule.min_lr=0.1 must be at most schedule.lr=0.001"),
        (
            {"warmup_init": 0.1, "warmup_steps": 1},
            "schedule.warmup_init=0.1 must be at most schedule.lr=0.001",
        ),
        ({"warmup_init": 1e-4}, "schedule.warmup_init=0.0001 has no effect without a warmup"),
        (
            {"style": "cubic"},
            "schedule.style=cubic must be one of constant, linear, cosine, "
            "inverse_square_root, wsd",
        ),
        (
            {"weight_decay_style": "wsd", "end_weight_decay": 0.5},
            "schedule.weight_decay_style=wsd must be one of constant, linear, cosine",
        ),
        (
            {"warmup_steps": -1},
            "schedule.warmup_steps=-1 must be at least 0",
        ),
        (
            {"warmup_steps": 1.5},
            "schedule.warmup_steps=1.5 must be a whole number of steps, or a share from 0",
        ),
        (
            {"warmup_steps": math.nan},
            "warmup_steps=nan must be a finite number of at least 0",
        ),
        (
            {"warmup_steps": 100},
            "schedule.warmup_steps=100 leaves no step after the warmup: it must be less than "
            "train.steps=100. "
            "Set schedule.warmup_steps to 10, or to 0.1 for a tenth of any run.",
        ),
        ({"warmup_steps": 50, "decay_steps": 50}, "it must be less than schedule.decay_steps=50"),
        ({"decay_steps": 0}, "schedule.decay_steps=0 must be at least 1"),
        (
            {"style": "constant", "decay_steps": 9},
            "schedule.decay_steps=9 has no effect with schedule.style=constant",
        ),
        (
            {"style": "constant", "min_lr": 1e-4},
            "schedule.min_lr=0.0001 is never reached with schedule.style=constant",
        ),
        ({"style": "wsd", "warmup_steps": 10}, "Set schedule.wsd_decay_steps, e.g. to 18 (a fifth"),
        (
            {"wsd_decay_steps": 9},
            "schedule.wsd_decay_steps=9 has no effect with schedule.style=cosine",
        ),
        (
            {"style": "wsd", "warmup_steps": 10, "wsd_decay_steps": 91},
            "schedule.wsd_decay_steps=91 must be at most 90",
        ),
        (
            {"weight_decay": -0.1},
            "schedule.weight_decay=-0.1 must be a finite number of at least 0. Use 0.1.",
        ),
        ({"end_weight_decay": 0.5}, "schedule.end_weight_decay=0.5 has no effect with"),
        (
            {"weight_decay_style": "linear"},
            "schedule.weight_decay_style=linear needs schedule.end_weight_decay",
        ),
        (
            {"weight_decay_style": "linear", "end_weight_decay": 0.01},
            "schedule.end_weight_decay=0.01 must be at least schedule.weight_decay=0.1",
        ),
    ],
)
def test_violated_rule_is_reported_with_a_valid_value(changes: dict[str, Any], text: str) -> None:
    schedule = replace(ScheduleConfig(lr=1e-3), **changes)
    problems = range_problems(schedule, "schedule") + schedule_problems(schedule, 100)
    assert len(problems) == 1
    assert text in problems[0]


def test_all_violated_rules_are_reported_together() -> None:
    broken = ScheduleConfig(
        lr=1e-3, min_lr=1.0, warmup_steps=200, wsd_decay_steps=1, weight_decay=-1.0
    )
    assert len(range_problems(broken, "schedule") + schedule_problems(broken, 100)) == 4


def test_groups_follow_the_schedule_between_their_own_rates() -> None:
    schedule = ScheduleConfig(
        lr=1.0,
        min_lr=0.2,
        style="linear",
        warmup_steps=4,
        weight_decay=0.1,
        end_weight_decay=0.5,
        weight_decay_style="linear",
    )
    lengths = schedule_lengths(schedule, batch_schedule=constant_batch_size(2), total_steps=20)
    groups = (
        GroupConfig(name="own", match=("*",), lr=3.0, min_lr=1.0, weight_decay=0.7),
        GroupConfig(name="low", match=("*",), lr=3.0),
        GroupConfig(name="scaled", match=("*",), lr_scale=0.5),
        GroupConfig(name="decayed", match=("*",), weight_decay=0.2, end_weight_decay=0.4),
        GroupConfig(name="less", match=("*",), weight_decay_scale=0.5),
    )
    for samples in (0, 4, 8, 24, 40, 60):
        result = group_rates(groups, schedule, samples, lengths)
        lr, decay = (
            learning_rate(schedule, samples, lengths),
            weight_decay(schedule, samples, lengths),
        )
        assert result["own"].lr == pytest.approx(
            min(1.0, samples / 8) * 3 if samples <= 8 else 1 + (lr - 0.2) * 2.5
        )
        assert result["low"].lr == pytest.approx(
            samples / 8 * 3 if samples <= 8 else 0.2 + (lr - 0.2) * 3.5
        )
        assert result["scaled"] == (lr * 0.5, decay) and result["less"] == (lr, decay * 0.5)
        assert result["own"].weight_decay == 0.7
        assert result["decayed"].weight_decay == pytest.approx(0.2 + 0.2 * min(1.0, samples / 40))
    assert group_rates((), schedule, 0, lengths) == {}
