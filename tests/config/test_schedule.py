"""Tests of megalith/config/optim.py."""

from dataclasses import FrozenInstanceError, replace
from typing import get_args

import pytest

from megalith.config.fields import describe
from megalith.config.optim import DecayStyle, ScheduleConfig, WeightDecayStyle, WsdDecayStyle
from megalith.optim.schedule import ScheduleLengths, learning_rate, schedule_problems, weight_decay

LENGTHS = ScheduleLengths(warmup=0, decay=100, wsd_decay=50, total=100)


def test_the_learning_rate_is_all_that_must_be_given() -> None:
    assert [setting.path for setting in describe(ScheduleConfig) if setting.required] == ["lr"]
    assert schedule_problems(ScheduleConfig(lr=1e-3), 2) == []


def test_every_setting_is_explained() -> None:
    assert [setting.path for setting in describe(ScheduleConfig) if not setting.doc] == []


def test_schedule_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ScheduleConfig(lr=1.0).lr = 2.0  # type: ignore[misc]  # the fault this test is about


@pytest.mark.parametrize("fall", get_args(WsdDecayStyle))
@pytest.mark.parametrize("style", get_args(DecayStyle))
def test_every_style_that_may_be_chosen_gives_a_rate(
    style: DecayStyle, fall: WsdDecayStyle
) -> None:
    schedule = ScheduleConfig(lr=1.0, style=style, wsd_decay_style=fall)
    assert 0.0 <= learning_rate(schedule, 75, LENGTHS) <= 1.0


@pytest.mark.parametrize("style", get_args(WeightDecayStyle))
def test_every_weight_decay_style_gives_a_weight_decay(style: WeightDecayStyle) -> None:
    schedule = ScheduleConfig(lr=1.0, weight_decay=0.1, weight_decay_style=style)
    end = None if style == "constant" else 0.2
    assert 0.1 <= weight_decay(replace(schedule, end_weight_decay=end), 75, LENGTHS) <= 0.2
